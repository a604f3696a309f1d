"""A sanity set from end to end: problems and prompts, responses, files."""

from collections import deque
from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from rich.console import Console

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.seeds import response_seed
from verl_precision.tools.engines.engine import Request, Response
from verl_precision.tools.engines.model import find_model, tokenize
from verl_precision.tools.engines.vllm_sampler import VllmEngine
from verl_precision.tools.jobs.frame import Frame, complete
from verl_precision.tools.jobs.journal import Journal, read_lines, wrong_field
from verl_precision.tools.jobs.problems import Problem, read_data_set
from verl_precision.tools.jobs.reward import Reward, load_reward, recorded_judgement
from verl_precision.tools.sanity_set.results import Summary, content, histogram_text, summarise, table, write_figure
from verl_precision.tools.sanity_set.schedule import Schedule
from verl_precision.tools.sanity_set.settings import SanitySet

OUTPUTS = ("kept.parquet", "summary.json", "accuracy.png")
_FIELDS = {"problem": str, "response": int, "correct": bool, "tokens": int}


class _ResponseJob(Schedule):
    """The schedule as `Work`: each response is judged, written to the journal, and counted."""

    def __init__(
        self, job: SanitySet, journal: Journal, reward: Reward, problems: list[Problem], prompts: dict[str, tuple]
    ) -> None:
        super().__init__(prompts, job.window, early_stopping=not job.all_responses)
        self._job, self._journal, self._reward, self._prompts = job, journal, reward, prompts
        self._problems = {problem.identifier: problem for problem in problems}
        for _, record in journal.records(_FIELDS):
            self.count(*(record[name] for name in _FIELDS))

    def progress(self) -> str:
        return f"problems decided, {len(self.kept())} kept, {self.drawn} responses"

    def next_requests(self, limit: int) -> list[Request]:
        seed, max_tokens = self._job.seed, self._job.max_response_length
        return [
            Request(problem, response, self._prompts[problem], max_tokens, response_seed(seed, problem, response))
            for problem, response in self.next_keys(limit)
        ]

    def record(self, response: Response) -> None:
        correct, text = response.correct, response.text
        if correct is None:
            correct = self._reward.is_correct(self._problems[response.problem], text or "")
        counted: dict[str, Any] = {"problem": response.problem, "response": response.response}
        counted |= {"correct": correct, "tokens": response.length}
        self._journal.append({**counted, "text": text if self._job.keep_text else None})
        self.count(**counted)


class RecordedEngine:
    """Replays responses from a file: a journal of another job, or any file of such lines."""

    engines = 1

    def __init__(self, path: Path) -> None:
        """Read a JSONL file; a line that lacks problem, response, tokens, and correct or text is refused."""
        self._path = path
        self._recorded: dict[tuple[str, int], Response] = {}
        self._waiting: deque[Response] = deque()
        for number, _, line in read_lines(path):
            if "settings" in line:
                continue
            judged: dict[str, type] = {"correct": bool} if "correct" in line else {"text": str}
            if wrong := wrong_field(line, {"problem": str, "response": int, "tokens": int, **judged}):
                allowed = "problem, response, tokens, and correct or text, as this command records them"
                raise ConfigurationError(f"--responses {path}, line {number}: {wrong}", allowed=allowed)
            key = line["problem"], line["response"]
            self._recorded[key] = Response(*key, line["tokens"], line.get("text"), line.get("correct"))

    def submit(self, requests: Sequence[Request]) -> None:
        """Look each up; one that was not recorded is refused."""
        for request in requests:
            if request.key not in self._recorded:
                raise ConfigurationError(
                    f"--responses {self._path}: response {request.response} to problem {request.problem} is not in it",
                    allowed="as many recorded responses to each problem as its verdict needs",
                    remedy="Record with --all-responses, of the same data set.",
                )
            self._waiting.append(self._recorded[request.key])

    def poll(self) -> list[Response]:
        """Return everything asked for since."""
        return [self._waiting.popleft() for _ in range(len(self._waiting))]

    def close(self) -> None:
        """Nothing is held."""


def build_sanity_set(job: SanitySet, console: Console) -> Summary:
    """Draw, decide, and write kept.parquet, summary.json and accuracy.png; refuse a window that keeps no problem.

    Options that cannot work are refused before an engine starts. If an engine fails, what was drawn is kept.
    """
    frame, data = Frame(job, console), read_data_set(job.data)
    reward = load_reward(job.reward, job.pass_score)
    problems = reward.readable(data.problems)
    origin, prompts = _origin(job, problems)
    settings = recorded_judgement(job, reward) | {"low": str(job.low), "high": str(job.high)}
    settings |= {"data": data.digest, "responses_from": origin, "temperature": 1.0, "top_p": 1.0}
    with frame.journal(settings, OUTPUTS) as journal:
        schedule = _ResponseJob(job, journal, reward, problems, prompts)
        console.print(f"{len(prompts)} problems", highlight=False)
        if job.replayed is not None:
            complete([schedule], partial(RecordedEngine, job.replayed), job.in_flight, console)
        else:
            length = job.max_prompt_length + job.max_response_length
            # A model's own generation_config.json may name further tokens that end a response.
            build = partial(VllmEngine, job.model, job.dtype, length, generation_config="vllm")
            frame.complete(f"sample-{job.dtype}", [schedule], build, job.engines)
        unreadable, overlong = len(data.problems) - len(problems), len(problems) - len(prompts)
        summary = summarise(data, schedule, unreadable, overlong)
        frame.write(content(summary, schedule))
        write_figure(job.folder / "accuracy.png", schedule, f"{Path(job.model).name} on {job.data.stem}")
        console.print(table(summary))
        if not summary.kept:
            raise ConfigurationError(
                f"{job.window} keeps none of {len(schedule.tallies)} problems. Accuracies found:\n"
                f"{histogram_text(summary.histogram)}\n"
                "Choose a window where there are problems, or check --reward and the prompts if all accuracies are 0."
            )
        data.write(job.folder / "kept.parquet", schedule.kept())
    frame.show_written(OUTPUTS)
    return summary


def _origin(job: SanitySet, problems: Sequence[Problem]) -> tuple[str, dict[str, tuple[int, ...]]]:
    """Return what the responses come from, for the settings, and the prompts that are short enough, in tokens."""
    if job.replayed is not None:
        if not job.replayed.is_file():
            raise ConfigurationError(f"--responses {job.replayed}: no such file", allowed="a journal.jsonl")
        digest = sha256(job.replayed.read_bytes()).hexdigest()[:16]
        return f"recorded {digest}", {problem.identifier: () for problem in problems}
    model = find_model(job.model)
    model.require_dtypes("--dtype", [job.dtype])
    prompts = tokenize([problem.prompt for problem in problems], model)
    lengths, most = [len(ids) for ids in prompts], job.max_prompt_length
    if min(lengths) > most:
        allowed = f"{min(lengths)} or more; the longest has {max(lengths)} tokens"
        raise ConfigurationError("every prompt is longer", setting="--max-prompt-length", value=most, allowed=allowed)
    named = zip((problem.identifier for problem in problems), prompts, strict=True)
    return model.fingerprint, {name: ids for name, ids in named if len(ids) <= most}
