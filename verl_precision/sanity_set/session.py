"""A sanity set from end to end: checks, resume, engines, progress, files."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from verl_precision.errors import ConfigurationError
from verl_precision.sanity_set.journal import open_journal
from verl_precision.sanity_set.model import model_fingerprint
from verl_precision.sanity_set.problems import DataSet, read_data_set
from verl_precision.sanity_set.results import Summary, histogram_text, summarise, table, write_figure, write_summary
from verl_precision.sanity_set.reward import Reward, load_reward
from verl_precision.sanity_set.run import Prompts, draw, tokenize
from verl_precision.sanity_set.schedule import Schedule
from verl_precision.sanity_set.source import RecordedSource, Source
from verl_precision.sanity_set.verdict import Window

REFRESH = 0.5  # seconds between two updates of the bar
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True)
class Options:
    """What to do; the command line explains each (`verl-precision sanity-set --help`)."""

    data: Path
    model: str
    output: Path
    window: Window
    reward: str = "verl"
    correct_at: float = 1.0
    dtype: str = "fp16"
    max_prompt_length: int = 1024
    max_response_length: int = 6976
    seed: int = 0
    in_flight: int = 512
    early_stopping: bool = True
    keep_text: bool = False
    recorded: Path | None = None
    ray_address: str | None = None
    engines: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if self.dtype not in DTYPES:
            raise ConfigurationError(f"--dtype {self.dtype}: allowed: {', '.join(DTYPES)}. The paper's is fp16.")
        if self.engines is not None and self.ray_address is None:
            raise ConfigurationError(f"--engines {self.engines} needs --ray-address: without Ray there is one engine.")
        if self.recorded is not None and self.ray_address is not None:
            raise ConfigurationError("--responses replays a file and needs no --ray-address. Give one of them.")


def build_sanity_set(options: Options, console: Console) -> Summary:
    """Draw, decide, and write kept.parquet, summary.json and accuracy.png.

    Args:
        options: what to do.
        console: where progress and result are shown.

    Returns:
        The result in numbers.

    Raises:
        ConfigurationError: for anything wrong with the options, before an engine starts; and, with the histogram, if
            no problem is kept.
    """
    data = read_data_set(options.data)
    reward = load_reward(options.reward, options.correct_at)
    unreadable = {problem.identifier for problem in reward.unreadable(data.problems)}
    problems = {p.identifier: p for p in data.problems if p.identifier not in unreadable}
    origin, token_ids = _origin(options, list(problems.values()))
    settings = _settings(options, data, reward, origin)

    schedule = Schedule(token_ids, options.window, options.early_stopping)
    with closing(open_journal(options.output / "journal.jsonl", settings)) as journal:
        for sample in journal.samples:
            schedule.record(sample.problem, sample.response, sample.correct, sample.tokens)
        if journal.samples:
            torn = "; a torn last line was cut off" if journal.torn else ""
            console.print(f"resuming: {len(journal.samples)} responses are in the journal{torn}", highlight=False)
        if not schedule.finished:
            console.print(f"{len(token_ids)} problems; starting the engine", highlight=False)
            prompts = Prompts(token_ids, options.max_response_length, options.seed)
            with closing(_source(options)) as source, _shown(schedule, console) as on_progress:
                in_flight = options.in_flight * getattr(source, "engines", 1)
                draw(schedule, source, prompts, problems, reward, journal, in_flight, options.keep_text, on_progress)
    overlong = len(problems) - len(token_ids)
    return _write(options, data, schedule, settings, summarise(data, schedule, len(unreadable), overlong), console)


def _origin(options: Options, problems: list) -> tuple[str, dict[str, tuple[int, ...]]]:
    """Return what the responses come from, for the settings, and the prompts; the model is looked for here."""
    if options.recorded is not None:
        if not options.recorded.is_file():
            raise ConfigurationError(f"--responses {options.recorded}: no such file. Allowed: a journal.jsonl.")
        digest = sha256(options.recorded.read_bytes()).hexdigest()[:16]
        return f"recorded {digest}", {problem.identifier: () for problem in problems}
    fingerprint = model_fingerprint(options.model)
    return fingerprint, tokenize(problems, options.model, options.max_prompt_length)


def _settings(options: Options, data: DataSet, reward: Reward, origin: str) -> dict[str, Any]:
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


def _source(options: Options) -> Source:
    if options.recorded is not None:
        return RecordedSource(options.recorded)
    from verl_precision.sanity_set.vllm_source import VllmSource

    length = options.max_prompt_length + options.max_response_length
    build = partial(VllmSource, options.model, DTYPES[options.dtype], length)
    if options.ray_address is None:
        return build()
    from verl_precision.sanity_set.ray_source import RaySource

    return RaySource(build, options.ray_address, options.engines)


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
    names = ("kept.parquet", "summary.json", "accuracy.png")
    console.print(f"wrote {', '.join(names)} to {folder}", highlight=False, soft_wrap=True)
    return summary


@contextmanager
def _shown(schedule: Schedule, console: Console) -> Iterator[Callable[[Schedule], None]]:
    """Show progress: a live bar on a terminal, a line each tenth elsewhere."""
    total = len(schedule.tallies)

    def text(now: Schedule) -> str:
        responses = sum(tally.drawn for tally in now.tallies.values())
        return f"{len(now.kept())} kept, {responses} responses"

    if not console.is_terminal:
        last = [schedule.decided * 10 // total]

        def line(now: Schedule) -> None:
            if now.decided * 10 // total != last[0]:
                last[0] = now.decided * 10 // total
                console.print(f"{now.decided}/{total} problems decided, {text(now)}", highlight=False)

        yield line
        return
    columns = (TextColumn("decided"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as bar:
        task = bar.add_task(text(schedule), total=total, completed=schedule.decided)
        shown = [monotonic()]

        def move(now: Schedule) -> None:
            # Counting goes over all problems, and responses come by the thousand.
            if now.finished or monotonic() - shown[0] > REFRESH:
                shown[0] = monotonic()
                bar.update(task, completed=now.decided, description=text(now))

        yield move
