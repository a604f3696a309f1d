"""A sanity set from end to end: checks, resume, engines, progress, files."""

from contextlib import closing
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.console import Console

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.seeds import response_seed
from verl_precision.base.settings import command_option, settings
from verl_precision.tools.engines.engine import Dtype, Engine, Request, Response
from verl_precision.tools.engines.model import find_model, tokenize
from verl_precision.tools.engines.vllm_sampler import VllmEngine
from verl_precision.tools.jobs.journal import Journal, open_journal
from verl_precision.tools.jobs.problems import DataSet, Problem, read_data_set
from verl_precision.tools.jobs.reward import Reward, load_reward
from verl_precision.tools.jobs.work import complete, start_engine
from verl_precision.tools.sanity_set.replayed import RecordedEngine
from verl_precision.tools.sanity_set.results import (
    Summary,
    histogram_text,
    summarise,
    table,
    write_figure,
    write_summary,
)
from verl_precision.tools.sanity_set.schedule import Schedule
from verl_precision.tools.sanity_set.window import Window

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
    pass_score: float = 1.0
    dtype: Dtype = "fp16"
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


class _Drawing(Schedule):
    """The schedule as `Work`: each response is judged, written to the journal, and counted."""

    def __init__(
        self, options: Options, journal: Journal, reward: Reward, problems: list[Problem], prompts: dict[str, tuple]
    ) -> None:
        super().__init__(prompts, options.window, options.early_stopping)
        self._options, self._journal, self._reward, self._prompts = options, journal, reward, prompts
        self._problems = {problem.identifier: problem for problem in problems}
        for _, record in journal.records(_FIELDS):
            self.count(*(record[name] for name in _FIELDS))

    def progress(self) -> str:
        return f"problems decided, {len(self.kept())} kept, {self.drawn} responses"

    def next_requests(self, limit: int) -> list[Request]:
        seed, max_tokens = self._options.seed, self._options.max_response_length
        return [
            Request(problem, response, self._prompts[problem], max_tokens, response_seed(seed, problem, response))
            for problem, response in self.next_keys(limit)
        ]

    def record(self, response: Response) -> None:
        correct, text = response.correct, response.text
        if correct is None:
            correct = self._reward.is_correct(self._problems[response.problem], text or "")
        counted: dict[str, Any] = {"problem": response.problem, "response": response.response}
        counted |= {"correct": correct, "tokens": response.tokens}
        self._journal.append({**counted, "text": text if self._options.keep_text else None})
        self.count(**counted)


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
    reward = load_reward(options.reward, options.pass_score)
    unreadable = {problem.identifier for problem in reward.unreadable(data.problems)}
    problems = [problem for problem in data.problems if problem.identifier not in unreadable]
    origin, prompts = _origin(options, problems)
    settings = _recorded_settings(options, data, reward, origin)
    with closing(open_journal(options.output, settings, OUTPUTS)) as journal:
        schedule = _Drawing(options, journal, reward, problems, prompts)
        journal.show_resumed(schedule.drawn, console)
        console.print(f"{len(prompts)} problems", highlight=False)
        complete([schedule], lambda: _engine(options), options.in_flight, console)
        summary = summarise(data, schedule, len(unreadable), overlong=len(problems) - len(prompts))
        _write(options, data, schedule, settings, summary, console)
    return summary


def _origin(options: Options, problems: list[Problem]) -> tuple[str, dict[str, tuple[int, ...]]]:
    """Return what the responses come from, for the settings, and the prompts that are short enough, in tokens."""
    if options.recorded is not None:
        if not options.recorded.is_file():
            raise ConfigurationError(f"--responses {options.recorded}: no such file", allowed="a journal.jsonl")
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
        lengths = [len(ids) for ids in prompts]
        option, most = "--max-prompt-length", options.max_prompt_length
        allowed = f"{min(lengths)} or more; the longest has {max(lengths)} tokens"
        raise ConfigurationError("every prompt is longer", setting=option, value=most, allowed=allowed)
    return model.fingerprint, fitting


def _recorded_settings(options: Options, data: DataSet, reward: Reward, origin: str) -> dict[str, Any]:
    """Return everything that decides which responses are drawn and how they are judged."""
    as_given = ("model", "dtype", "max_prompt_length", "max_response_length", "seed")
    return {
        **{name: getattr(options, name) for name in as_given},
        "correct_at": options.pass_score,
        "data": data.digest,
        "responses_from": origin,
        "responses_per_problem": options.window.responses,
        "low": str(options.window.low),
        "high": str(options.window.high),
        "reward": reward.name,
        "temperature": 1.0,
        "top_p": 1.0,
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
) -> None:
    folder = options.output
    write_summary(folder / "summary.json", summary, schedule, settings)
    write_figure(folder / "accuracy.png", schedule, f"{Path(options.model).name} on {options.data.stem}")
    console.print(table(summary))
    if not summary.kept:
        raise ConfigurationError(
            f"{options.window} keeps none of {len(schedule.tallies)} problems. Accuracies found:\n"
            f"{histogram_text(summary.histogram)}\n"
            "Choose a window where there are problems, or check --reward and the prompts if all accuracies are 0."
        )
    data.write(folder / "kept.parquet", schedule.kept())
    console.print(f"wrote {', '.join(OUTPUTS)} to {folder}", highlight=False, soft_wrap=True)
