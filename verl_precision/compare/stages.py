"""What verl is doing, read from the lines of its log.

Start-up takes over a minute on two cores; these lines are the only sign of life until the first step.
"""

import re
from collections.abc import Iterable

# In the order in which a run passes them: (pattern in verl's, Ray's or vLLM's output, what to tell the user).
STAGES: tuple[tuple[str, str], ...] = (
    (r"verl_precision \S+ loaded into verl", "verl and the plugin are loaded"),
    (r"Started a local Ray instance", "Ray has started; trainer process is importing verl"),
    (r"dataloader initialized", "data is loaded; workers are importing torch"),
    (r"\(WorkerDict pid=", "FSDP2 worker is building the model"),
    (r"\(vLLMHttpServer pid=", "vLLM server is starting"),
    (r"\(EngineCore|\(Worker ", "vLLM is loading the model"),
    (r"\(AgentLoopWorker\w* pid=", "weights are synced to vLLM; agent loop is starting"),
)
TOTAL_STEPS = re.compile(r"Training Progress:\s+\d+%\|.*?\|\s*\d+/(\d+)")

# Noise that would bury the reason of a failure: (Ray repeats, progress bars, known harmless warnings).
_NOISE = re.compile(
    r"target_num_threads|Triton is installed|Training Progress|is_fx_tracing|repeated \d+x|requires torchvision|"
    r"Failed to load weights|blocking ray\.get|^\s*$|FutureWarning|DeprecationWarning|shared_memory objects"
)
_REASON = re.compile(r"verl_precision: |Error\b|Exception\b|error:|Could not|FAILED|Killed|SIGBUS|No space")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def stage_of(line: str, current: int) -> int:
    """Return the index of the furthest stage this line shows to be reached, at least `current`.

    Args:
        line: one line of the log.
        current: index reached so far, -1 before the first stage.
    """
    for index in range(len(STAGES) - 1, current, -1):
        if re.search(STAGES[index][0], line):
            return index
    return current


def relevant_lines(lines: Iterable[str], count: int = 20) -> list[str]:
    """Return the last lines that say why a run failed: errors if there are any, else the end of the log.

    Args:
        lines: the log.
        count: lines to return at most.
    """
    clean = [_ANSI.sub("", line).rstrip() for line in lines]
    clean = [line for line in clean if not _NOISE.search(line)]
    reasons = [line for line in clean if _REASON.search(line)]
    return (reasons or clean)[-count:]
