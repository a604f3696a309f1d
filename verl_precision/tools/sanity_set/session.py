"""A sanity set from end to end: problems and prompts, responses, files."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import Console

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.seeds import response_seed
from verl_precision.tools.engines.engine import Request, Response
from verl_precision.tools.engines.model import Model, find_model, tokenize
from verl_precision.tools.engines.vllm_sampler import VllmEngine
from verl_precision.tools.jobs.frame import Frame
from verl_precision.tools.jobs.journal import Journal
from verl_precision.tools.jobs.problems import Problem, read_data_set
from verl_precision.tools.jobs.reward import Reward, load_reward, recorded_judgement
from verl_precision.tools.sanity_set.results import Summary, content, summarise, table, write_figure
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
        correct = self._reward.is_correct(self._problems[response.problem], response.text or "")
        counted: dict[str, Any] = {"problem": response.problem, "response": response.response}
        counted |= {"correct": correct, "tokens": response.length}
        self._journal.append({**counted, "text": response.text if self._job.keep_text else None})
        self.count(**counted)


def build_sanity_set(job: SanitySet, console: Console) -> Summary:
    """Draw, decide, and write kept.parquet, summary.json and accuracy.png; refuse a window that keeps no problem.

    Options that cannot work are refused before an engine starts. If an engine fails, what was drawn is kept.
    """
    frame, data = Frame(job, console), read_data_set(job.data)
    reward = load_reward(job.reward, job.pass_score)
    problems = reward.readable(data.problems)
    model = find_model(job.model)
    prompts = _prompts(job, model, problems)
    settings = recorded_judgement(job, reward) | {"low": str(job.low), "high": str(job.high)}
    settings |= {"data": data.digest, "responses_from": model.fingerprint, "temperature": 1.0, "top_p": 1.0}
    with frame.journal(settings, OUTPUTS) as journal:
        schedule = _ResponseJob(job, journal, reward, problems, prompts)
        console.print(f"{len(prompts)} problems", highlight=False)
        length = job.max_prompt_length + job.max_response_length
        # A model's own generation_config.json may name further tokens that end a response.
        build = partial(VllmEngine, job.model, job.dtype, length, generation_config="vllm")
        frame.complete(f"sample-{job.dtype}", [schedule], build)
        unreadable, overlong = len(data.problems) - len(problems), len(problems) - len(prompts)
        summary = summarise(data, schedule, unreadable, overlong)
        frame.write(content(summary, schedule))
        write_figure(job.folder / "accuracy.png", schedule, f"{job.title} on {job.data.stem}")
        console.print(table(summary))
        if not summary.kept:
            problem = f"{job.window} keeps none of {len(schedule.tallies)} problems, of which so many have an accuracy "
            problem += f"from 0 to 10%, to 20%, ...: {', '.join(map(str, summary.histogram))}"
            remedy = "Choose a window where there are problems; or check --reward and the prompts if all are 0."
            raise ConfigurationError(problem, remedy=remedy)
        data.write(job.folder / "kept.parquet", schedule.kept())
    frame.show_written(OUTPUTS)
    return summary


def _prompts(job: SanitySet, model: Model, problems: Sequence[Problem]) -> dict[str, tuple[int, ...]]:
    """Return the prompts that are short enough, in tokens."""
    model.require_dtypes("--dtype", [job.dtype])
    prompts = tokenize([problem.prompt for problem in problems], model)
    lengths, most = [len(ids) for ids in prompts], job.max_prompt_length
    if min(lengths) > most:
        allowed = f"{min(lengths)} or more; the longest has {max(lengths)} tokens"
        raise ConfigurationError("every prompt is longer", setting="--max-prompt-length", value=most, allowed=allowed)
    named = zip((problem.identifier for problem in problems), prompts, strict=True)
    return {name: ids for name, ids in named if len(ids) <= most}
