"""Shared by both verbs: problems that the reward can read, their prompts, and the verdict on a response."""

from collections.abc import Mapping, Sequence
from typing import Any

from verl_precision.base.seeds import response_seed
from verl_precision.base.settings import recorded
from verl_precision.tools.engines.engine import Response, SampleRequest
from verl_precision.tools.engines.model import find_model, tokenize
from verl_precision.tools.evaluate.settings import JudgedJob
from verl_precision.tools.jobs.journal import Journal
from verl_precision.tools.jobs.problems import DataSet, load_reward


class Judging:
    """The problems of a job's data sets, by name of the set, and who judges the responses to them."""

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
        """Return the job's recorded settings; a reward's name there changes when its function does."""
        return recorded(self._job) | {"reward": self._reward.name}

    def request(self, problem: str, response: int, max_tokens: int) -> SampleRequest:
        """Return what draws a response, whose seed depends on the job's, on problem and index alone."""
        seed = response_seed(self._job.seed, problem, response)
        return SampleRequest(problem, response, self.prompts[problem], max_tokens, seed)

    def is_correct(self, problem: str, text: str | None) -> bool:
        """Judge a response."""
        return self._reward.is_correct(self.problems[problem], text or "")

    def write(self, journal: Journal, response: Response, **verdict: Any) -> None:
        """Write a response and what came of it, with its text if that is to be kept."""
        record = {"problem": response.problem, "response": response.response, "tokens": response.length, **verdict}
        journal.append({**record, "text": response.text if self._job.keep_text else None})
