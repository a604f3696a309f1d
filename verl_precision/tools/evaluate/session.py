"""A job from end to end: what is missing is drawn and judged, then the tables are written.

A line of the journal is {dtype, problem, response, tokens, finish_reason, correct}; `correct` has one verdict for each
context, in the order of the settings.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import Console

from verl_precision.base.errors import CheckpointStateError, ConfigurationError
from verl_precision.base.seeds import response_seed
from verl_precision.base.versions import installed_versions
from verl_precision.tools.engines.engine import Request, Response
from verl_precision.tools.engines.model import Model, find_model, load_tokenizer, tokenize
from verl_precision.tools.engines.vllm_sampler import VllmEngine
from verl_precision.tools.evaluate import accuracy
from verl_precision.tools.evaluate.accuracy import Accuracy, Drawn, Outcomes, Task
from verl_precision.tools.evaluate.settings import Evaluation
from verl_precision.tools.jobs.frame import FixedWork, Frame, recorded_versions
from verl_precision.tools.jobs.journal import Journal
from verl_precision.tools.jobs.problems import read_data_set
from verl_precision.tools.jobs.reward import Reward, load_reward, recorded_judgement

OUTPUTS = ("table.md", "summary.json")
_FIELDS = {"dtype": str, "problem": str, "response": int, "tokens": int, "finish_reason": str, "correct": list}


def evaluate(evaluation: Evaluation, console: Console) -> list[Accuracy]:
    """Do what is missing in the job's folder, and write the results, one for each context, data set and dtype.

    Settings that cannot work are refused before a model loads. If an engine fails, what was drawn is kept.
    """
    frame = Frame(evaluation, console)
    data = {path.stem: read_data_set(path) for path in evaluation.data}
    reward = load_reward(evaluation.reward, evaluation.pass_score)
    problems = {name: reward.readable(each.problems) for name, each in data.items()}
    left_out = {name: len(each.problems) - len(problems[name]) for name, each in data.items()}
    # A problem that is in several data sets is drawn once.
    distinct = {problem.identifier: problem for each in problems.values() for problem in each}
    model = find_model(evaluation.model)
    prompts = tokenize([problem.prompt for problem in distinct.values()], model)
    _require_room(evaluation, model, max(map(len, prompts)))
    tasks = {name: Task(distinct[name], prompt) for name, prompt in zip(distinct, prompts, strict=True)}

    settings = {
        **recorded_judgement(evaluation, reward),
        "data": {name: each.digest for name, each in data.items()},
        "model_fingerprint": model.fingerprint,
        **recorded_versions(),
    }
    with frame.journal(settings, OUTPUTS) as journal:
        outcomes = _read_outcomes(journal, evaluation, tasks)
        decode = partial(load_tokenizer(evaluation.model).decode, skip_special_tokens=True)
        for dtype in evaluation.dtypes:
            work = _ResponseJob(evaluation, dtype, tasks, outcomes, journal, reward, decode)
            build = partial(VllmEngine, evaluation.model, dtype, evaluation.longest_context)
            drawing = {"temperature": evaluation.temperature, "top_p": evaluation.top_p}
            frame.complete(f"sample-{dtype}", [work], partial(build, **drawing))

    sets = {name: [problem.identifier for problem in each] for name, each in problems.items()}
    found = accuracy.accuracies(evaluation, sets, tasks, outcomes)
    changes = accuracy.differences(found)
    table = accuracy.markdown(evaluation, found, changes, left_out, installed_versions())
    frame.write(accuracy.summary(found, changes, sets, left_out), table)
    frame.show_written(OUTPUTS)
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


def _read_outcomes(journal: Journal, evaluation: Evaluation, tasks: Mapping[str, Task]) -> Outcomes:
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


class _ResponseJob(FixedWork):
    """The responses of one dtype to all problems; those to one problem come one after the other."""

    def __init__(
        self,
        evaluation: Evaluation,
        dtype: str,
        tasks: Mapping[str, Task],
        outcomes: Outcomes,
        journal: Journal,
        reward: Reward,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
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
