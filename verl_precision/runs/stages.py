"""What verl is doing, read from the lines of its log.

Start-up takes over a minute on two cores; these lines are the only sign of life until the first step.
"""

import re

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
