"""The tokens behind a number: the folder in which a run keeps a few responses of each step, and how it is read.

`kept_tokens/step_12.parquet` has a row for each response that was kept of step 12; `pandas.read_parquet("kept_tokens")`
opens those of all steps. A file appears whole or not at all, so that whoever reads while the run goes on, or after it
was killed, sees whole steps; a resume moves the files of later steps aside. Readers of a list read its columns alone.

Reading needs NumPy and pyarrow. What other estimators would have decided: `decisions.py`, which needs torch.
"""

import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import new_file, open_regular

FOLDER = "kept_tokens"
NOT_OURS, KEPT, CLIPPED, PHANTOM, MASKED, TRUNCATED, UNKNOWN = DECISIONS = (
    *("not the policy's", "kept", "clipped", "phantom-clipped", "masked", "truncated", "not known"),
)
LONGEST_TEXT = 64  # bytes of UTF-8 for each token; a longer text is cut
MOST_RESPONSES = 256  # of a step
_MOST_BYTES = 2**31  # of the values of a step; a file says how many it has
_NAME = re.compile(r"step_([0-9]{1,18})\.parquet")
# Of the prompt's tokens, and of the response's; those of a shadow are absent where none ran.
ARRAYS = {
    "prompt_ids": "i4", "token_ids": "i4", "rollout_log_probs": "f4", "log_probs": "f4", "shadow_log_probs": "f4",
    "advantages": "f4", "weights": "f4", "mask": "u1", "turn": "u2", "decisions": "u1",
}  # fmt: skip
# Sign and exponent of log-probs shrink, and the lower bits of their mantissas are noise: each byte has a stream.
_SPLIT = [f"{name}.list.element" for name, dtype in ARRAYS.items() if dtype in ("i4", "f4")]
_REPEATED = ["reason", "estimator", "estimator_settings"]
_REPEATED += [f"{name}.list.element" for name in ("mask", "turn", "decisions", "texts")]


@dataclass(frozen=True, kw_only=True)
class KeptSummary:
    """What a list of responses shows.

    Attributes:
        step: The training step whose update the response was part of.
        offset: Its place among the responses of all steps, for `response_at`.
        identity: verl's key of the response.
        reason: Why it was kept, one of `candidates.REASONS`.
        length: Tokens of the response, tool output included.
        reward: Its reward; None where the run has none.
        log_weight: Σₜ log π - log μ over the policy's tokens, nats.
        largest_gap: Largest |log π - log μ| of one of them.
        lost: Tokens with an advantage that gave no gradient: clipped, phantom-clipped or masked.
        damage: Σₜ |sₜ - Aₜ| + |Aₜ (π/μ - 1)| over the policy's tokens, where Σₜ sₜ ∇log π(yₜ) is the gradient: the
            estimator's change, and the mismatch itself. 0 without a mismatch.
        turns: Turns of the policy: maximal runs of its own tokens.
        version: Of the weights that sampled it: the step whose update made them; None: not known.
    """

    step: int
    offset: int = -1
    identity: str
    reason: str
    length: int
    reward: float | None
    log_weight: float
    largest_gap: float
    lost: int
    damage: float
    turns: int
    version: int | None


@dataclass(frozen=True, kw_only=True)
class KeptResponse(KeptSummary):
    """A response as the update saw it; arrays are [T], one entry a token of the response, tool output included."""

    prompt_ids: np.ndarray  # [P]
    token_ids: np.ndarray
    rollout_log_probs: np.ndarray  # log μ, nats
    log_probs: np.ndarray  # log π, nats; the trainer's own, not a shadow's
    shadow_log_probs: np.ndarray | None  # those of the trainer's weights in the rollout's precision
    advantages: np.ndarray
    weights: np.ndarray  # sₜ / Aₜ as far as it is the estimator's: its weight, or ratio, 0 where the token lost it
    mask: np.ndarray  # 1: written by the policy
    turn: np.ndarray  # 1, 2, ...: the turn in which the policy wrote it; 0: tool output
    decisions: np.ndarray  # the run's own: indices into `DECISIONS`
    behind: int  # versions of the weights between those that sampled it and those that scored it
    estimator: str  # the run's own, in words
    estimator_settings: Mapping[str, Any]  # of `losses.registry.LossInUse`
    prompt_text: str | None  # None with keep_text=False
    pieces: Mapping[int, str] | None  # token id -> its text; None with keep_text=False

    @property
    def texts(self) -> list[str] | None:
        """The text of each token of the response; None with keep_text=False."""
        return None if self.pieces is None else [self.pieces[token] for token in self.token_ids.tolist()]


