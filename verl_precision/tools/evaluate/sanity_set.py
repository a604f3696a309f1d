"""A sanity set from end to end: problems and prompts, responses, files."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import Console

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools.engines.engine import Response, SampleRequest, SamplerSettings
from verl_precision.tools.engines.vllm_sampler import VllmEngine
from verl_precision.tools.evaluate.judging import Judging
from verl_precision.tools.evaluate.schedule import Schedule, Verdict
from verl_precision.tools.evaluate.settings import SanitySet
from verl_precision.tools.jobs.job import Job, Tasks
from verl_precision.tools.jobs.journal import Journal
from verl_precision.tools.jobs.problems import DataSet, read_data_set
from verl_precision.tools.show.tables import terminal_table

BINS = 10
_FIELDS = {"problem": str, "response": int, "correct": bool, "tokens": int}


class _Responses(Schedule, Tasks):
    """What the schedule hands out: each response is judged, written to the journal, and counted."""

    def __init__(self, job: SanitySet, journal: Journal, judging: Judging, problems: Sequence[str]) -> None:
        super().__init__(problems, job.window)
        self._journal, self._judging, self._max_tokens = journal, judging, job.max_response_tokens
        for record in journal.records(_FIELDS):
            self.count(*(record[name] for name in _FIELDS))

    @property
    def words(self) -> str:
        return f"problems decided, {self.drawn} responses"

    def next_requests(self, limit: int) -> list[SampleRequest]:
        return [self._judging.request(*key, self._max_tokens) for key in self.next_keys(limit)]

    def record(self, response: Response) -> None:
        correct = self._judging.is_correct(response.problem, response.text)
        self._judging.write(self._journal, response, correct=correct)
        self.count(*response.key, correct, response.length)


def build_sanity_set(settings: SanitySet, console: Console) -> dict[str, Any]:
    """Draw, decide, and write kept.parquet and summary.json, whose summary is returned; refuse to keep no problem.

    Options that cannot work are refused before an engine starts. If an engine fails, what was drawn is kept.
    """
    job, data = Job(settings, console), read_data_set(settings.data)
    judging = Judging(settings, {settings.data.stem: data}, [settings.dtype])
    lengths, most = {name: len(ids) for name, ids in judging.prompts.items()}, settings.max_prompt_tokens
    problems = [name for name, length in lengths.items() if length <= most]
    if not problems:
        problem, allowed = "every prompt is longer", f"{min(lengths.values())} or more"
        raise ConfigurationError(problem, setting="--max-prompt-tokens", value=most, allowed=allowed)
    of_job: dict[str, Any] = {"low": str(settings.low), "high": str(settings.high), "data": data.digest}
    of_job |= {"responses_from": judging.model.fingerprint, "temperature": 1.0, "top_p": 1.0}
    with job.journal(judging.settings() | of_job) as journal:
        schedule = _Responses(settings, journal, judging, problems)
        sampler = SamplerSettings(
            model=settings.model,
            dtype=settings.dtype,
            max_model_len=settings.max_prompt_tokens + settings.max_response_tokens,
            more={"generation_config": "vllm"},  # a model's own may name further tokens that end a response
        )
        job.complete(f"sample-{settings.dtype}", [schedule], partial(VllmEngine, sampler))
        summary = summarise(data, schedule)
        summary |= {"unreadable": sum(judging.left_out.values()), "overlong": len(lengths) - len(problems)}
        verdicts = {
            name: {"correct": tally.correct_count, "drawn": tally.drawn, "verdict": schedule.verdict(name).value}
            for name, tally in schedule.tallies.items()
        }
        job.write({"summary": summary, "problems": verdicts})
        rows = [(name.replace("_", " "), str(value)) for name, value in summary.items()]
        console.print(terminal_table(["sanity set", ""], rows, framed=True))
        if not summary["kept"]:
            problem = f"{settings.window} keeps none of {len(schedule.tallies)} problems, of which so many have an "
            problem += f"accuracy from 0 to 10%, to 20%, ...: {', '.join(map(str, summary['histogram']))}"
            remedy = "Choose a window that contains problems. If all accuracies are 0, check --reward and the prompts."
            raise ConfigurationError(problem, remedy=remedy)
        data.write(job.folder / "kept.parquet", schedule.kept())
    job.show_written(["kept.parquet", "summary.json"], f"\nnext: data.train_files={job.folder}/kept.parquet")
    return summary


def summarise(data: DataSet, schedule: Schedule) -> dict[str, Any]:
    """Return the result of a schedule whose verdicts are all decided."""
    window, tallies = schedule.window, schedule.tallies.values()
    dropped = [tally for name, tally in schedule.tallies.items() if schedule.verdict(name) is Verdict.DROPPED]
    too_easy = sum(tally.correct_count > window.most for tally in dropped)
    histogram = [0] * BINS  # problems by accuracy over the responses drawn, from 0 to 1
    for tally in tallies:
        if tally.drawn:  # a window from 0 to 1 keeps all, and none is drawn
            histogram[min(tally.correct_count * BINS // tally.drawn, BINS - 1)] += 1
    return {
        "rows": data.table.num_rows,
        "duplicates": data.table.num_rows - len(data.problems),  # they are sampled and written once
        "kept": len(tallies) - len(dropped),
        "too_easy": too_easy,
        "too_hard": len(dropped) - too_easy,
        "responses_drawn": schedule.drawn,
        "responses_saved": len(tallies) * window.responses - schedule.drawn,  # the verdict was decided without them
        "tokens_drawn": sum(tally.tokens for tally in tallies),
        "histogram": histogram,
    }
