"""Settings as pydantic dataclasses, and the translation of pydantic's errors into ours.

A class decorated with `@settings(command_option)` is a frozen dataclass. If its field `responses: int = Field(ge=1)` is
0, the error is a `ConfigurationError`: "--responses 0: this cannot work. Allowed: greater than or equal to 1. ...".
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, dataclass_transform, get_args, get_origin

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from verl_precision.base.errors import ConfigurationError, VerlPrecisionError

T = TypeVar("T")


def command_option(field: str) -> str:
    """Return the option of the command line that sets a field."""
    return "--" + field.replace("_", "-")


def option(
    *flags: str, help: str, default: Any = ..., argument: bool = False, recorded: bool = True, **bounds: Any
) -> Any:
    """Declare a field that the command line sets; `base.options` makes Typer's parameter from it.

    `flags` are the forms of the option, if not `command_option(name)`: the long form first, `--yes/--no` for a switch.
    An `argument` has no flag. A field without a default is required. `recorded` tells whether the field decides the
    result. `bounds` are further arguments of pydantic's `Field`, such as `ge=1`.
    """
    typed: Any = {"flags": flags, "help": help, "argument": argument}
    title = flags[0].partition("/")[0] if flags else None
    return Field(default=default, title=title, exclude=not recorded, json_schema_extra=typed, **bounds)


def require_each_once(option: str, values: Sequence[object], allowed: str = "each once") -> None:
    """Raise ConfigurationError if an option repeats a value."""
    if len(set(values)) < len(values):
        value = " ".join(map(str, values))
        raise ConfigurationError("one is given twice", setting=option, value=value, allowed=allowed)


def recorded(settings: Any) -> dict[str, Any]:
    """Return the fields that decide the result."""
    return {name: getattr(settings, name) for name, field in fields_of(settings).items() if not field.exclude}


def fields_of(cls: Any) -> dict[str, FieldInfo]:
    """Return the fields of a class of settings, by name."""
    return cls.__pydantic_fields__


@dataclass_transform(frozen_default=True, field_specifiers=(Field, option))
def settings(spell: Callable[[str], str], *, kw_only: bool = False) -> Callable[[type[T]], type[T]]:
    """Make a class a frozen pydantic dataclass whose errors are `ConfigurationError`.

    A `__post_init__` checks rules about several fields, and raises `ConfigurationError` itself. `spell` turns the name
    of a field into the name that the user knows: `command_option`, or `"mismatch.alarm.{}".format`. A field's `title`
    replaces this name in errors, and its `description` is the remedy. With `kw_only`, fields are given by name alone,
    so that a class may add required fields to those of its base class.
    """

    def decorate(cls: type[T]) -> type[T]:
        # With forbid, an unknown setting is an error; by default pydantic ignores it.
        made: Any = dataclass(frozen=True, kw_only=kw_only, config=ConfigDict(extra="forbid"))(cls)
        validate = made.__init__

        @functools.wraps(validate)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                validate(self, *args, **kwargs)
            except ValidationError as error:
                raise _translated(error, made, spell) from None

        made.__init__ = __init__
        return made

    return decorate


def _translated(error: ValidationError, cls: Any, spell: Callable[[str], str]) -> VerlPrecisionError:
    """Return our error for the first problem: setting, value, allowed values, remedy."""
    first = error.errors(include_url=False)[0]
    own = first.get("ctx", {}).get("error")
    if isinstance(own, VerlPrecisionError):  # raised by __post_init__
        return own
    names = [field.name for field in dataclasses.fields(cls)]
    place = first["loc"][0]
    name = place if isinstance(place, str) else names[place]  # given by position
    if name not in names:
        known = ", ".join(map(spell, names))
        said = {"setting": spell(name), "value": first["input"], "allowed": known}
        return ConfigurationError("there is no such setting", **said, remedy="Check the spelling.")
    field = fields_of(cls)[name]
    setting = field.title or spell(name)
    if first["type"] in ("missing", "missing_argument"):
        kind: Any = field.annotation
        allowed = ", ".join(get_args(kind)) if get_origin(kind) is Literal else getattr(kind, "__name__", str(kind))
        return ConfigurationError(f"{setting}: it is missing", allowed=allowed, remedy="Give a value.")
    remedy = "Give one of these."
    if not field.is_required():
        remedy = f"Leave it out to use the default, {field.get_default(call_default_factory=True)}."
    allowed, remedy = first["msg"].removeprefix("Input should be "), field.description or remedy
    return ConfigurationError("this cannot work", setting=setting, value=first["input"], allowed=allowed, remedy=remedy)
