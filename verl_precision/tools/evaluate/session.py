"""A job from end to end: what is missing is drawn and judged, then the tables are written.

A line of the journal is {dtype, problem, response, tokens, finish_reason, correct}; `correct` has one verdict for each
context, in the order of the settings.
"""

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

from rich.console import Console

from verl_precision.base.errors import CheckpointStateError, ConfigurationError
from verl_precision.base.seeds import response_seed
from verl_precision.base.versions import installed_versions
from verl_precision.tools.engines.engine import Request, Response, SamplerSettings
from verl_precision.tools.engines.model import Model, find_model, load_tokenizer
from verl_precision.tools.engines.vllm_sampler import VllmEngine
from verl_precision.tools.evaluate import accuracy
from verl_precision.tools.evaluate.accuracy import Accuracy, Drawn, Outcomes
from verl_precision.tools.evaluate.settings import Evaluation
from verl_precision.tools.jobs.job import Job, Tasks, recorded_versions
from verl_precision.tools.jobs.journal import START_AGAIN, Journal
from verl_precision.tools.jobs.problems import (
    Problem,
    Reward,
    load_reward,
    problem_tokens,
    read_data_set,
    recorded_judgement,
)

OUTPUTS = ("table.md", "summary.json")
_FIELDS = {"dtype": str, "problem": str, "response": int, "tokens": int, "finish_reason": str, "correct": list}


def evaluate(evaluation: Evaluation, console: Console) -> list[Accuracy]:
    """Do what is missing in the job's folder, and write the results, one for each context, data set and dtype.

    Settings that cannot work are refused before a model loads. If an engine fails, what was drawn is kept.
    """
    job = Job(evaluation, console)
    data = {path.stem: read_data_set(path) for path in evaluation.data}
    reward = load_reward(evaluation.reward, evaluation.pass_score)
    readable = {name: reward.readable(each.problems) for name, each in data.items()}
    left_out = {name: len(each.problems) - len(readable[name]) for name, each in data.items()}
    # A problem that is in several data sets is drawn once.
    problems = {problem.identifier: problem for each in readable.values() for problem in each}
    model = find_model(evaluation.model)
    prompts = problem_tokens(problems.values(), model)
    _require_room(evaluation, model, max(map(len, prompts.values())))
    settings = {
        **recorded_judgement(evaluation, reward),
        "data": {name: each.digest for name, each in data.items()},
        "model_fingerprint": model.fingerprint,
        **recorded_versions(),
    }
    with job.journal(settings, OUTPUTS) as journal:
        outcomes = _read_outcomes(journal, evaluation, problems)
        for dtype in evaluation.dtypes:
            sampler = SamplerSettings(
                model=evaluation.model,
                dtype=dtype,
                max_model_len=evaluation.longest_context,
                temperature=evaluation.temperature,
                top_p=evaluation.top_p,
            )
            tasks = _Responses(evaluation, dtype, problems, prompts, outcomes[dtype], journal, reward)
            job.complete(f"sample-{dtype}", [tasks], partial(VllmEngine, sampler))

    sets = {name: [problem.identifier for problem in each] for name, each in readable.items()}
    found = accuracy.accuracies(evaluation, sets, prompts, outcomes)
    changes = accuracy.differences(found)
    table = accuracy.markdown(evaluation, found, changes, left_out, installed_versions())
    job.write(accuracy.summary(found, changes, sets, left_out), table)
    job.show_written(OUTPUTS)
    return found


def _require_room(evaluation: Evaluation, model: Model, longest_prompt: int) -> None:
    """Refuse a dtype that vLLM refuses, and a context that is too long, or has no token for some response."""
    model.require_dtypes("--dtype", evaluation.dtypes)
    most = model.context or evaluation.longest_context
    for context in evaluation.contexts:
        if not longest_prompt < context <= most:
            problem = f"the longest prompt has {longest_prompt} tokens, and the model's context {model.context}"
            allowed = f"{longest_prompt + 1} to {most}"
            raise ConfigurationError(problem, setting="--context", value=context, allowed=allowed)


def _read_outcomes(journal: Journal, evaluation: Evaluation, problems: Mapping[str, Problem]) -> Outcomes:
    """Return what the journal has; a line of no response of this job is an error."""
    outcomes: Outcomes = defaultdict(dict)
    for _, record in journal.records(_FIELDS):
        dtype, problem, response = record["dtype"], record["problem"], record["response"]
        known = dtype in evaluation.dtypes and problem in problems and 0 <= response < evaluation.responses
        if not known or [type(each) for each in record["correct"]] != [bool] * len(evaluation.contexts):
            words = f"{journal.path}: response {response} to problem {problem} in {dtype} is none of this job's"
            raise CheckpointStateError(words, allowed="one verdict for each context", remedy=START_AGAIN)
        cut = record["finish_reason"] == "length"
        outcomes[dtype][problem, response] = Drawn(record["tokens"], cut, tuple(record["correct"]))
    return outcomes


class _Responses(Tasks):
    """The responses of one dtype to all problems; those to one problem come one after the other."""

    def __init__(
        self,
        evaluation: Evaluation,
        dtype: str,
        problems: Mapping[str, Problem],
        prompts: Mapping[str, tuple[int, ...]],
        drawn: dict[tuple[str, int], Drawn],
        journal: Journal,
        reward: Reward,
    ) -> None:
        self._evaluation, self._dtype, self._problems, self._prompts = evaluation, dtype, problems, prompts
        self._drawn, self._journal, self._reward = drawn, journal, reward
        self._decode = partial(load_tokenizer(evaluation.model).decode, skip_special_tokens=True)
        keys = [(name, index) for name in problems for index in range(evaluation.responses)]
        super().__init__(f"responses drawn in {dtype}", keys, drawn)

    def _request(self, problem: str, response: int) -> Request:
        prompt = self._prompts[problem]
        seed = response_seed(self._evaluation.seed, problem, response)
        return Request(problem, response, prompt, self._evaluation.longest_context - len(prompt), seed)

    def record(self, response: Response) -> None:
        """Judge a response, write it, then count it."""
        correct = self._verdicts(response)
        record: dict[str, Any] = {"dtype": self._dtype, "problem": response.problem, "response": response.response}
        record |= {"tokens": response.length, "finish_reason": response.finish_reason, "correct": correct}
        self._journal.append({**record, "text": response.text if self._evaluation.keep_text else None})
        cut = response.finish_reason == "length"
        self._drawn[response.key] = Drawn(response.length, cut, correct)

    def _verdicts(self, response: Response) -> tuple[bool, ...]:
        """Judge the response as far as it goes in each context; the same text is judged once."""
        ids, room = response.token_ids or (), len(self._prompts[response.problem])
        lengths = [min(response.length, context - room) for context in self._evaluation.contexts]
        texts = {n: response.text if n == response.length else self._decode(ids[:n]) for n in lengths}
        problem = self._problems[response.problem]
        verdicts = {n: self._reward.is_correct(problem, text or "") for n, text in texts.items()}
        return tuple(verdicts[n] for n in lengths)
