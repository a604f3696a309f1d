"""A sanity set from end to end: checks, resume, engines, progress, files."""

from contextlib import closing
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from rich.console import Console

from verl_precision.errors import ConfigurationError
from verl_precision.integration.reward import Reward, load_reward
from verl_precision.integration.vllm_sampler import VllmEngine
from verl_precision.sampling.draw import start_engine, work_through
from verl_precision.sampling.engine import Engine, Request, Response, response_seed
from verl_precision.sampling.journal import open_journal
from verl_precision.sampling.model import find_model, tokenize
from verl_precision.sampling.problems import DataSet, Problem, read_data_set
from verl_precision.sampling.progress import shown
from verl_precision.sanity_set.recorded import RecordedEngine
from verl_precision.sanity_set.results import Summary, histogram_text, summarise, table, write_figure, write_summary
from verl_precision.sanity_set.schedule import Schedule
from verl_precision.sanity_set.verdict import Window
from verl_precision.settings import command_option, settings

OUTPUTS = ("kept.parquet", "summary.json", "accuracy.png")
_FIELDS = {"problem": str, "response": int, "correct": bool, "tokens": int}


@settings(command_option)
class Options:
    """What to do; the command line explains each (`verl-precision sanity-set --help`)."""

    data: Path
    model: str
    output: Path
    window: Window
    reward: str = "verl"
    correct_at: float = 1.0
    dtype: Literal["fp16", "bf16", "fp32"] = "fp16"
    max_prompt_length: int = Field(default=1024, ge=1)
    max_response_length: int = Field(default=6976, ge=1)
    seed: int = 0
    in_flight: int = Field(default=512, ge=1)
    early_stopping: bool = True
    keep_text: bool = False
    recorded: Path | None = Field(default=None, title="--responses")
    ray_address: str | None = None
    engines: int | None = Field(default=None, ge=1)

    def __post_init__(self) -> None:
        """Refuse options that contradict each other."""
        if self.engines is not None and self.ray_address is None:
            raise ConfigurationError(
                f"--engines {self.engines} needs --ray-address: without Ray there is one engine. Give both or none."
            )
        if self.recorded is not None and self.ray_address is not None:
            raise ConfigurationError("--responses replays a file and needs no --ray-address. Give one of them.")


def build_sanity_set(options: Options, console: Console) -> Summary:
    """Draw, decide, and write kept.parquet, summary.json and accuracy.png.

    Args:
        options: What to do.
        console: Where progress and result are shown.

    Returns:
        The result in numbers.

    Raises:
        ConfigurationError: If an option cannot work, before an engine starts; and, with the histogram, if no problem is
            kept.
        RunFailedError: If an engine fails; what was drawn is kept.
    """
    data = read_data_set(options.data)
    reward = load_reward(options.reward, options.correct_at)
    unreadable = {problem.identifier for problem in reward.unreadable(data.problems)}
    problems = {p.identifier: p for p in data.problems if p.identifier not in unreadable}
    origin, token_ids = _origin(options, list(problems.values()))
    recorded = _recorded_settings(options, data, reward, origin)

    schedule = Schedule(token_ids, options.window, options.early_stopping)
    with closing(open_journal(options.output, recorded, OUTPUTS)) as journal:

        def count(record: dict[str, Any]) -> None:
            schedule.record(record["problem"], record["response"], record["correct"], record["tokens"])

        def record(response: Response) -> None:
            correct, text = response.correct, response.text or ""
            if correct is None:
                correct = reward.is_correct(problems[response.problem], text)
            judged: dict[str, Any] = {"problem": response.problem, "response": response.response, "correct": correct}
            judged |= {"tokens": response.tokens, "text": response.text if options.keep_text else None}
            journal.append(judged)
            count(judged)

        def request(problem: str, response: int) -> Request:
            seed = response_seed(options.seed, problem, response)
            return Request(problem, response, token_ids[problem], options.max_response_length, seed)

        def next_requests(limit: int) -> list[Request]:
            return [request(*key) for key in schedule.next_requests(limit)]

        for _, earlier in journal.records(_FIELDS):
            count(earlier)
        if drawn := schedule.drawn:
            torn = "; a torn last line was cut off" if journal.torn else ""
            console.print(f"resuming: {drawn} responses are in the journal{torn}", highlight=False)
        if not schedule.finished:
            console.print(f"{len(token_ids)} problems; starting the engine", highlight=False)
            progress = shown(
                len(token_ids),
                lambda: schedule.decided,
                lambda: f"problems decided, {len(schedule.kept())} kept, {schedule.drawn} responses",
                console,
            )
            with closing(_engine(options)) as engine, progress as on_progress:
                work_through(engine, next_requests, record, lambda: schedule.finished, options.in_flight, on_progress)
        overlong = len(problems) - len(token_ids)
        return _write(options, data, schedule, recorded, summarise(data, schedule, len(unreadable), overlong), console)


