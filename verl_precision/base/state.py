"""State files that one start of a run leaves for the next: read exactly as written, or refused with an error.

Such a file may have any content. It must be a regular file, not too large, UTF-8, and JSON or YAML of plain values. Its
content is checked strictly: exact keys, no text for a number, no NaN, no infinity.
"""

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from pydantic import ConfigDict, TypeAdapter

from verl_precision.base.errors import CheckpointStateError, error_in_one_line
from verl_precision.base.files import open_regular

T = TypeVar("T")

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)  # for a pydantic dataclass read from a file
MOST_BYTES, _DEEPEST, _SHOWN = 1 << 22, 100, 300
_adapter = functools.cache(lambda kind: TypeAdapter(kind, config=STRICT))


@contextmanager
def refused_in_words(what: str, remedy: str) -> Iterator[None]:
    """Turn any error of the block, which reads `what`, into a CheckpointStateError."""
    try:
        yield
    except Exception as error:
        inner = error.problem if isinstance(error, CheckpointStateError) else ""
        problem = f"{what}: {inner}" if inner else f"{what} cannot be read ({error_in_one_line(error)[:_SHOWN]})"
        raise CheckpointStateError(problem, allowed="a file that this version wrote", remedy=remedy) from error


def read_state(path: Path, read: Callable[[Any], T], remedy: str) -> T | None:
    """Return the result of `read` on a file's JSON, YAML or text; None if there is no file.

    Raises:
        CheckpointStateError: If the file cannot be opened or parsed, or `read` raises.
    """
    with refused_in_words(str(path), remedy):
        try:
            with open_regular(path, most=MOST_BYTES) as file:
                content = file.read()
        except (FileNotFoundError, NotADirectoryError):
            if path.is_symlink():
                raise
            return None
        if path.suffix not in (".json", ".yaml"):
            return read(content.decode(errors="replace"))
        return read((plain_yaml if path.suffix == ".yaml" else json.loads)(content.decode()))


def checked(kind: Any, value: Any) -> Any:
    """Return a value of exactly this type; raise ValueError for other types, NaN and infinity."""
    return _adapter(kind).validate_python(value)


def require_fields(kind: type, state: Mapping[str, Any]) -> None:
    """Raise unless each value of a state has exactly the type of its field in the dataclass."""
    kinds = get_type_hints(kind, include_extras=True)
    for name, value in state.items():
        if is_dataclass(kinds[name]):
            require_fields(kinds[name], value)
        else:
            checked(kinds[name], value)


def plain_yaml(text: str) -> Any:
    """Return the values of YAML; aliases and deep nesting raise ValueError."""
    import yaml

    loader, depth = getattr(yaml, "CSafeLoader", yaml.SafeLoader), 0
    for event in yaml.parse(text, loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST or isinstance(event, yaml.AliasEvent):
            raise ValueError(f"line {event.start_mark.line + 1}: an alias, or more than {_DEEPEST} levels")
    return yaml.load(text, loader)
