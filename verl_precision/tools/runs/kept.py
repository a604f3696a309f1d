"""The kept tokens of a run as the page shows them: a list of responses, and one response with its decisions."""

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl_precision.base.errors import ConfigurationError, error_in_one_line
from verl_precision.tools.kept_tokens.kept_file import (
    DECISIONS,
    FOLDER,
    MOST_RESPONSES,
    KeptResponse,
    KeptSummary,
    beside,
    files_in,
    summaries_in,
)

SHOWN_PROMPT, SHOWN_TOKENS = 20_000, 32_768  # characters; tokens


def folder_of(source: Path) -> Path:
    """Return where a run keeps its tokens, given its metrics, or the folder of them."""
    if os.path.isdir(source):
        return source / FOLDER
    own = beside(source)
    return own if source.suffix == ".jsonl" or os.path.exists(own) else source.with_name(FOLDER)


def kept_in(folder: Path) -> tuple[list[KeptSummary] | None, str]:
    """Return the responses that a run has kept, None where nothing was, and why something cannot be read."""
    found, problem = list[KeptSummary](), ""
    try:
        files = files_in(folder).values()
    except ConfigurationError as error:
        return [], error_in_one_line(error)
    for file in files:
        try:
            stat = file.stat()
            found += _summaries(file, stat.st_mtime_ns, stat.st_size)
        except FileNotFoundError:  # a resume has just moved it away
            pass
        except (ConfigurationError, OSError) as error:
            problem = problem or error_in_one_line(error)
    return found if files else None, problem


@functools.lru_cache(maxsize=2**15)
def _summaries(file: Path, _written: int, _size: int) -> Sequence[KeptSummary]:
    return summaries_in(file)


def listed(folder: Path, step: int | None) -> dict[str, Any]:
    """Return the responses of a step, or of all, of most damage first, as many as a step can have.

    Where nothing was kept at the step, it is the nearest at which something was.
    """
    kept, problem = kept_in(folder)
    found = kept or []
    if (wanted := step) is not None and found:
        step = min((each.step for each in found), key=lambda kept: (abs(kept - wanted), kept))
        found = [each for each in found if each.step == step]
    shown = sorted(found, key=lambda each: (-each.damage, each.step, each.offset))[:MOST_RESPONSES]
    return {"step": step, "count": len(found), "rows": [vars(each) for each in shown], "problem": problem}


def response_content(response: KeptResponse) -> dict[str, Any]:
    """Return what the page shows of a response; of a long prompt or response the first part."""
    fields = {name: value for name, value in vars(response).items() if name not in ("pieces", "prompt_ids")}
    return {
        **{
            name: each[:SHOWN_TOKENS].tolist() if isinstance(each, np.ndarray) else each
            for name, each in fields.items()
        },
        "gap": abs(response.log_probs - response.rollout_log_probs)[:SHOWN_TOKENS].tolist(),
        "texts": None if response.texts is None else response.texts[:SHOWN_TOKENS],
        "prompt_text": None if response.prompt_text is None else response.prompt_text[:SHOWN_PROMPT],
        "prompt_characters": len(response.prompt_text or ""),
        "prompt_tokens": len(response.prompt_ids),
        "words": DECISIONS,
    }


def other_decisions(response: KeptResponse) -> dict[str, list[int]]:
    """Return what each estimator decides on each token, the run's own first, as places in `DECISIONS`.

    It asks the losses themselves, and so imports torch.
    """
    from verl_precision.tools.kept_tokens.decisions import decisions_of

    code = {name: number for number, name in enumerate(DECISIONS)}
    return {name: [code[each] for each in found[:SHOWN_TOKENS]] for name, found in decisions_of(response).items()}
