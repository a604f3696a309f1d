"""Runs the two jobs that draw and judge responses: an evaluation, and the search for a sanity set.

A line of an evaluation's journal is {dtype, problem, response, tokens, finish_reason, correct}; `correct` has one
verdict for each context, in the order of the settings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import Any

import pandas as pd
from rich.console import Console

from verl_precision.base.content import response_seed
from verl_precision.base.errors import CheckpointStateError, ConfigurationError
from verl_precision.base.settings import recorded
from verl_precision.base.versions import installed_versions
from verl_precision.tools.engines.engine import Response, SampleRequest, SamplerSettings
from verl_precision.tools.engines.model import find_model, load_tokenizer, tokenize
from verl_precision.tools.engines.vllm_sampler import VllmEngine
from verl_precision.tools.evaluate import accuracy
from verl_precision.tools.jobs.job import Job, Tasks, recorded_versions
from verl_precision.tools.jobs.journal import START_AGAIN, Journal, Key
from verl_precision.tools.jobs.problems import DataSet, load_reward, read_data_set
from verl_precision.tools.jobs.settings import Evaluation, JudgedJob, SanitySet, Verdict
from verl_precision.tools.show.tables import terminal_table

_FIELDS = {"dtype": str, "problem": str, "response": int, "tokens": int, "finish_reason": str, "correct": list}


class Judging:
    """Shared by both verbs: problems that the reward can read, their prompts, and the verdict on a response."""

    def __init__(self, job: JudgedJob, sets: Mapping[str, DataSet], dtypes: Sequence[str]) -> None:
        """Refuse a model, a reward or a data set that cannot work, before an engine starts."""
        self._job, self.model, self._reward = job, find_model(job.model), load_reward(job.reward, job.pass_score)
        self.model.require_dtypes("--dtype", dtypes)
        self.sets = {name: self._reward.readable(each.problems) for name, each in sets.items()}
        self.left_out = {name: len(each.problems) - len(self.sets[name]) for name, each in sets.items()}
        # A problem that is in several data sets is drawn once.
        self.problems = {problem.identifier: problem for each in self.sets.values() for problem in each}
        token_ids = tokenize([problem.prompt for problem in self.problems.values()], self.model)
        self.prompts = dict(zip(self.problems, token_ids, strict=True))

    def settings(self) -> dict[str, Any]:
        """Return the job's recorded settings; the reward's recorded name changes when its function changes."""
        return recorded(self._job) | {"reward": self._reward.name}

    def request(self, problem: str, response: int, max_tokens: int) -> SampleRequest:
        """Return the request for a response; its seed depends only on the job's seed, the problem and the index."""
        seed = response_seed(self._job.seed, problem, response)
        return SampleRequest(problem, response, self.prompts[problem], max_tokens, seed)

    def is_correct(self, problem: str, text: str | None) -> bool:
        """Return whether a response is correct."""
        return self._reward.is_correct(self.problems[problem], text or "")

    def write(self, journal: Journal, response: Response, **verdict: Any) -> None:
        """Write a response and its verdict, with its text if the job keeps texts."""
        record = {"problem": response.problem, "response": response.response, "tokens": response.length, **verdict}
        journal.append({**record, "text": response.text if self._job.keep_text else None})


def evaluate(evaluation: Evaluation, console: Console) -> pd.DataFrame:
    """Finish the job in its folder, write the results, and return each response, as in `accuracy.responses`.

    Settings that cannot work are refused before a model loads. If an engine fails, all drawn responses are kept.
    """
    job, data = Job(evaluation, console), {path.stem: read_data_set(path) for path in evaluation.data}
    judging = Judging(evaluation, data, evaluation.dtypes)
    longest_prompt, in_all = max(map(len, judging.prompts.values())), judging.model.context
    most = in_all or evaluation.longest_context
    for context in evaluation.contexts:
        if not longest_prompt < context <= most:
            problem = f"the longest prompt has {longest_prompt} tokens, and the model's context {in_all}"
            allowed = f"{longest_prompt + 1} to {most}"
            raise ConfigurationError(problem, setting="--context", value=context, allowed=allowed)
    digests = {name: each.digest for name, each in data.items()}
    of_job = {"data": digests, "model_fingerprint": judging.model.fingerprint, **recorded_versions()}
    with job.journal(judging.settings() | of_job) as journal:
        finished = _finished(journal, evaluation, judging)
        for dtype in evaluation.dtypes:
            sampler = SamplerSettings(
                model=evaluation.model,
                dtype=dtype,
                max_model_len=evaluation.longest_context,
                temperature=evaluation.temperature,
                top_p=evaluation.top_p,
            )
            tasks = _Responses(evaluation, dtype, judging, finished[dtype], journal)
            job.complete(f"sample-{dtype}", [tasks], partial(VllmEngine, sampler))
        records = pd.DataFrame(journal.records(_FIELDS), columns=[*_FIELDS])

    sets = {name: [problem.identifier for problem in each] for name, each in judging.sets.items()}
    drawn = accuracy.responses(evaluation, sets, judging.prompts, records)
    table = accuracy.markdown(evaluation, drawn, judging.left_out, installed_versions())
    job.write(accuracy.summary(drawn, judging.left_out), table)
    job.show_written(["table.md", "summary.json"])
    return drawn


