"""Runs an evaluation: draws and judges the missing responses, then writes the tables.

A line of the journal is {dtype, problem, response, tokens, finish_reason, correct}; `correct` has one verdict for each
context, in the order of the settings.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd
from rich.console import Console

from verl_precision.base.errors import CheckpointStateError, ConfigurationError
from verl_precision.base.seeds import response_seed
from verl_precision.base.settings import recorded
from verl_precision.base.versions import installed_versions
from verl_precision.tools.engines.engine import Response, SampleRequest, SamplerSettings
from verl_precision.tools.engines.model import find_model, load_tokenizer, tokenize
from verl_precision.tools.engines.vllm_sampler import VllmEngine
from verl_precision.tools.evaluate import accuracy
from verl_precision.tools.evaluate.settings import Evaluation, JudgedJob
from verl_precision.tools.jobs.job import Job, Tasks, recorded_versions
from verl_precision.tools.jobs.journal import START_AGAIN, Journal, Key
from verl_precision.tools.jobs.problems import DataSet, load_reward, read_data_set

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
