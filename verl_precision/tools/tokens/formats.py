"""The token dumps that frameworks write, read one response at a time, and the metrics of each step in them.

docs/other_frameworks.md names the options that write them, and the versions whose code the fields were read from.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import naming_file, open_regular
from verl_precision.base.mergeable import Mean, StatisticSet
from verl_precision.losses.settings import ClipRange
from verl_precision.mismatch.monitor import PHANTOM, MismatchMonitor
from verl_precision.mismatch.packing import FlatBatch
from verl_precision.mismatch.phantom import PhantomStatistics
from verl_precision.tools.runs.read import REWARD

LONGEST_LINE = 2**28  # bytes
CHUNK_TOKENS = 1 << 19  # in memory at a time
REQUIRED = ("format", "step", "trainer_log_probs", "rollout_log_probs")  # of the plain format
OPTIONAL = ("mask", "advantages", "shadow_log_probs", "reward", "ended")
_PLAIN = "Other loops can write the plain format: docs/other_frameworks.md."


class Response(NamedTuple):
    """One response of a dump; arrays are [T] float64, log-probs in nats, with NaN where the dump has null."""

    step: int
    trainer: np.ndarray
    rollout: np.ndarray
    mask: np.ndarray
    advantages: np.ndarray
    shadow: np.ndarray | None = None
    reward: float | None = None
    ended: bool = True


class _Record(dict[str, Any]):
    """A line, row or sample of a dump; fields that are missing or of another form are refused by name."""

    def __init__(self, fields: Mapping[str, Any], place: str) -> None:
        super().__init__(fields)
        self.place = place

    def __missing__(self, name: str) -> Any:
        raise self.refused(f"the field `{name}` is missing", f"{name}; there are {', '.join(sorted(self)[:40])}")

    def refused(self, problem: str, allowed: str) -> ConfigurationError:
        return ConfigurationError(problem, setting="FOLDER", value=self.place, allowed=allowed, remedy=_PLAIN)

    def require(self, name: str, version: int) -> None:
        if self[name] != version:
            raise self.refused(f"{name} is {self[name]!r}, which is unknown", f"{name} {version}")

    def response(self, step: Any, mask: Any, names: tuple[str, ...], **others: Any) -> Response:
        """Return the response of the fields of trainer, rollout, advantages and shadow; all have the same length."""
        arrays = [None if name not in self and number > 1 else _array(self[name]) for number, name in enumerate(names)]
        zeros = np.zeros_like(arrays[0])  # advantages that have no sign
        trainer, rollout, advantages, *shadow = arrays
        mask, advantages = zeros + 1 if mask is None else _array(mask), zeros if advantages is None else advantages
        made = Response(step, trainer, rollout, mask, advantages, *shadow, **others)  # type: ignore[arg-type]
        shapes = {name: each.shape for name, each in made._asdict().items() if isinstance(each, np.ndarray)}
        if len({*shapes.values()}) > 1 or zeros.ndim != 1 or not isinstance(step, int):
            raise self.refused(f"step {step!r} has arrays of the shapes {shapes}", "a whole step; one number a token")
        return made


Reader = Callable[[Path, bool], Iterator[tuple[int, Response]]]


def _array(values: Any) -> np.ndarray:
    return values.double().numpy() if isinstance(values, torch.Tensor) else np.array(values, dtype=np.float64)


def _prime_rl(path: Path, allow_pickle: bool) -> Iterator[tuple[int, Response]]:
    for size, record in _records(path):
        record.require("schema_version", 1)
        # Tokens of a frozen model have no log-prob of sampling: left out, as in prime-rl's own metric. null: weight 1.
        policy, reference = _array(record["rl_weights"]), np.nan_to_num(_array(record["ref_kl_weights"]))
        mask = _array(record["loss_mask"]) * ((policy != 0) | (reference != 0))
        names = "trainer_logprobs", "inference_logprobs", "advantages"
        yield size, record.response(record["step"], mask, names)


def _nemo_rl(path: Path, allow_pickle: bool) -> Iterator[tuple[int, Response]]:
    step = int(re.findall(r"\d+", path.stem)[-1])
    for size, record in _records(path):
        # A value is a slice of one of the batch, or empty: dynamic sampling leaves fewer responses than rewards.
        record.update({name: value[0] for name, value in record.items() if isinstance(value, list) and len(value) == 1})
        mask = _array(record["token_loss_mask"]) * _array(record["sample_loss_mask"])
        names = "prev_logprobs", "generation_logprobs", "advantages"
        yield size, record.response(step, mask, names, reward=record.get("rewards"))


def _slime(path: Path, allow_pickle: bool) -> Iterator[tuple[int, Response]]:
    with open_regular(path, most=math.inf):
        try:
            dump = torch.load(path, map_location="cpu", weights_only=not allow_pickle, mmap=True)
        except Exception as error:
            if allow_pickle or "weights_only" not in str(error):
                raise
            problem, remedy = "it has more than tensors: it can run code", "If you trust its writer, --allow-pickle."
            raise ConfigurationError(problem, setting="FOLDER", value=str(path), remedy=remedy) from error
    dump = _Record(dump, str(path))
    dump.require("format_version", 2)
    samples, rewards = dump["samples"], dump.get("raw_reward") or ()
    rewards = rewards if len(rewards) == len(samples) else [None] * len(samples)
    for number, (sample, reward) in enumerate(zip(samples, rewards, strict=True)):
        record, names = _Record(sample, f"{path}, sample {number}"), ("log_probs", "rollout_log_probs", "advantages")
        size = path.stat().st_size // len(samples)
        yield size, record.response(dump["rollout_id"], record.get("loss_masks"), names, reward=reward)


def _plain(path: Path, allow_pickle: bool) -> Iterator[tuple[int, Response]]:
    names = *REQUIRED[2:], "advantages", "shadow_log_probs"
    for size, record in _records(path):
        record.require("format", 1)
        if unknown := sorted({*record} - {*REQUIRED, *OPTIONAL}):
            raise record.refused(f"the field `{unknown[0]}` is unknown", ", ".join((*REQUIRED, *OPTIONAL)))
        others = {name: record[name] for name in ("reward", "ended") if name in record}
        yield size, record.response(record["step"], record.get("mask"), names, **others)


def _records(path: Path) -> Iterator[tuple[int, _Record]]:
    """Yield the lines of a JSONL file, or the rows of a Parquet file, with their bytes; null fields are left out."""
    with open_regular(path, most=math.inf) as file:
        if path.suffix != ".parquet":
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), 1):
                with naming_file(Path(place := f"{path}, line {number}")):
                    yield len(line), _Record(json.loads(line), place)
            return
        table = pq.ParquetFile(file)
        size = path.stat().st_size // max(table.metadata.num_rows, 1)
        rows = (row for batch in table.iter_batches(batch_size=16) for row in batch.to_pylist())
        for number, row in enumerate(rows, 1):
            fields = {name: value for name, value in row.items() if value is not None}
            yield size, _Record(fields, f"{path}, row {number}")


FORMATS: Mapping[str, tuple[Reader, tuple[str, ...]]] = {
    "prime-rl": (_prime_rl, ("**/step_*/rank_*.jsonl",)),
    "NeMo-RL": (_nemo_rl, ("**/train_data_step*.jsonl",)),
    "slime": (_slime, ("*.pt", "train_data/*.pt")),
    "plain": (_plain, ("**/*.tokens.jsonl", "**/*.tokens.parquet")),
}
"""Name -> reader, and files below the folder. A reader yields responses, with the bytes of each."""


def dumps_in(folder: Path) -> tuple[Reader, list[Path]]:
    """Return the reader of the dumps in a folder, and their files; refuse a folder with no format, or with two."""
    found = {name: sorted({path for one in patterns for path in folder.glob(one)})
             for name, (_, patterns) in FORMATS.items()}  # fmt: skip
    found = {name: files for name, files in found.items() if files}
    if len(found) == 1:
        return FORMATS[next(iter(found))][0], next(iter(found.values()))
    problem = f"it has dumps of {' and '.join(found)}" if found else "there are no token dumps in it"
    allowed = "; ".join(f"{name}: {' or '.join(patterns)}" for name, (_, patterns) in FORMATS.items())
    raise ConfigurationError(problem, setting="FOLDER", value=str(folder), allowed=allowed, remedy=_PLAIN)


def rows_of(responses: Iterable[Response], clip: ClipRange | None = None) -> list[dict[str, Any]]:
    """Return the rows of verl's metrics file in the order of steps; a step's responses may lie apart."""
    steps, tokens = dict[int, MismatchMonitor](), 0

    def chunk_of(response: Response) -> tuple[int, bool, int]:
        nonlocal tokens
        tokens += len(response.mask)
        return response.step, response.shadow is None, tokens // CHUNK_TOKENS

    for (step, *_), chunk in groupby(responses, key=chunk_of):
        _measure(steps.setdefault(step, MismatchMonitor(clip=clip, gather=False)), list(chunk))
    return [{"step": step, "data": steps[step].take_metrics()} for step in sorted(steps)]


def _measure(monitor: MismatchMonitor, chunk: list[Response]) -> None:
    names = "trainer", "rollout", "mask", "advantages", *(("shadow",) if chunk[0].shadow is not None else ())
    flat = [torch.from_numpy(np.concatenate([getattr(each, name) for each in chunk])) for name in names]
    pi, mu, mask, advantages, *shadow = flat
    offsets = torch.tensor([0, *(len(each.mask) for each in chunk)]).cumsum(0)
    batch = FlatBatch((pi, mu), mask != 0, advantages, offsets, torch.tensor([each.ended for each in chunk]))
    monitor.add_batch(batch)
    if shadow:
        clip = monitor.clip if advantages.any() else None  # without signs nothing is known of clipping
        monitor.add(PHANTOM, PhantomStatistics.of_batch(batch._replace(log_probs=(pi, *shadow, mu)), clip))
    rewards = torch.tensor([float(each.reward) for each in chunk if each.reward is not None], dtype=torch.float64)
    if len(rewards):
        monitor.add(REWARD, StatisticSet({REWARD: Mean(rewards.sum(), torch.ones_like(rewards).sum())}))
