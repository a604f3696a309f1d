"""The tokens behind a number: the file in which a run keeps a few responses of each step, and how it is read.

`kept_tokens.bin` is a header and records, all little-endian. The header is 8 bytes of magic, the length of a text and
the text, JSON that names version, fields and decisions. A record is one response: a head of fixed size, which says all
that a list shows, and a body, arrays and texts that only a look at the response reads. Records are appended, steps in
order. A record that a killed run has left unfinished is no record: readers stop before it, the next start cuts it off.

Reading needs NumPy alone. What other estimators would have decided: `decisions.py`, which needs torch.
"""

import itertools
import json
import math
import os
import re
import struct
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import open_regular
from verl_precision.tools.kept_tokens.kept_bytes import LONGEST_TEXT, PLANE, packed, unpacked, utf8, word_bytes

FILE, VERSION = "kept_tokens.bin", 1
NOT_OURS, KEPT, CLIPPED, PHANTOM, MASKED, TRUNCATED, UNKNOWN = DECISIONS = (
    *("not the policy's", "kept", "clipped", "phantom-clipped", "masked", "truncated", "not known"),
)
REASONS = ("largest weight", "largest gap", "random")
LONGEST_IDENTITY, _LONGEST_HEADER = 200, 4096  # bytes of UTF-8
# Arrays of a body: of the prompt's tokens, and of the response's; those of a shadow are absent where none ran.
ARRAYS = {
    "prompt_ids": "<i4", "token_ids": "<i4", "rollout_log_probs": "<f4", "log_probs": "<f4", "shadow_log_probs": "<f4",
    "advantages": "<f4", "weights": "<f4", "mask": "u1", "turn": "<u2", "decisions": "u1",
}  # fmt: skip
_MAGIC, _RECORD = b"VPTOKENS", b"VPTK"
# record, its bytes, CRC of its body; step, reason, tokens, reward (NaN: none), log-weight, largest gap, lost tokens,
# damage, turns, version of the weights (-1: not known), bytes of the identity
_HEAD = struct.Struct("<4sIIqBIdddIdHqH")
_CRC = struct.Struct("<I")  # of head and identity