def _origin(options: Options, problems: list[Problem]) -> tuple[str, dict[str, tuple[int, ...]]]:
    """Return what the responses come from, for the settings, and the prompts that are short enough, in tokens."""
    if options.recorded is not None:
        if not options.recorded.is_file():
            raise ConfigurationError(
                f"--responses {options.recorded}: no such file. Allowed: a journal.jsonl. Check the path."
            )
        digest = sha256(options.recorded.read_bytes()).hexdigest()[:16]
        return f"recorded {digest}", {problem.identifier: () for problem in problems}
    model = find_model(options.model)
    model.require_dtypes("--dtype", [options.dtype])
    prompts = tokenize([problem.prompt for problem in problems], model)
    fitting = {
        problem.identifier: ids
        for problem, ids in zip(problems, prompts, strict=True)
        if len(ids) <= options.max_prompt_length
    }
    if not fitting:
        raise ConfigurationError(
            f"--max-prompt-length {options.max_prompt_length}: every prompt is longer. Allowed: "
            f"{min(map(len, prompts))} or more; the longest has {max(map(len, prompts))} tokens. Raise it."
        )
    return model.fingerprint, fitting


def _recorded_settings(options: Options, data: DataSet, reward: Reward, origin: str) -> dict[str, Any]:
    """Return everything that decides which responses are drawn and how they are judged."""
    return {
        "data": data.digest,
        "model": options.model,
        "responses_from": origin,
        "dtype": options.dtype,
        "responses_per_problem": options.window.responses,
        "low": str(options.window.low),
        "high": str(options.window.high),
        "reward": reward.name,
        "correct_at": reward.correct_at,
        "max_prompt_length": options.max_prompt_length,
        "max_response_length": options.max_response_length,
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": options.seed,
    }


def _engine(options: Options) -> Engine:
    if options.recorded is not None:
        return RecordedEngine(options.recorded)
    length = options.max_prompt_length + options.max_response_length
    # generation_config="vllm": a model's own generation_config.json may name further tokens that end a response.
    build = partial(VllmEngine, options.model, options.dtype, length, generation_config="vllm")
    return start_engine(build, f"sample-{options.dtype}", options.output, options.ray_address, options.engines)


def _write(
    options: Options, data: DataSet, schedule: Schedule, settings: dict, summary: Summary, console: Console
) -> Summary:
    folder = options.output
    write_summary(folder / "summary.json", summary, schedule, settings)
    write_figure(folder / "accuracy.png", schedule, f"{Path(options.model).name} on {options.data.stem}")
    console.print(table(summary))
    if not summary.kept:
        window = options.window
        raise ConfigurationError(
            f"--low {float(window.low):g} --high {float(window.high):g} keeps none of {len(schedule.tallies)} "
            f"problems. Accuracies found:\n{histogram_text(summary.histogram)}\n"
            "Choose a window where there are problems, or check --reward and the prompts if all accuracies are 0."
        )
    data.write(folder / "kept.parquet", schedule.kept())
    console.print(f"wrote {', '.join(OUTPUTS)} to {folder}", highlight=False, soft_wrap=True)
    return summary
