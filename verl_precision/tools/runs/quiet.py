"""A command prints what is its own: not the notes and warnings of the packages it asks."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# Read by huggingface_hub and transformers when they are imported.
_PROGRESS_BARS = "HF_HUB_DISABLE_PROGRESS_BARS"


@contextmanager
def silence_third_party() -> Iterator[None]:
    """Hide every logger's INFO and WARNING, Python's warnings, and progress bars; errors are still shown.

    Only in this process and only inside: a run of verl, which is another process, says what it always says.
    """
    disabled, bars = logging.root.manager.disable, os.environ.get(_PROGRESS_BARS)
    logging.disable(logging.WARNING)
    os.environ.setdefault(_PROGRESS_BARS, "1")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        if bars is None:
            os.environ.pop(_PROGRESS_BARS, None)