def _finished(journal: Journal, evaluation: Evaluation, judging: Judging) -> dict[str, set[Key]]:
    """Return the responses that the journal has in each dtype; a line that is not of this job is an error."""
    finished: dict[str, set[Key]] = {dtype: set() for dtype in evaluation.dtypes}
    for record in journal.records(_FIELDS):
        dtype, problem, response = record["dtype"], record["problem"], record["response"]
        known = dtype in finished and problem in judging.problems and 0 <= response < evaluation.responses
        twice = known and (problem, response) in finished[dtype]
        if twice or not known or [type(each) for each in record["correct"]] != [bool] * len(evaluation.contexts):
            which = f"{journal.path}: response {response} to problem {problem} in {dtype}"
            words = f"{which} is none of this job's, or there twice"
            raise CheckpointStateError(words, allowed="one verdict for each context", remedy=START_AGAIN)
        finished[dtype].add((problem, response))
    return finished


class _Responses(Tasks):
    """The responses of one dtype to all problems; those to one problem come one after the other."""

    def __init__(
        self, evaluation: Evaluation, dtype: str, judging: Judging, finished: set[Key], journal: Journal
    ) -> None:
        self._evaluation, self._dtype, self._judging = evaluation, dtype, judging
        self._drawn, self._journal = finished, journal
        self._decode = partial(load_tokenizer(evaluation.model).decode, skip_special_tokens=True)
        keys = [(name, index) for name in judging.problems for index in range(evaluation.responses)]
        super().__init__(f"responses drawn in {dtype}", keys, finished)

    def _request(self, problem: str, response: int) -> SampleRequest:
        room = self._evaluation.longest_context - len(self._judging.prompts[problem])
        return self._judging.request(problem, response, room)

    def record(self, response: Response) -> None:
        """Judge a response cut at each context, write it, then count it."""
        ids, prompt = response.token_ids or (), len(self._judging.prompts[response.problem])
        lengths = [min(response.length, context - prompt) for context in self._evaluation.contexts]
        texts = {n: response.text if n == response.length else self._decode(ids[:n]) for n in lengths}
        verdicts = {n: self._judging.is_correct(response.problem, text) for n, text in texts.items()}
        reason, correct = response.finish_reason, [verdicts[n] for n in lengths]
        self._judging.write(self._journal, response, dtype=self._dtype, finish_reason=reason, correct=correct)
        self._drawn.add(response.key)


BINS = 10
_FIELDS_OF_SET = {"problem": str, "response": int, "correct": bool, "tokens": int}


@dataclass
class Tally:
    """The verdict on one problem, and the number of its responses."""

    verdict: Verdict
    drawn: int = 0
    correct: int = 0


class _UntilDecided(Tasks):
    """Draws one response to each problem in turn, until the problem's verdict cannot change any more."""

    def __init__(self, job: SanitySet, journal: Journal, judging: Judging, problems: Sequence[str]) -> None:
        self._job, self._journal, self._judging = job, journal, judging
        self.words, self.tokens, self._counted = "problems decided", 0, set[Key]()
        self.tallies = {name: Tally(job.verdict(0, 0)) for name in problems}
        self._open = {name for name, tally in self.tallies.items() if tally.verdict == "open"}
        for record in journal.records(_FIELDS_OF_SET):
            self._count(*(record[name] for name in _FIELDS_OF_SET))
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
        responses = _UntilDecided(settings, journal, judging, problems)
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
        console.print(terminal_table(["sanity set", ""], rows))
        if not summary["kept"]:
            problem = f"{settings.window} keeps none of {len(problems)} problems. Their number by accuracy, "
            problem += f"from 0 to 10%, 10 to 20%, ...: {', '.join(map(str, summary['histogram']))}"
            remedy = "Choose a window that contains problems. If all accuracies are 0, check --reward and the prompts."
            raise ConfigurationError(problem, remedy=remedy)
        kept = [name for name, tally in responses.tallies.items() if tally.verdict == "kept"]
        data.write(job.folder / "kept.parquet", kept)
    job.show_written(["kept.parquet", "summary.json"], f"\nnext: data.train_files={job.folder}/kept.parquet")
    return summary
