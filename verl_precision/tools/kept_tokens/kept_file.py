"""Writes and reads the folder in which a run keeps the tokens of a few responses of each step.

`kept_tokens/step_12.parquet` has a row for each kept response of step 12; `pandas.read_parquet("kept_tokens")` opens
the rows of all steps. A file appears only when it is complete, so a reader sees whole steps while the run continues and
after it was killed. A resume moves the files of later steps aside. A list of responses reads only its own columns.

Reading needs NumPy and pyarrow.
"""

import json
import math
import re
import time
from collections.abc import Iterable, Mapping
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
MOST_RESPONSES = 256  # of a step
_MOST_BYTES = 2**31  # of the values of a step, as the file's metadata give them
_NAME = re.compile(r"step_([0-9]{1,18})\.parquet")
# One value for each token of the prompt or the response; `shadow_log_probs` is absent in a run without a shadow.
ARRAYS = {
    "prompt_ids": "i4", "token_ids": "i4", "rollout_log_probs": "f4", "log_probs": "f4", "shadow_log_probs": "f4",
    "advantages": "f4", "weights": "f4", "mask": "u1", "turn": "u2", "decisions": "u1",
}  # fmt: skip
# Each byte of a number has its own stream: sign and exponent of log-probs compress well, the low mantissa bits do not.
_SPLIT = [f"{name}.list.element" for name, dtype in ARRAYS.items() if dtype in ("i4", "f4")]


@dataclass(frozen=True, kw_only=True)
class KeptSummary:
    """The summary of a kept response, for a list."""

    step: int  # the training step whose update the response was part of
    offset: int = -1  # its place among the responses of all steps, for `response_at`
    identity: str  # verl's key of the response
    reason: str  # why it was kept, one of `candidates.REASONS`
    length: int  # tokens of the response, tool output included
    reward: float | None
    log_weight: float  # Σₜ log π - log μ over the policy's tokens, nats
    largest_gap: float  # largest |log π - log μ| of one of them
    lost: int  # tokens with an advantage that gave no gradient: clipped, phantom-clipped or masked
    # Σₜ |sₜ - Aₜ| + |Aₜ (π/μ - 1)| over the policy's tokens, where Σₜ sₜ ∇log π(yₜ) is the gradient. The first term is
    # the estimator's change, the second the mismatch itself. 0 without a mismatch.
    damage: float
    turns: int  # turns of the policy: maximal runs of its own tokens
    version: int | None  # version of the weights that sampled it: the step whose update made them


@dataclass(frozen=True, kw_only=True)
class KeptResponse(KeptSummary):
    """A response as the update used it; arrays are [T], one entry a token of the response, tool output included."""

    prompt_ids: np.ndarray  # [P]
    token_ids: np.ndarray
    rollout_log_probs: np.ndarray  # log μ, nats
    log_probs: np.ndarray  # log π, nats; the trainer's own, not a shadow's
    shadow_log_probs: np.ndarray | None  # of the trainer's weights in the rollout's dtype
    advantages: np.ndarray
    weights: np.ndarray  # sₜ / Aₜ: the estimator's weight or ratio; 0 if the token gave no gradient
    mask: np.ndarray  # 1: written by the policy
    turn: np.ndarray  # 1, 2, ...: the turn in which the policy wrote it; 0: tool output
    decisions: np.ndarray  # of the run's estimator: indices into `DECISIONS`
    behind: int  # number of weight versions between sampling and scoring
    estimator: str  # name of the run's estimator
    estimator_settings: Mapping[str, Any]  # fields of `losses.registry.LossInUse`
    prompt_text: str | None  # None with keep_text=False
    texts: list[str] | None  # of each token of the response; None with keep_text=False


_TYPES = {int: pa.int64(), int | None: pa.int64(), float: pa.float64(), float | None: pa.float64(), str: pa.string()}
_SUMMARY = {name: _TYPES[kind] for name, kind in get_type_hints(KeptSummary).items() if name != "offset"}
_SCHEMA = pa.schema([
    *_SUMMARY.items(),
    *((name, pa.list_(pa.from_numpy_dtype(dtype))) for name, dtype in ARRAYS.items()),
    *(("behind", pa.int64()), ("estimator", pa.string()), ("estimator_settings", pa.string())),  # JSON
    *(("prompt_text", pa.string()), ("texts", pa.list_(pa.string()))),
])  # fmt: skip


