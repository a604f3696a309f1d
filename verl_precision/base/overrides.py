"""Quotes values with any characters for Hydra's overrides."""

import re
from pathlib import Path

from verl_precision.base.errors import ConfigurationError

# Each of verl's processes resolves an interpolation again, even an escaped one. For OmegaConf ??? is a missing value.
# A command's arguments cannot contain NUL. Hydra's files and Ray's messages cannot contain bytes that are not UTF-8.
_NO_TEXT = re.compile(r"\$\{|\A\?\?\?\Z|\0|[\ud800-\udfff]")


def quoted(value: Path | str) -> str:
    """Return a path or text, quoted as the value of a Hydra override KEY=VALUE.

    Raises:
        ConfigurationError: If a config cannot contain the text.
    """
    text = str(value)
    if found := _NO_TEXT.search(text):
        problem = f"a name or path with {found.group()!r} in it cannot be a setting of verl: {text!r}"
        raise ConfigurationError(problem, allowed="any other characters, in UTF-8", remedy="Choose another name.")
    # Hydra reads a backslash as it is, unless it stands before a quote.
    return "'" + re.sub(r"(\\*)('|\Z)", lambda at: 2 * at[1] + at[2].replace("'", "\\'"), text) + "'"
