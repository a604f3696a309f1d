"""Settings as options of the command line: a class declares each setting once, and Typer's parameters come from it."""

import types
from collections.abc import Mapping
from fractions import Fraction
from inspect import Parameter
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic.fields import FieldInfo
from typer import Argument, Option

from verl_precision.base.settings import command_option, fields_of


def parameters_of(cls: type) -> list[Parameter]:
    """Return a class's fields as parameters for Typer, its own fields before those of its base classes."""
    fields = fields_of(cls)
    own_first = dict.fromkeys(name for each in cls.__mro__ for name in vars(each).get("__annotations__", {}))
    return [_parameter(name, fields[name]) for name in own_first if name in fields]


def _parameter(name: str, field: FieldInfo) -> Parameter:
    typed: Any = field.json_schema_extra
    kind, choices = _typed(field.annotation)
    shown = {"help": typed["help"], "metavar": choices}
    info = Argument(**shown) if typed["argument"] else Option(*typed["flags"] or [command_option(name)], **shown)
    default: Any = Parameter.empty if field.is_required() else field.default
    if isinstance(default, tuple):
        default = list(default)
    elif isinstance(default, Fraction):
        default = f"{float(default):g}"
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=cast(Any, Annotated)[kind, info])


def _typed(annotation: Any) -> tuple[Any, str | None]:
    """Return the type that Typer reads, and the choices that Typer shows; pydantic checks the values."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return str, "|".join(inner)
    if origin is tuple:  # tuple[X, ...]: an option that is repeated
        kind, choices = _typed(inner[0])
        return types.GenericAlias(list, (kind,)), choices
    if origin in (Union, types.UnionType):  # X | None
        kind, choices = _typed(inner[0])
        return kind | None, choices
    if origin is Annotated:
        return _typed(inner[0])
    return (str, "SHARE") if annotation is Fraction else (annotation, None)


def as_options(cls: type, values: Mapping[str, Any]) -> list[str]:
    """Return the values of a class's fields as options, without default values."""
    words: list[str] = []
    for name, value in values.items():
        field = fields_of(cls)[name]
        typed: Any = field.json_schema_extra
        flag, _, negative = next(iter(typed["flags"]), command_option(name)).partition("/")
        if value == field.default:
            continue
        if isinstance(value, bool):
            words.append(flag if value else negative)
            continue
        for each in value if isinstance(value, tuple) else [value]:  # one option for each value of a tuple
            words += [flag, f"{each:g}" if isinstance(each, float) else str(each)]
    return words