def beside(metrics: Path) -> Path:
    """Return the folder of kept tokens beside a metrics file; a file that is not metrics.jsonl adds its own name."""
    return metrics.with_name(FOLDER if metrics.name == "metrics.jsonl" else f"{metrics.stem}.{FOLDER}")


def files_in(folder: Path) -> dict[int, Path]:
    """Return the files of a folder by step, in the order of steps; none if the folder does not exist."""
    if folder.exists() and not folder.is_dir():
        problem = "it is not a folder of kept tokens"
        raise ConfigurationError(problem, setting="KEPT_TOKENS", value=str(folder), remedy="Move it away.")
    found = {int(name[1]): path for path in folder.glob("step_*") if (name := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def summaries_in(file: Path) -> list[KeptSummary]:
    """Return the summaries of a step's file; refuse a file that is damaged or has no kept tokens."""
    rows = _read(file, list(_SUMMARY)).to_pylist()
    return [KeptSummary(offset=row["step"] * MOST_RESPONSES + place, **row) for place, row in enumerate(rows)]


def response_at(folder: Path, offset: int) -> KeptResponse:
    """Return the response at an offset; refuse a response that does not exist or is damaged."""
    step, place = divmod(offset, MOST_RESPONSES)
    file = folder / f"step_{step}.parquet"
    table = _read(file, _SCHEMA.names) if file.exists() else _SCHEMA.empty_table()
    if place >= len(table):
        problem, remedy = f"it has no response {offset}", "Read the list again; a resumed run moves responses."
        raise ConfigurationError(problem, setting="KEPT_TOKENS", value=str(folder), remedy=remedy)
    found: dict[str, Any] = {"offset": offset}
    for name in _SCHEMA.names:
        value = table[name][place]
        is_array = name in ARRAYS and value.is_valid
        found[name] = value.values.to_numpy(zero_copy_only=False, writable=True) if is_array else value.as_py()
    return KeptResponse(**found | {"estimator_settings": json.loads(found["estimator_settings"])})


def _read(file: Path, columns: list[str]) -> pa.Table:
    """Return columns of a file after a test of its checksums; errors name the file."""
    with open_regular(file, most=math.inf) as opened:
        found = parquet.ParquetFile(opened, page_checksum_verification=True)
        size = sum(found.metadata.row_group(number).total_byte_size for number in range(found.num_row_groups))
        if not 0 <= found.metadata.num_rows <= MOST_RESPONSES or not 0 <= size <= _MOST_BYTES:
            raise ValueError(f"{found.metadata.num_rows} responses of {size} bytes")
        if missing := set(columns) - set(found.schema_arrow.names):
            raise ValueError(f"it has no column {min(missing)}")
        return found.read(columns).cast(pa.schema([_SCHEMA.field(name) for name in columns]))


def append(folder: Path, responses: Iterable[KeptResponse]) -> None:
    """Write the responses, one file a step, which appears when it is complete; replace an existing file of a step."""
    for step, some in groupby(responses, lambda response: response.step):
        rows = [{**vars(each), "estimator_settings": json.dumps(dict(each.estimator_settings))} for each in some]
        columns = [_column(field, [row[field.name] for row in rows]) for field in _SCHEMA]
        with new_file(folder / f"step_{step}.parquet", replace=True) as scratch:
            parquet.write_table(
                pa.table(columns, schema=_SCHEMA), scratch, compression="zstd", use_byte_stream_split=_SPLIT,
                use_dictionary=["texts.list.element"], write_page_checksum=True,
            )  # fmt: skip


def _column(field: pa.Field, values: list[Any]) -> pa.Array:
    """Return a column; arrays at once, because pyarrow reads the floats of a list of arrays one by one."""
    if field.name not in ARRAYS or any(value is None for value in values):
        return pa.array(values, field.type)
    ends = np.cumsum([0, *map(len, values)], dtype=np.int32)
    return pa.ListArray.from_arrays(ends, np.concatenate(values).astype(ARRAYS[field.name], copy=False))


def cut_after(folder: Path, step: int) -> None:
    """Move the files of later steps to `<folder>.superseded`; with step 0, all files."""
    aside = folder.with_name(f"{folder.name}.superseded")
    for number, file in files_in(folder).items():
        if number > step:
            aside.mkdir(exist_ok=True)
            file.rename(aside / f"{file.stem}_{time.time_ns()}.parquet")
