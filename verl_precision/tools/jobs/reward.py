"""Is a response correct? By verl's own rule, by math-verify, or by a reward function of verl's signature."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from numbers import Real
from pathlib import Path
from typing import Any

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.settings import recorded
from verl_precision.integration.ledger import require_feature
from verl_precision.tools.jobs.problems import Problem
from verl_precision.tools.jobs.settings import JudgedJob
from verl_precision.tools.rewards import boxed_answer
from verl_precision.tools.rewards.math_answers import require_math_verify

PACKAGE = "pkg://"
Score = Callable[..., Any]  # (data_source, solution_str, ground_truth, extra_info) -> number, or dict with score


@dataclass(frozen=True)
class Reward:
    """Judges responses.

    A response is correct if its score reaches `pass_score`. Where the function returns a mapping, as verl allows, its
    `acc` decides if there is one, else its `score`.
    """

    name: str  # in the settings; it changes when the function does
    pass_score: float  # smallest score of a correct response
    score: Score
    reads_empty: bool = False  # whether an empty ground truth can be compared with

    def is_correct(self, problem: Problem, text: str) -> bool:
        """Judge one response; a function that fails, or returns no finite number, is refused."""
        try:
            about = {name: getattr(problem, name) for name in ("data_source", "ground_truth", "extra_info")}
            score = self.score(solution_str=text, **about)
        except Exception as error:
            place = f"row {problem.row} (data_source {problem.data_source!r}, ground truth {problem.ground_truth!r})"
            allowed = "a function with verl's signature that knows this data_source"
            raise _refusal(self.name, f"{type(error).__name__}: {error}, on {place}", allowed) from error
        if isinstance(score, dict):
            if "acc" in score:
                return bool(score["acc"])
            score = score.get("score")
        if not isinstance(score, Real) or not math.isfinite(score):
            allowed = "a finite number, or a mapping with `acc` or `score`"
            raise _refusal(self.name, f"it returned {score!r} on row {problem.row}", allowed)
        return float(score) >= self.pass_score

    def readable(self, problems: Sequence[Problem]) -> list[Problem]:
        """Return the problems whose ground truth can be compared with; every response to the others would be wrong.

        It also calls the function once for each data source, so that one that cannot work fails before a model loads.
        """
        for problem in {problem.data_source: problem for problem in problems}.values():
            self.is_correct(problem, "")
        found = [problem for problem in problems if self.reads_empty or str(problem.ground_truth).strip()]
        if not found:
            unread = f"none of the {len(problems)} ground truths can be read; the first is {problems[0].ground_truth!r}"
            raise _refusal(self.name, unread, "answers that this reward can compare with")
        return found


def recorded_judgement(job: JudgedJob, reward: Reward) -> dict[str, Any]:
    """Return a job's recorded settings; a reward's name there changes when its function does."""
    return recorded(job) | {"reward": reward.name}


def load_reward(name: str, pass_score: float = 1.0) -> Reward:
    """Return the reward of a name.

    It is `verl` (its default_compute_score, chosen by data_source), `math-verify` (`boxed_answer`, what the recipes
    train with), or FILE.py[:FUNCTION] with verl's signature (FUNCTION is compute_score if not given);
    pkg://MODULE[:FUNCTION] as in verl's configs.
    """
    if name == "verl":
        from verl.utils.reward_score import default_compute_score

        return Reward(name, pass_score, default_compute_score)
    if name == "math-verify":
        require_math_verify()
        return Reward(name, pass_score, boxed_answer.compute_score)
    if name.startswith(PACKAGE):
        module_name, _, function = name.removeprefix(PACKAGE).partition(":")
        location = PACKAGE + module_name
    else:
        file, _, function = name.rpartition(":") if ".py:" in name else (name, "", "")
        location = str(Path(file).expanduser())
        if not location.endswith(".py"):
            allowed = "verl, math-verify, or FILE.py:FUNCTION or pkg://MODULE:FUNCTION with verl's signature"
            raise _refusal(name, "no such reward", allowed)
    function = function or "compute_score"
    require_feature("reward functions")
    from verl.utils.import_utils import load_module

    try:
        module: Any = load_module(location)
        score = getattr(module, function)
        if not callable(score):
            raise TypeError(f"{function} is no function")
    except Exception as error:
        cause = error.__cause__ or error
        raise _refusal(name, f"it cannot be loaded ({type(cause).__name__}: {cause})") from error
    path = Path(module.__file__)
    digest = sha256(path.read_bytes()).hexdigest()[:12]
    return Reward(f"{path.name}:{function}@{digest}", pass_score, score, reads_empty=True)


def _refusal(name: str, problem: str, allowed: str = "") -> ConfigurationError:
    remedy = "Correct it, or choose another --reward."
    return ConfigurationError(problem, setting="--reward", value=name, allowed=allowed, remedy=remedy)
