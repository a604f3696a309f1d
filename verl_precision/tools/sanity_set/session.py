"""A sanity set from end to end: problems and prompts, responses, files."""

from functools import partial
from typing import Any

from rich.console import Console

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.seeds import response_seed
from verl_precision.tools.engines.engine import Request, Response, SamplerSettings
from verl_precision.tools.engines.model import Model, find_model
from verl_precision.tools.engines.vllm_sampler import VllmEngine
from verl_precision.tools.jobs.job import Job, Tasks
from verl_precision.tools.jobs.journal import Journal
from verl_precision.tools.jobs.problems import (
    Problem,
    Reward,
    load_reward,
    problem_tokens,
    read_data_set,
    recorded_judgement,
)
from verl_precision.tools.sanity_set.results import Summary, content, summarise, table, write_figure
from verl_precision.tools.sanity_set.schedule import Schedule
from verl_precision.tools.sanity_set.settings import SanitySet

OUTPUTS = ("kept.parquet", "summary.json", "accuracy.png")
_FIELDS = {"problem": str, "response": int, "correct": bool, "tokens": int}


class _Responses(Schedule, Tasks):
    """What the schedule hands out: each response is judged, written to the journal, and counted."""

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
        correct = self._reward.is_correct(self._problems[response.problem], response.text or "")
        counted: dict[str, Any] = dict(zip(_FIELDS, (*response.key, correct, response.length), strict=True))
        self._journal.append({**counted, "text": response.text if self._job.keep_text else None})
        self.count(**counted)


def build_sanity_set(settings: SanitySet, console: Console) -> Summary:
    """Draw, decide, and write kept.parquet, summary.json and accuracy.png; refuse a window that keeps no problem.

    Options that cannot work are refused before an engine starts. If an engine fails, what was drawn is kept.
    """
    job, data = Job(settings, console), read_data_set(settings.data)
    reward = load_reward(settings.reward, settings.pass_score)
    problems = reward.readable(data.problems)
    model = find_model(settings.model)
    prompts = _prompts(settings, model, problems)
    recorded = recorded_judgement(settings, reward) | {"low": str(settings.low), "high": str(settings.high)}
    recorded |= {"data": data.digest, "responses_from": model.fingerprint, "temperature": 1.0, "top_p": 1.0}
    with job.journal(recorded, OUTPUTS) as journal:
        schedule = _Responses(settings, journal, reward, problems, prompts)
        console.print(f"{len(prompts)} problems", highlight=False)
        sampler = SamplerSettings(
            model=settings.model,
            dtype=settings.dtype,
            max_model_len=settings.max_prompt_length + settings.max_response_length,
            more={"generation_config": "vllm"},  # a model's own may name further tokens that end a response
        )
        job.complete(f"sample-{settings.dtype}", [schedule], partial(VllmEngine, sampler))
        unreadable, overlong = len(data.problems) - len(problems), len(problems) - len(prompts)
        summary = summarise(data, schedule, unreadable, overlong)
        job.write(content(summary, schedule))
        write_figure(job.folder / "accuracy.png", schedule, f"{settings.title} on {settings.data.stem}")
        console.print(table(summary))
        if not summary.kept:
            problem = f"{settings.window} keeps none of {len(schedule.tallies)} problems, of which so many have an "
            problem += f"accuracy from 0 to 10%, to 20%, ...: {', '.join(map(str, summary.histogram))}"
            remedy = "Choose a window where there are problems; or check --reward and the prompts if all are 0."
            raise ConfigurationError(problem, remedy=remedy)
        data.write(job.folder / "kept.parquet", schedule.kept())
    job.show_written(OUTPUTS)
    return summary


def _prompts(settings: SanitySet, model: Model, problems: list[Problem]) -> dict[str, tuple[int, ...]]:
    """Return the prompts that are short enough, in tokens."""
    model.require_dtypes("--dtype", [settings.dtype])
    prompts = problem_tokens(problems, model)
    lengths, most = [len(ids) for ids in prompts.values()], settings.max_prompt_length
    if min(lengths) > most:
        allowed = f"{min(lengths)} or more; the longest has {max(lengths)} tokens"
        raise ConfigurationError("every prompt is longer", setting="--max-prompt-length", value=most, allowed=allowed)
    return {name: ids for name, ids in prompts.items() if len(ids) <= most}
