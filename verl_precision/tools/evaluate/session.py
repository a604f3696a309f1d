"""A job from end to end: what is missing is drawn and judged, then the tables are written.

A line of the journal is {dtype, problem, response, tokens, finish_reason, correct}; `correct` has one verdict for each
context, in the order of the settings.
"""

from collections import defaultdict
from functools import partial

import pandas as pd
from rich.console import Console

from verl_precision.base.errors import CheckpointStateError, ConfigurationError
from verl_precision.base.versions import installed_versions
from verl_precision.tools.engines.engine import Response, SampleRequest, SamplerSettings
from verl_precision.tools.engines.model import load_tokenizer
from verl_precision.tools.engines.vllm_sampler import VllmEngine
from verl_precision.tools.evaluate import accuracy
from verl_precision.tools.evaluate.accuracy import Drawn, Outcomes
from verl_precision.tools.evaluate.judging import Judging
from verl_precision.tools.evaluate.settings import Evaluation
from verl_precision.tools.jobs.job import Job, Tasks, recorded_versions
from verl_precision.tools.jobs.journal import START_AGAIN, Journal, Key
from verl_precision.tools.jobs.problems import read_data_set

_FIELDS = {"dtype": str, "problem": str, "response": int, "tokens": int, "finish_reason": str, "correct": list}


def evaluate(evaluation: Evaluation, console: Console) -> pd.DataFrame:
    """Finish the job in its folder, write the results, and return each response, as in `accuracy.responses`.

    Settings that cannot work are refused before a model loads. If an engine fails, what was drawn is kept.
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
        outcomes = _read_outcomes(journal, evaluation, judging)
        for dtype in evaluation.dtypes:
            sampler = SamplerSettings(
                model=evaluation.model,
                dtype=dtype,
                max_model_len=evaluation.longest_context,
                temperature=evaluation.temperature,
                top_p=evaluation.top_p,
            )
            tasks = _Responses(evaluation, dtype, judging, outcomes[dtype], journal)
            job.complete(f"sample-{dtype}", [tasks], partial(VllmEngine, sampler))

    sets = {name: [problem.identifier for problem in each] for name, each in judging.sets.items()}
    drawn = accuracy.responses(evaluation, sets, judging.prompts, outcomes)
    table = accuracy.markdown(evaluation, drawn, judging.left_out, installed_versions())
    job.write(accuracy.summary(drawn, judging.left_out), table)
    job.show_written(["table.md", "summary.json"])
    return drawn


def _read_outcomes(journal: Journal, evaluation: Evaluation, judging: Judging) -> Outcomes:
    """Return what the journal has; a line of no response of this job is an error."""
    outcomes: Outcomes = defaultdict(dict)
    for record in journal.records(_FIELDS):
        dtype, problem, response = record["dtype"], record["problem"], record["response"]
        known = dtype in evaluation.dtypes and problem in judging.problems and 0 <= response < evaluation.responses
        if not known or [type(each) for each in record["correct"]] != [bool] * len(evaluation.contexts):
            words = f"{journal.path}: response {response} to problem {problem} in {dtype} is none of this job's"
            raise CheckpointStateError(words, allowed="one verdict for each context", remedy=START_AGAIN)
        cut = record["finish_reason"] == "length"
        outcomes[dtype][problem, response] = Drawn(record["tokens"], cut, tuple(record["correct"]))
    return outcomes


class _Responses(Tasks):
    """The responses of one dtype to all problems; those to one problem come one after the other."""

    def __init__(
        self, evaluation: Evaluation, dtype: str, judging: Judging, drawn: dict[Key, Drawn], journal: Journal
    ) -> None:
        self._evaluation, self._dtype, self._judging = evaluation, dtype, judging
        self._drawn, self._journal = drawn, journal
        self._decode = partial(load_tokenizer(evaluation.model).decode, skip_special_tokens=True)
        keys = [(name, index) for name in judging.problems for index in range(evaluation.responses)]
        super().__init__(f"responses drawn in {dtype}", keys, drawn)

    def _request(self, problem: str, response: int) -> SampleRequest:
        room = self._evaluation.longest_context - len(self._judging.prompts[problem])
        return self._judging.request(problem, response, room)

    def record(self, response: Response) -> None:
        """Judge a response as far as it goes in each context, write it, then count it."""
        ids, prompt = response.token_ids or (), len(self._judging.prompts[response.problem])
        lengths = [min(response.length, context - prompt) for context in self._evaluation.contexts]
        texts = {n: response.text if n == response.length else self._decode(ids[:n]) for n in lengths}
        verdicts = {n: self._judging.is_correct(response.problem, text) for n, text in texts.items()}
        correct, reason = tuple(verdicts[n] for n in lengths), response.finish_reason
        self._judging.write(self._journal, response, dtype=self._dtype, finish_reason=reason, correct=correct)
        self._drawn[response.key] = Drawn(response.length, reason == "length", correct)