_TYPES = {int: pa.int64(), int | None: pa.int64(), float: pa.float64(), float | None: pa.float64(), str: pa.string()}
_SUMMARY = {name: _TYPES[kind] for name, kind in get_type_hints(KeptSummary).items() if name != "offset"}
_SCHEMA = pa.schema([
    *_SUMMARY.items(),
    *((name, pa.list_(pa.from_numpy_dtype(dtype))) for name, dtype in ARRAYS.items()),
    *(("behind", pa.int64()), ("estimator", pa.string()), ("estimator_settings", pa.string())),  # JSON
    *(("prompt_text", pa.string()), ("texts", pa.list_(pa.string()))),
])  # fmt: skip


def beside(metrics: Path) -> Path:
    """Return where a run keeps its tokens, given its metrics file; a file that others stand beside gives its name."""
    return metrics.with_name(FOLDER if metrics.name == "metrics.jsonl" else f"{metrics.stem}.{FOLDER}")


def files_in(folder: Path) -> dict[int, Path]:
    """Return the files of a folder by their steps, in their order; none where there is no folder.

    Raises:
        ConfigurationError: If something else is in its place.
    """
    if folder.exists() and not folder.is_dir():
        raise _refused(folder, "it is no folder of kept tokens", "Move it away.")
    found = {int(name[1]): path for path in folder.glob("step_*") if (name := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def index_of(folder: Path) -> list[KeptSummary]:
    """Return the summaries of all responses.

    Raises:
        ConfigurationError: If a file is damaged, or none of kept tokens.
    """
    return [summary for file in files_in(folder).values() for summary in summaries_in(file)]


def summaries_in(file: Path) -> list[KeptSummary]:
    """Return the summaries of a step; refused is a file that is damaged, or none of kept tokens."""
    rows = _read(file, list(_SUMMARY)).to_pylist()
    return [KeptSummary(offset=row["step"] * MOST_RESPONSES + place, **row) for place, row in enumerate(rows)]


def response_at(folder: Path, offset: int) -> KeptResponse:
    """Return a response by its place; refused is one that is not there, or damaged."""
    step, place = divmod(offset, MOST_RESPONSES)
    file = folder / f"step_{step}.parquet"
    table = _read(file, _SCHEMA.names) if file.exists() else _SCHEMA.empty_table()
    if place >= len(table):
        remedy = "Read the list again: a resume moves responses away."
        raise ConfigurationError(
            f"no response {offset} is in it", setting="KEPT_TOKENS", value=str(folder), remedy=remedy
        )
    found: dict[str, Any] = {"offset": offset, "shadow_log_probs": None}
    for name in _SCHEMA.names:
        value = table[name][place]
        is_array = name in ARRAYS and value.is_valid
        found[name] = value.values.to_numpy(zero_copy_only=False, writable=True) if is_array else value.as_py()
    found["estimator_settings"] = json.loads(found["estimator_settings"])
    texts = found.pop("texts")
    found["pieces"] = None if texts is None else dict(zip(found["token_ids"].tolist(), texts, strict=True))
    return KeptResponse(**found)


def _read(file: Path, columns: list[str]) -> pa.Table:
    """Return columns of a file, whose checksums are right; what is wrong with it is said with its name."""
    with open_regular(file, most=math.inf) as opened:
        found = parquet.ParquetFile(opened, page_checksum_verification=True)
        groups = range(found.num_row_groups)
        size = sum(found.metadata.row_group(number).total_byte_size for number in groups)
        if not 0 <= found.metadata.num_rows <= MOST_RESPONSES or not 0 <= size <= _MOST_BYTES:
            raise ValueError(f"{found.metadata.num_rows} responses of {size} bytes")
        if missing := set(columns) - set(found.schema_arrow.names):
            raise ValueError(f"it has no column {min(missing)}")
        return found.read(columns).cast(pa.schema([_SCHEMA.field(name) for name in columns]))


def append(folder: Path, responses: Iterable[KeptResponse]) -> None:
    """Write the responses of each of their steps, which appear at once; a step that is there is replaced."""
    for step, some in groupby(responses, lambda response: response.step):
        with new_file(folder / f"step_{step}.parquet", replace=True) as scratch:
            parquet.write_table(
                _table(list(some)), scratch, compression="zstd", compression_level=1, use_dictionary=_REPEATED,
                use_byte_stream_split=_SPLIT, write_statistics=False, write_page_checksum=True,
            )  # fmt: skip


def _table(responses: Sequence[KeptResponse]) -> pa.Table:
    """Return the responses of a step; all have a shadow and texts, or none has."""
    rows = [{**vars(each), "estimator_settings": json.dumps(dict(each.estimator_settings))} for each in responses]
    columns: dict[str, Any] = {field.name: [row.get(field.name) for row in rows] for field in _SCHEMA}
    for name, dtype in ARRAYS.items():
        if all(values is not None for values in columns[name]):
            flat = pa.array(np.concatenate(columns[name]).astype(dtype, copy=False))
            columns[name] = pa.ListArray.from_arrays(_offsets(columns[name]), flat)
    if all(each.pieces is not None for each in responses):
        ids = [each.token_ids for each in responses]
        words = {token: text for each in responses for token, text in (each.pieces or {}).items()}
        coded = pa.array(np.concatenate(ids)).dictionary_encode()  # a text is there once
        texts = pa.array([words[token] for token in coded.dictionary.to_pylist()], pa.string())
        columns["texts"] = pa.ListArray.from_arrays(_offsets(ids), texts.take(coded.indices))
    return pa.table([pa.array(columns[field.name], field.type) for field in _SCHEMA], schema=_SCHEMA)


def _offsets(arrays: Sequence[np.ndarray]) -> pa.Array:
    return pa.array(np.cumsum([0, *map(len, arrays)]), pa.int32())


def largest_step(responses: int, prompt: int, response: int, keep_text: bool, shadow: bool) -> int:
    """Return the most bytes that a step takes: `responses` of at most so many tokens of prompt and response.

    `shadow` says whether its log-probs are among the arrays.
    """
    sizes = {name: np.dtype(dtype).itemsize for name, dtype in ARRAYS.items()}
    of_prompt = sizes.pop("prompt_ids")
    text = LONGEST_TEXT if keep_text else 0
    # With a text goes its length, and which of the different ones it is.
    of_response = sum(sizes.values()) - (0 if shadow else sizes["shadow_log_probs"]) + text + 6 * bool(text)
    tokens = prompt * (of_prompt + text) + response * of_response
    return 20_000 + responses * (2_000 + int(1.02 * tokens))


def cut_after(folder: Path, step: int) -> None:
    """Move the files of later steps to `<folder>.superseded`; 0: all of them."""
    aside = folder.with_name(f"{folder.name}.superseded")
    for number, file in files_in(folder).items():
        if number > step:
            aside.mkdir(exist_ok=True)
            file.rename(aside / f"{file.stem}_{time.time_ns()}.parquet")


def cut_text(text: str, most: int = LONGEST_TEXT) -> str:
    """Return at most so many bytes of a text in UTF-8, whole characters."""
    return text.encode("utf-8", "replace")[:most].decode("utf-8", "ignore")


def _refused(folder: Path, problem: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(problem, setting="KEPT_TOKENS", value=str(folder), remedy=remedy)
