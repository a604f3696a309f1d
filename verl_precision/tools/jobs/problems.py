"""Prompts, problems and rewards: data sets in verl's format, plain prompts, built-in prompts."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from numbers import Real
from pathlib import Path
from typing import Any, cast

import pyarrow
from pyarrow import parquet

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import naming_file, new_file
from verl_precision.integration.ledger import require_feature
from verl_precision.tools.engines.model import Model, Prompt, tokenize
from verl_precision.tools.jobs.settings import BUILT_IN_PROMPTS, PromptedJob
from verl_precision.tools.rewards import boxed_answer
from verl_precision.tools.rewards.math_answers import require_math_verify

_QUESTIONS = Path(__file__).with_name("prompts.txt")  # one question a line
_REQUIRED = {
    "prompt": "a list of messages {role, content}",
    "data_source": "a name",
    "reward_model": "a mapping with ground_truth",
}
PACKAGE = "pkg://"


@dataclass(frozen=True)
class Problem:
    """A problem: one row of a data set."""

    identifier: str  # digest of prompt, data source and ground truth; the same in every copy of the data set
    row: int  # number of the row in the file, from 0
    prompt: list[dict[str, Any]]  # chat messages
    data_source: str  # selects the reward function in verl
    ground_truth: Any  # what the reward function compares a response with
    extra_info: dict[str, Any]  # passed on to the reward function


@dataclass(frozen=True)
class DataSet:
    """A file's rows as a table, and its distinct problems."""

    table: pyarrow.Table  # all rows, with every column of the file
    problems: list[Problem]  # in the file's order

    @property
    def digest(self) -> str:
        """Return the digest of the problems in their order."""
        return sha256("".join(problem.identifier for problem in self.problems).encode()).hexdigest()[:16]

    def write(self, path: Path, identifiers: Iterable[str]) -> None:
        """Write the rows of these problems as parquet, in the file's order, with columns and types unchanged."""
        wanted = set(identifiers)
        write_table(path, self.table.take([each.row for each in self.problems if each.identifier in wanted]))


def read_data_set(path: Path) -> DataSet:
    """Read a parquet or JSONL file with verl's columns: prompt, data_source, reward_model.ground_truth, extra_info.

    An error names the file, row and field of the first wrong value.
    """
    table = _table(path)
    if table.num_rows == 0:
        raise ConfigurationError(f"{path}: the file has no rows", allowed="one problem a row", remedy="Check the file.")
    columns = [name for name in (*_REQUIRED, "extra_info") if name in table.column_names]
    problems: dict[str, Problem] = {}
    for row, values in enumerate(table.select(columns).to_pylist()):
        read = _problem(path, row, values)
        problems.setdefault(read.identifier, read)
    return DataSet(table, list(problems.values()))


def write_table(path: Path, table: pyarrow.Table) -> None:
    """Write a table as parquet, and replace an existing file."""
    with new_file(path, replace=True) as scratch:
        parquet.write_table(table, scratch)


def read_rows(path: Path, option: str = "") -> list[Any]:
    """Return the rows of a .parquet, .jsonl or .json file; JSON has one row a line, and rows may differ in fields.

    Errors name the `option` that gave the file.
    """
    name, allowed = f"{option} {path}".strip(), ".parquet, or .jsonl with one JSON object a line"
    if not path.is_file():
        raise ConfigurationError(f"{name}: no such file", allowed=allowed, remedy="Check the path.")
    if path.suffix == ".parquet":
        return _table(path).to_pylist()
    if path.suffix not in (".jsonl", ".json"):
        raise ConfigurationError(f"{name}: unknown format {path.suffix!r}", allowed=allowed)
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            raise ConfigurationError(f"{name}, line {number}: {error}", allowed=allowed) from None
    return rows


def _table(path: Path) -> pyarrow.Table:
    with naming_file(path):
        whole = path.suffix == ".parquet" and path.is_file()
        return parquet.read_table(path) if whole else pyarrow.Table.from_pylist(read_rows(path))


def prompt_tokens(job: PromptedJob, model: Model, sampler: Model, response_tokens: int) -> list[tuple[int, ...]]:
    """Return a job's prompts as tokens of `model`; prompt and `response_tokens` must fit the context of `sampler`."""
    token_ids = tokenize(read_prompts(job.prompts, job.prompt_field, job.max_prompts), model)
    longest = max(map(len, token_ids))
    if sampler.context is not None and longest + response_tokens > sampler.context:
        raise ConfigurationError(
            f"the longest prompt has {longest} tokens, and the model's context {sampler.context}",
            setting="--max-response-tokens", value=job.max_response_tokens,
            remedy="Lower it, or remove the long prompts.",
        )  # fmt: skip
    return token_ids


def read_prompts(path: str, field: str = "prompt", limit: int | None = None) -> list[Prompt]:
    """Return the first prompts of a .parquet, .jsonl or .json file (one object a line), or the `built-in` questions.

    The column of the prompts has verl's chats (lists of {role, content}) or plain text.
    """
    if path == BUILT_IN_PROMPTS:
        return [[{"role": "user", "content": text}] for text in _QUESTIONS.read_text().splitlines()[:limit]]
    rows = read_rows(Path(path), "--prompts")[:limit]
    if not rows:
        raise ConfigurationError(f"--prompts {path}: the file has no rows", allowed="one prompt a row")
    prompts = [row.get(field) if isinstance(row, dict) else None for row in rows]
    for number, prompt in enumerate(prompts):
        if not (_is_chat(prompt) or (isinstance(prompt, str) and prompt)):
            problem = f"--prompts {path}: field {field!r} of row {number} is {str(prompt)[:80]!r}"
            allowed = "non-empty text, or a non-empty list of {role, content}"
            raise ConfigurationError(problem, allowed=allowed, remedy="Name the field with --prompt-field.")
    return prompts  # type: ignore[return-value]


