"""The responses of one dtype: drawn, judged at each context, and written to the job's journal.

A line of the journal is {dtype, problem, response, tokens, finish_reason, correct}; `correct` has one verdict for each
context, in the order of the settings.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from verl_precision.base.errors import CheckpointStateError
from verl_precision.base.seeds import response_seed
from verl_precision.tools.engines.engine import Request, Response
from verl_precision.tools.evaluate.settings import Evaluation
from verl_precision.tools.jobs.journal import Journal
from verl_precision.tools.jobs.problems import Problem
from verl_precision.tools.jobs.reward import Reward
from verl_precision.tools.jobs.work import FixedWork, Key

_FIELDS = {"dtype": str, "problem": str, "response": int, "tokens": int, "finish_reason": str, "correct": list}


class Drawn(NamedTuple):
    """What is kept of a response in memory."""

    tokens: int  # its length in the longest context
    cut: bool  # whether it ended because that context was full
    correct: tuple[bool, ...]  # for each context


class Task(NamedTuple):
    """A problem and its prompt in tokens."""

    problem: Problem
    prompt: tuple[int, ...]


Outcomes = dict[str, dict[Key, Drawn]]  # by dtype


def read_outcomes(journal: Journal, evaluation: Evaluation, tasks: Mapping[str, Task]) -> Outcomes:
    """Return what the journal has; a line of no response of this job is an error."""
    outcomes: Outcomes = defaultdict(dict)
    for _, record in journal.records(_FIELDS):
        dtype, problem, response = record["dtype"], record["problem"], record["response"]
        known = dtype in evaluation.dtypes and problem in tasks and 0 <= response < evaluation.responses
        if not known or [type(each) for each in record["correct"]] != [bool] * len(evaluation.contexts):
            raise CheckpointStateError(
                f"{journal.path}: response {response} to problem {problem} in {dtype} is none of this job's",
                allowed="the responses of its settings, with one verdict for each context",
                remedy="Restore the file, or start again in a new --output.",
            )
        cut = record["finish_reason"] == "length"
        outcomes[dtype][problem, response] = Drawn(record["tokens"], cut, tuple(record["correct"]))
    return outcomes


class ResponseJob(FixedWork):
    """The responses of one dtype to all problems; those to one problem come one after the other."""

    def __init__(
        self, evaluation: Evaluation, dtype: str, tasks: Mapping[str, Task], outcomes: Outcomes, journal: Journal,
        reward: Reward, decode: Callable[[Sequence[int]], str],
    ) -> None:  # fmt: skip
        """Begin with what is in `outcomes`, and add to it; `decode` turns the tokens of a beginning into text."""
        self._evaluation, self._dtype, self._tasks = evaluation, dtype, tasks
        self._journal, self._reward, self._decode = journal, reward, decode
        self._drawn = outcomes[dtype]
        keys = [(name, index) for name in tasks for index in range(evaluation.responses)]
        super().__init__(f"responses drawn in {dtype}", keys, self._drawn)

    def _request(self, problem: str, response: int) -> Request:
        prompt = self._tasks[problem].prompt
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
        task, ids = self._tasks[response.problem], response.token_ids or ()
        lengths = [min(response.length, context - len(task.prompt)) for context in self._evaluation.contexts]
        texts = {n: response.text if n == response.length else self._decode(ids[:n]) for n in lengths}
        verdicts = {n: self._reward.is_correct(task.problem, text or "") for n, text in texts.items()}
        return tuple(verdicts[n] for n in lengths)
