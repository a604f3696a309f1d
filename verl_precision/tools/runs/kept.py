"""The kept tokens of a run as the page shows them: a list of responses, and one response with its decisions."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from verl_precision.base.errors import ConfigurationError, error_in_one_line
from verl_precision.tools.kept_tokens.kept_file import (
    DECISIONS,
    FOLDER,
    KeptResponse,
    KeptSummary,
    beside,
    files_in,
    response_at,
    summaries_in,
)
from verl_precision.tools.runs.contents import JsonNumber, json_number

SHOWN_PROMPT, SHOWN_TOKENS, SHOWN_RESPONSES = 20_000, 32_768, 100  # characters; tokens; responses of a list
ORDERS = {
    "damage": lambda each: (-each.damage, each.step, each.offset),
    "step": lambda each: (-each.step, -each.damage, each.offset),
}


class _Read(NamedTuple):
    """What was read of a file, and when it was written, with its size."""

    written: tuple[int, int]
    found: list[KeptSummary]
    problem: str = ""  # why it cannot be read, in words


class KeptList:
    """The responses that a run has kept so far."""

    def __init__(self, source: Path) -> None:
        """Take the run's metrics, or the folder of them."""
        is_folder = os.path.isdir(source)
        own = source / FOLDER if is_folder else beside(source)
        is_own = is_folder or source.suffix == ".jsonl" or os.path.exists(own)
        self.path = own if is_own else source.with_name(FOLDER)
        self._lock = threading.Lock()
        self._problem = ""  # why the folder cannot be read, in words
        self._known: dict[Path, _Read] = {}

    @property
    def problem(self) -> str:
        """Return why something cannot be read, in words."""
        return self._problem or next((read.problem for read in self._known.values() if read.problem), "")

    @property
    def count(self) -> int | None:
        """Return the number of responses; None where none were kept."""
        return len(self._found()) if self._known or self._problem else None

    def _found(self) -> list[KeptSummary]:
        return [each for read in self._known.values() for each in read.found]

    def read_on(self) -> bool:
        """Read the files that are new; return whether there are any, or fewer."""
        with self._lock:
            before, self._problem = (self._known, self._problem), ""
            try:
                looked = {file: self._look(file) for file in files_in(self.path).values()}
                self._known = {file: found for file, found in looked.items() if found is not None}
            except ConfigurationError as error:
                self._known, self._problem = {}, error_in_one_line(error)
            return before != (self._known, self._problem)

    def _look(self, file: Path) -> _Read | None:
        try:
            found = file.stat()
            written = found.st_mtime_ns, found.st_size
            if file in self._known and self._known[file].written == written:
                return self._known[file]
            return _Read(written, summaries_in(file))
        except FileNotFoundError:  # a resume has just moved it away
            return None
        except (ConfigurationError, OSError) as error:
            return _Read((0, 0), [], error_in_one_line(error))

    def listed(self, step: int | None, order: str, start: int) -> dict[str, Any]:
        """Return so many responses as a list shows, of a step or of all.

        Where nothing was kept at the step, it is the nearest at which something was.
        """
        found = self._found()
        if (wanted := step) is not None and found:
            step = min((each.step for each in found), key=lambda kept: (abs(kept - wanted), kept))
            found = [each for each in found if each.step == step]
        found.sort(key=ORDERS[order])
        rows = [_summary(each) for each in found[start : start + SHOWN_RESPONSES]]
        return {"step": step, "count": len(found), "start": start, "rows": rows, "problem": self.problem}

    def response(self, offset: int) -> KeptResponse | None:
        """Return the response of a place; None where this run has none there."""
        known = any(each.offset == offset for each in self._found())
        return response_at(self.path, offset) if known else None


def response_content(response: KeptResponse) -> dict[str, Any]:
    """Return what the page shows of a response; of a long prompt or response the first part, with its whole length."""
    count = min(response.length, SHOWN_TOKENS)
    prompt = response.prompt_text
    own = [float(each) for each in abs(response.log_probs - response.rollout_log_probs)[:count]]

    def numbers(values: Any) -> list[JsonNumber]:
        return [json_number(float(value)) for value in values[:count]]

    return {
        **_summary(response),
        "behind": response.behind,
        "estimator": response.estimator,
        "prompt": None if prompt is None else prompt[:SHOWN_PROMPT],
        "promptLength": 0 if prompt is None else len(prompt),
        "promptTokens": len(response.prompt_ids),
        "texts": None if response.texts is None else response.texts[:count],
        "ids": response.token_ids[:count].tolist(),
        "gap": [json_number(value) for value in own],
        "mu": numbers(response.rollout_log_probs),
        "pi": numbers(response.log_probs),
        "advantages": numbers(response.advantages),
        "weights": numbers(response.weights),
        "turn": response.turn[:count].tolist(),
        "decisions": response.decisions[:count].tolist(),
        "words": list(DECISIONS),
    }


def other_decisions(response: KeptResponse) -> dict[str, list[int]]:
    """Return what each estimator decides on each token, the run's own first, as places in `DECISIONS`.

    It asks the losses themselves, and so imports torch.
    """
    from verl_precision.tools.kept_tokens.decisions import decisions_of

    code = {name: number for number, name in enumerate(DECISIONS)}
    return {name: [code[each] for each in found[:SHOWN_TOKENS]] for name, found in decisions_of(response).items()}


def text_of(response: KeptResponse, part: str) -> str:
    """Return the whole text of `prompt` or `response`; token ids where the run kept no text."""
    if part == "prompt":
        return _joined(None if response.prompt_text is None else [response.prompt_text], response.prompt_ids.tolist())
    return _joined(response.texts, response.token_ids.tolist())


def _joined(texts: Sequence[str] | None, ids: Sequence[int]) -> str:
    return " ".join(map(str, ids)) if texts is None else "".join(texts)


def _summary(each: KeptSummary) -> dict[str, Any]:
    names = KeptSummary.__dataclass_fields__
    found = {name: value for name, value in vars(each).items() if name in names}
    return {name: json_number(value) if isinstance(value, float) else value for name, value in found.items()}
