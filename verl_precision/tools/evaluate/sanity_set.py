"""Builds a sanity set: reads problems and prompts, draws responses, writes the files."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import Any

from rich.console import Console

from verl_precision.base.errors import CheckpointStateError, ConfigurationError
from verl_precision.tools.engines.engine import Response, SampleRequest, SamplerSettings
from verl_precision.tools.engines.vllm_sampler import VllmEngine
from verl_precision.tools.evaluate.session import Judging
from verl_precision.tools.evaluate.settings import SanitySet, Verdict
from verl_precision.tools.jobs.job import Job, Tasks
from verl_precision.tools.jobs.journal import START_AGAIN, Journal, Key
from verl_precision.tools.jobs.problems import read_data_set
from verl_precision.tools.show.tables import terminal_table

BINS = 10
_FIELDS = {"problem": str, "response": int, "correct": bool, "tokens": int}


@dataclass
class Tally:
    """The verdict on one problem, and the number of its responses."""

    verdict: Verdict
    drawn: int = 0
    correct: int = 0


class _Responses(Tasks):
    """Draws one response to each problem in turn, until the problem's verdict cannot change any more."""

    def __init__(self, job: SanitySet, journal: Journal, judging: Judging, problems: Sequence[str]) -> None:
        self._job, self._journal, self._judging = job, journal, judging
        self.words, self.tokens, self._counted = "problems decided", 0, set[Key]()
        self.tallies = {name: Tally(job.verdict(0, 0)) for name in problems}
        self._open = {name for name, tally in self.tallies.items() if tally.verdict == "open"}
        for record in journal.records(_FIELDS):
            self._count(*(record[name] for name in _FIELDS))
        keys = [(name, index) for index in range(job.responses) for name in problems]
        super().__init__(self.words, keys, self._counted)
        self.total = len(problems)

    @property
    def done(self) -> int:
        return self.total - len(self._open)

    def next_requests(self, limit: int) -> list[SampleRequest]:
        wanted = (key for key in self._unasked if key[0] in self._open)
        return [self._judging.request(*key, self._job.max_response_tokens) for key in islice(wanted, limit)]

    def record(self, response: Response) -> None:
        correct = self._judging.is_correct(response.problem, response.text)
        self._judging.write(self._journal, response, correct=correct)
        self._count(*response.key, correct, response.length)

    def _count(self, problem: str, response: int, correct: bool, tokens: int) -> None:
        """Count a response of an engine or of the journal; refuse one of another job, and a second count."""
        tally, key, most = self.tallies.get(problem), (problem, response), self._job.responses - 1
        if tally is None or not 0 <= response <= most or key in self._counted:
            words = f"response {response} to problem {problem} is none of this job's, or was counted before"
            allowed = f"each response from 0 to {most} once, to a problem of the data set"
            raise CheckpointStateError(words, allowed=allowed, remedy=START_AGAIN)
        self._counted.add(key)
        self.words = f"problems decided, {len(self._counted)} responses"
        self.tokens += tokens
        tally.drawn += 1
        tally.correct += correct
        tally.verdict = self._job.verdict(tally.correct, tally.drawn)
        if tally.verdict != "open":
            self._open.discard(problem)

    def summary(self) -> dict[str, Any]:
        """Return the result when all verdicts are decided."""
        tallies, drawn = self.tallies.values(), len(self._counted)
        too_easy = sum(tally.correct > self._job.most for tally in tallies)
        kept = sum(tally.verdict == "kept" for tally in tallies)
        histogram = [0] * BINS  # problems by accuracy over the responses drawn, from 0 to 1
        for tally in tallies:
            if tally.drawn:  # with a window from 0 to 1 none is drawn
                histogram[min(tally.correct * BINS // tally.drawn, BINS - 1)] += 1
        return {
            "kept": kept,
            "too_easy": too_easy,
            "too_hard": len(tallies) - kept - too_easy,
            "responses_drawn": drawn,
            "responses_saved": self.total * self._job.responses - drawn,  # the verdicts did not need them
            "tokens_drawn": self.tokens,
            "histogram": histogram,
        }


def build_sanity_set(settings: SanitySet, console: Console) -> dict[str, Any]:
    """Draw responses, write kept.parquet and summary.json, and return the summary; refuse an empty kept.parquet.

    Options that cannot work are refused before an engine starts. If an engine fails, all drawn responses are kept.
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
        responses = _Responses(settings, journal, judging, problems)
        sampler = SamplerSettings(
            model=settings.model,
            dtype=settings.dtype,
            max_model_len=settings.max_prompt_tokens + settings.max_response_tokens,
            more={"generation_config": "vllm"},  # a model's own config may have more end tokens
        )
        job.complete(f"sample-{settings.dtype}", [responses], partial(VllmEngine, sampler))
        duplicates = data.table.num_rows - len(data.problems)  # they are sampled and written once
        summary = {"rows": data.table.num_rows, "duplicates": duplicates, **responses.summary()}
        summary |= {"unreadable": sum(judging.left_out.values()), "overlong": len(lengths) - len(problems)}
        job.write({"summary": summary, "problems": {name: asdict(one) for name, one in responses.tallies.items()}})
        rows = [(name.replace("_", " "), str(value)) for name, value in summary.items()]
        console.print(terminal_table(["sanity set", ""], rows, framed=True))
        if not summary["kept"]:
            problem = f"{settings.window} keeps none of {len(problems)} problems. Their number by accuracy, "
            problem += f"from 0 to 10%, 10 to 20%, ...: {', '.join(map(str, summary['histogram']))}"
            remedy = "Choose a window that contains problems. If all accuracies are 0, check --reward and the prompts."
            raise ConfigurationError(problem, remedy=remedy)
        kept = [name for name, tally in responses.tallies.items() if tally.verdict == "kept"]
        data.write(job.folder / "kept.parquet", kept)
    job.show_written(["kept.parquet", "summary.json"], f"\nnext: data.train_files={job.folder}/kept.parquet")
    return summary