@dataclass(frozen=True, kw_only=True)
class KeptSummary:
    """What a list of responses shows.

    Attributes:
        step: The training step whose update the response was part of.
        offset: Where its record begins in the file.
        identity: verl's key of the response.
        reason: Why it was kept, one of `REASONS`.
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
    estimator_settings: Mapping[str, Any]  # of `losses.in_use.LossInUse`
    prompt_text: str | None  # None with keep_text=False
    pieces: Mapping[int, str] | None  # token id -> its text; None with keep_text=False

    @property
    def texts(self) -> list[str] | None:
        """The text of each token of the response; None with keep_text=False."""
        return None if self.pieces is None else [self.pieces[token] for token in self.token_ids.tolist()]


def beside(metrics: Path) -> Path:
    """Return where a run keeps its tokens, given its metrics file; a file that others stand beside gives its name."""
    return metrics.with_name(FILE if metrics.name == "metrics.jsonl" else f"{metrics.stem}.{FILE}")


def index_of(path: Path, start: int = 0) -> tuple[list[KeptSummary], int]:
    """Return the summaries of the whole records from byte `start` on, and the byte to go on from.

    Bytes that are no whole record end the list: one that is being written, or was left by a killed run. Where `start`
    is beyond the end, a resumed run has cut the file: the answer is nothing, and to go on from 0.

    Raises:
        ConfigurationError: If the file is none of kept tokens, or of another version.
    """
    with open_regular(path, most=math.inf) as file:
        size = os.fstat(file.fileno()).st_size
        if size < start:
            return [], 0
        begin = max(start, _first(file, path))
        found = list(_records(file, begin, size))
        return [summary for summary, _ in found], found[-1][1] if found else begin


def response_at(path: Path, offset: int) -> KeptResponse:
    """Return the response whose record begins at byte `offset`; refused is one that is not whole, or damaged."""
    with open_regular(path, most=math.inf) as file:
        _first(file, path)
        found = next(_records(file, offset, os.fstat(file.fileno()).st_size), None)
        if found is None:
            raise _refused(path, f"no whole record begins at byte {offset}", "Read the list again: a resume cuts it.")
        summary, end = found
        body = file.read(end - file.tell())
        file.seek(offset)
        if zlib.crc32(body) != _HEAD.unpack(file.read(_HEAD.size))[2]:
            raise _refused(path, f"the record at byte {offset} is damaged", "Look at another response.")
        return _with_body(summary, body)


def append(path: Path, responses: Sequence[KeptResponse]) -> int:
    """Append the responses of a step, and return the bytes; makes the file, and leaves it as it was after an error."""
    with path.open("ab") as file:
        before = file.tell()
        try:
            if not before:
                file.write(_header())
            file.writelines(record_of(response) for response in responses)
            file.flush()
        except BaseException:
            file.truncate(before)
            raise
        return file.tell() - before


def largest_step(
    responses: int, prompt: int, response: int, keep_text: bool, settings: Mapping[str, Any], shadow: bool
) -> int:
    """Return the most bytes that a step takes: `responses` of at most so many tokens of prompt and response.

    `settings` are the estimator's; `shadow` says whether its log-probs are among the arrays.
    """
    of_prompt = np.dtype(ARRAYS["prompt_ids"]).itemsize
    each = sum(np.dtype(dtype).itemsize for dtype in ARRAYS.values()) - of_prompt
    each -= 0 if shadow else np.dtype(ARRAYS["shadow_log_probs"]).itemsize
    text = LONGEST_TEXT if keep_text else 0
    tokens = prompt * (of_prompt + text) + response * (each + text + bool(text))
    of_meta = len(json.dumps(dict(settings))) + 600
    of_meta += PLANE.size * (3 + sum(np.dtype(dtype).itemsize for dtype in ARRAYS.values()))
    return responses * (_HEAD.size + 2 * _CRC.size + LONGEST_IDENTITY + of_meta + tokens)


def cut_after(path: Path, step: int) -> Path | None:
    """Move the records after a step, and bytes that are no whole record, to `<file>.superseded`; 0: all of them.

    A file that does not begin as one of this version is moved as a whole: its new path is returned. It was left by a
    run that was killed early, is damaged, or another version's. One that is no regular file is refused.
    """
    if not path.exists():
        return None
    with open_regular(path, "rb+", most=math.inf) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            end = start = _first(file, path)
        except ConfigurationError:
            return path.rename(path.with_name(f"{path.name}.damaged_{time.time_ns()}"))
        for summary, after in _records(file, start, size):
            if summary.step > step:
                break
            end = after
        if end < size:
            file.seek(end)
            with path.with_name(f"{path.name}.superseded").open("ab") as aside:
                aside.write((b"" if aside.tell() else _header()) + file.read())
                aside.flush()
                os.fsync(aside.fileno())
            file.truncate(end)
    return None


def record_of(response: KeptResponse) -> bytes:
    """Return the record of a response."""
    parts, directory = [], []

    def add(name: str, part: bytes, count: int) -> None:
        directory.append([name, count, len(part)])
        parts.append(part)

    for name, dtype in ARRAYS.items():
        if (values := getattr(response, name)) is not None:
            add(name, packed(np.ascontiguousarray(values, dtype=dtype)), len(values))
    if response.pieces is not None:
        words = [word_bytes(response.pieces[token]) for token in np.unique(response.token_ids).tolist()]
        prompt = utf8(response.prompt_text or "", LONGEST_TEXT * len(response.prompt_ids))
        for name, text in (("pieces", b"".join(words)), ("piece_bytes", bytes(map(len, words))), ("prompt", prompt)):
            add(name, packed(np.frombuffer(text, "u1")), len(text))
    meta = {"estimator": dict(response.estimator_settings), "behind": response.behind, "parts": directory}
    text = json.dumps(meta).encode()
    body = b"".join((_CRC.pack(len(text)), text, *parts))
    identity = utf8(response.identity, LONGEST_IDENTITY)
    length = _HEAD.size + len(identity) + _CRC.size + len(body)
    head = _HEAD.pack(
        _RECORD, length, zlib.crc32(body), response.step, REASONS.index(response.reason), response.length,
        np.nan if response.reward is None else response.reward, response.log_weight, response.largest_gap,
        response.lost, response.damage, response.turns, -1 if response.version is None else response.version,
        len(identity),
    )  # fmt: skip
    return b"".join((head, identity, _CRC.pack(zlib.crc32(head + identity)), body))


def _header() -> bytes:
    """Return the first bytes of a file."""
    about = {"version": VERSION, "arrays": ARRAYS, "decisions": DECISIONS, "reasons": REASONS, "head": _HEAD.format}
    text = json.dumps(about).encode()
    return _MAGIC + _CRC.pack(len(text)) + text


def _first(file: BinaryIO, path: Path) -> int:
    """Return where the first record begins."""
    begin = file.read(len(_MAGIC) + _CRC.size)
    length = int.from_bytes(begin[len(_MAGIC) :], "little")
    text = file.read(min(length, _LONGEST_HEADER))
    version = re.fullmatch(rb'\{"version": (\d+)\b.*\}', text, re.DOTALL)
    if not begin.startswith(_MAGIC) or len(text) < length or version is None:
        problem = "it is no file of kept tokens, or its header is damaged"
        raise _refused(path, problem, "Set mismatch.keep_tokens for a run to keep some.")
    if int(version[1]) != VERSION:
        raise _refused(path, f"its version is {int(version[1])}", "Read it with the verl-precision that wrote it.")
    return file.tell()


def _records(file: BinaryIO, start: int, size: int) -> Iterator[tuple[KeptSummary, int]]:
    """Yield the summary of each whole record, and where the record ends."""
    while start + _HEAD.size + _CRC.size <= size:
        file.seek(start)
        head = file.read(_HEAD.size)
        magic, length, _, step, reason, tokens, reward, *numbers, identity_length = _HEAD.unpack(head)
        rest = file.read(identity_length + _CRC.size)
        identity, crc = rest[:identity_length], rest[identity_length:]
        shortest = _HEAD.size + len(rest)
        if magic != _RECORD or not shortest <= length <= size - start or crc != _CRC.pack(zlib.crc32(head + identity)):
            return
        log_weight, gap, lost, damage, turns, version = numbers
        summary = KeptSummary(
            step=step, offset=start, identity=identity.decode("utf-8", "replace"), reason=REASONS[reason],
            length=tokens, reward=None if np.isnan(reward) else reward, log_weight=log_weight, largest_gap=gap,
            lost=lost, damage=damage, turns=turns, version=None if version < 0 else version,
        )  # fmt: skip
        start += length
        yield summary, start


def _with_body(summary: KeptSummary, body: bytes) -> KeptResponse:
    (length,) = _CRC.unpack(body[: _CRC.size])
    at = _CRC.size + length
    meta = json.loads(body[_CRC.size : at])
    found: dict[str, Any] = {"shadow_log_probs": None}
    for name, count, size in meta["parts"]:
        found[name] = unpacked(body[at : at + size], np.dtype(ARRAYS.get(name, "u1")), count)
        at += size
    pieces = prompt = None
    if "pieces" in found:
        text, lengths, prompt = (found.pop(name).tobytes() for name in ("pieces", "piece_bytes", "prompt"))
        ends = list(itertools.accumulate(lengths))
        words = [text[end - size : end].decode() for end, size in zip(ends, lengths, strict=True)]
        pieces = dict(zip(np.unique(found["token_ids"]).tolist(), words, strict=True))
        prompt = prompt.decode()
    return KeptResponse(
        **vars(summary), **found, behind=meta["behind"], estimator=meta["estimator"]["name"],
        estimator_settings=meta["estimator"], prompt_text=prompt, pieces=pieces,
    )  # fmt: skip


def _refused(path: Path, problem: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(problem, setting="KEPT_TOKENS", value=str(path), remedy=remedy)
