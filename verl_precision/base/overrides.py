"""Quotes values for Hydra's overrides, with any characters."""

import re
from pathlib import Path

from verl_precision.base.errors import ConfigurationError

# An interpolation, escaped or not, is looked up again in each of verl's processes, and ??? is no value for OmegaConf.
# No word of a command can have NUL, and neither Hydra's files nor Ray's messages bytes that are not UTF-8.
_NO_TEXT = re.compile(r"\$\{|\A\?\?\?\Z|\0|[\ud800-\udfff]")


def quoted(value: Path | str) -> str:
    """Return a path or text, quoted as the value of a Hydra override KEY=VALUE.

    Raises:
        ConfigurationError: If no config can have it.
    """
    text = str(value)
    if found := _NO_TEXT.search(text):
        problem = f"a name or path with {found.group()!r} in it cannot be a setting of verl: {text!r}"
        raise ConfigurationError(problem, allowed="any other characters, in UTF-8", remedy="Name it otherwise.")
    # Hydra reads a backslash as it is, unless it stands before a quote.
    return "'" + re.sub(r"(\\*)('|\Z)", lambda at: 2 * at[1] + at[2].replace("'", "\\'"), text) + "'"
