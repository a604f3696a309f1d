"""Is a response correct? By verl's own rule, by math-verify, or by a reward function of verl's signature."""

import math
from collections.abc import Callable, Sequence
from hashlib import sha256
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from numbers import Real
from pathlib import Path
from typing import Any

from verl_precision.errors import ConfigurationError
from verl_precision.sampling.problems import Problem

PACKAGE = "pkg://"
Score = Callable[..., Any]  # (data_source, solution_str, ground_truth, extra_info) -> number, or dict with score


class Reward:
    """Judges responses.

    A response is correct if its score reaches `correct_at`. Where the function returns a mapping, as verl allows, its
    `acc` decides if there is one, else its `score`.
    """

    def __init__(self, name: str, score: Score, readable: Callable[[Any], bool], correct_at: float) -> None:
        """Wrap a function; use `load_reward`.

        Args:
            name: Name in the settings; it changes when the function does.
            score: A function with verl's signature.
            readable: Whether a ground truth can be compared with at all.
            correct_at: Smallest score of a correct response.
        """
        self.name = name
        self.correct_at = correct_at
        self._score = score
        self._readable = readable

    def is_correct(self, problem: Problem, text: str) -> bool:
        """Judge one response.

        Raises:
            ConfigurationError: If the function fails, or returns no finite number.
        """
        try:
            score = self._score(
                data_source=problem.data_source,
                solution_str=text,
                ground_truth=problem.ground_truth,
                extra_info=problem.extra_info,
            )
        except Exception as error:
            raise ConfigurationError(
                f"--reward {self.name}: {type(error).__name__}: {error}, on row {problem.row} (data_source "
                f"{problem.data_source!r}, ground truth {problem.ground_truth!r}). Allowed: a function with verl's "
                "signature that knows this data_source. Correct it, or choose another --reward."
            ) from error
        if isinstance(score, dict):
            if "acc" in score:
                return bool(score["acc"])
            score = score.get("score")
        if not isinstance(score, Real) or not math.isfinite(score):
            raise ConfigurationError(
                f"--reward {self.name} returned {score!r} on row {problem.row}. Allowed: a finite number, or a mapping "
                "with `acc` or `score`."
            )
        return float(score) >= self.correct_at

    def unreadable(self, problems: Sequence[Problem]) -> list[Problem]:
        """Return the problems whose ground truth cannot be compared with; every response to them would be wrong.

        It also calls the function once for each data source, so that one that cannot work fails before a model loads.

        Raises:
            ConfigurationError: If the function fails, or if no ground truth can be read.
        """
        for problem in {problem.data_source: problem for problem in problems}.values():
            self.is_correct(problem, "")
        found = [problem for problem in problems if not self._readable(problem.ground_truth)]
        if len(found) == len(problems):
            raise ConfigurationError(
                f"--reward {self.name}: none of the {len(found)} ground truths can be read; the first is "
                f"{found[0].ground_truth!r}. Allowed: answers that this reward can compare with. Choose another "
                "--reward, or prepare the data set again."
            )
        return found


def load_reward(name: str, correct_at: float = 1.0) -> Reward:
    """Return the reward of a name.

    Args:
        name: `verl` (its default_compute_score, chosen by data_source), `math-verify`, or FILE.py[:FUNCTION] with
            verl's signature (FUNCTION is compute_score if not given); pkg://MODULE[:FUNCTION] as in verl's configs.
        correct_at: Smallest score of a correct response.

    Raises:
        ConfigurationError: If there is no such reward.
    """
    if name == "verl":
        from verl.utils.reward_score import default_compute_score

        return Reward("verl", default_compute_score, _has_text, correct_at)
    if name == "math-verify":
        return Reward(name, *_math_verify(), correct_at)
    if name.startswith(PACKAGE):
        module, _, function = name.removeprefix(PACKAGE).partition(":")
        return _from_file(name, _module_file(name, module), function or "compute_score", correct_at)
    file, _, function = name.rpartition(":") if ".py:" in name else (name, "", "compute_score")
    if not file.endswith(".py"):
        raise ConfigurationError(
            f"--reward {name}: no such reward. Allowed: verl, math-verify, or FILE.py:FUNCTION or "
            "pkg://MODULE:FUNCTION with verl's signature."
        )
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigurationError(f"--reward {name}: no file {path} (relative to {Path.cwd()}). Check the path.")
    return _from_file(name, path, function, correct_at)


def _module_file(name: str, module: str) -> Path:
    try:
        found = find_spec(module)
    except ModuleNotFoundError:  # of the package that it is in
        found = None
    if found is None or found.origin is None:
        raise ConfigurationError(f"--reward {name}: there is no module {module}. Check the spelling.")
    return Path(found.origin)


def _from_file(name: str, path: Path, function: str, correct_at: float) -> Reward:
    # verl's own loader does the same, and takes seconds to import.
    spec = spec_from_file_location(f"verl_precision_reward_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # it ends in .py
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        score = getattr(module, function)
    except Exception as error:
        raise ConfigurationError(
            f"--reward {name}: cannot be loaded ({type(error).__name__}: {error}). Correct it."
        ) from error
    if not callable(score):
        raise ConfigurationError(f"--reward {name}: {function} is no function. Name one with verl's signature.")
    digest = sha256(path.read_bytes()).hexdigest()[:12]
    return Reward(f"{path.name}:{function}@{digest}", score, lambda truth: True, correct_at)


def _has_text(ground_truth: Any) -> bool:
    return bool(str(ground_truth).strip())


def _math_verify() -> tuple[Score, Callable[[Any], bool]]:
    """Return math-verify as a score, and whether it can parse an answer."""
    if find_spec("math_verify") is None:
        raise ConfigurationError(
            '--reward math-verify: math-verify is not installed. Install it (pip install "math-verify[antlr4_9_3]"), '
            "or choose --reward verl."
        )
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    def gold(ground_truth: Any) -> list:
        # A bare answer is not looked for as LaTeX unless it is in a LaTeX environment.
        return parse(f"\\boxed{{{ground_truth}}}", extraction_config=[LatexExtractionConfig()])

    def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
        answer = parse(solution_str, extraction_config=[LatexExtractionConfig(), ExprExtractionConfig()])
        return float(bool(answer) and verify(gold(ground_truth), answer))

    return score, lambda ground_truth: bool(gold(ground_truth))