def _is_chat(value: Any) -> bool:
    """Return whether a value is a non-empty list of messages {role, content}."""
    messages = value if isinstance(value, list) and value else [None]
    return all(
        isinstance(each, dict) and isinstance(each.get("content"), str | list) and each.get("role") for each in messages
    )


def _problem(path: Path, row: int, values: dict[str, Any]) -> Problem:
    prompt, source, rewarded = (cast(Any, values.get(name)) for name in _REQUIRED)
    truth = rewarded.get("ground_truth") if isinstance(rewarded, dict) else None
    right = (_is_chat(prompt), source and isinstance(source, str), truth is not None)
    for (field, allowed), fits in zip(_REQUIRED.items(), right, strict=True):
        if not fits:
            problem, remedy = f"{path}, row {row}: {field} is {values.get(field)!r}", "`verl-precision data` writes it."
            raise ConfigurationError(problem, allowed=allowed, remedy=remedy)
    # Parquet fills keys that only other rows have with null; the identifier must not depend on them.
    messages = [{key: value for key, value in message.items() if value is not None} for message in prompt]
    content = json.dumps([messages, source, truth], sort_keys=True, ensure_ascii=False, default=str)
    identifier = sha256(content.encode()).hexdigest()[:16]
    return Problem(identifier, row, messages, source, truth, values.get("extra_info") or {})


@dataclass(frozen=True)
class Reward:
    """Judges responses.

    A response is correct if its score reaches `pass_score`. If the function returns a mapping, as verl allows, `acc`
    decides; without `acc`, the mapping's `score` does.
    """

    name: str  # recorded in a job's settings; it changes when the function's file changes
    pass_score: float  # smallest score of a correct response
    score: Callable[..., Any]  # (data_source, solution_str, ground_truth, extra_info) -> number, or dict with score
    reads_empty: bool = False  # whether the function can judge with an empty ground truth

    def is_correct(self, problem: Problem, text: str) -> bool:
        """Return whether a response is correct; raise an error if the function fails or returns no finite number."""
        try:
            about = {name: getattr(problem, name) for name in ("data_source", "ground_truth", "extra_info")}
            score = self.score(solution_str=text, **about)
        except Exception as error:
            place = f"row {problem.row} (data_source {problem.data_source!r}, ground truth {problem.ground_truth!r})"
            allowed = "a function with verl's signature that accepts this data_source"
            raise _refusal(self.name, f"{type(error).__name__}: {error}, on {place}", allowed) from error
        if isinstance(score, dict):
            if "acc" in score:
                return bool(score["acc"])
            score = score.get("score")
        if not isinstance(score, Real) or not math.isfinite(score):
            allowed = "a finite number, or a mapping with `acc` or `score`"
            raise _refusal(self.name, f"the function returned {score!r} on row {problem.row}", allowed)
        return float(score) >= self.pass_score

    def readable(self, problems: Sequence[Problem]) -> list[Problem]:
        """Return the problems whose ground truth the function can read; all responses to the others would be wrong.

        This also calls the function once for each data source, so that a broken function fails before a model loads.
        """
        for problem in {problem.data_source: problem for problem in problems}.values():
            self.is_correct(problem, "")
        found = [problem for problem in problems if self.reads_empty or str(problem.ground_truth).strip()]
        if not found:
            unread = f"none of the {len(problems)} ground truths can be read; the first is {problems[0].ground_truth!r}"
            raise _refusal(self.name, unread, "ground truths that this reward can read")
        return found


def load_reward(name: str, pass_score: float = 1.0) -> Reward:
    """Return the reward with a name.

    Names are `verl` (verl's default_compute_score, which chooses by data_source), `math-verify` (`boxed_answer`, with
    which the recipes train), and FILE.py[:FUNCTION] or, as in verl's configs, pkg://MODULE[:FUNCTION], with verl's
    signature. The default FUNCTION is compute_score.
    """
    if name == "verl":
        from verl.utils.reward_score import default_compute_score

        return Reward(name, pass_score, default_compute_score)
    if name == "math-verify":
        require_math_verify()
        return Reward(name, pass_score, boxed_answer.compute_score)
    file, _, function = name.rpartition(":") if ".py:" in name else (name, "", "")
    location = str(Path(file).expanduser())
    if name.startswith(PACKAGE):
        location, _, function = name.removeprefix(PACKAGE).partition(":")
        location = PACKAGE + location
    elif not location.endswith(".py"):
        allowed = "verl, math-verify, or FILE.py:FUNCTION or pkg://MODULE:FUNCTION with verl's signature"
        raise _refusal(name, "no such reward", allowed)
    function = function or "compute_score"
    require_feature("reward functions")
    from verl.utils.import_utils import load_module

    try:
        module: Any = load_module(location)
        score = getattr(module, function)
        if not callable(score):
            raise TypeError(f"{function} is not a function")
    except Exception as error:
        cause = error.__cause__ or error
        raise _refusal(name, f"it cannot be loaded ({type(cause).__name__}: {cause})") from error
    path = Path(module.__file__)
    digest = sha256(path.read_bytes()).hexdigest()[:12]
    return Reward(f"{path.name}:{function}@{digest}", pass_score, score, reads_empty=True)


def _refusal(name: str, problem: str, allowed: str = "") -> ConfigurationError:
    remedy = "Correct it, or choose another --reward."
    return ConfigurationError(problem, setting="--reward", value=name, allowed=allowed, remedy=remedy)
