"""What a check of the self-test is, and all of them by name, in the order in which they are registered."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

# What a check measured, by name with its unit.
Figures = dict[str, float | int | str]
Function = Callable[[str, Path], Figures]
F = TypeVar("F", bound=Function)


class Check(NamedTuple):
    """One check."""

    name: str  # on the command line and in selftest.json
    shows: str  # what is known when it has passed
    function: Function  # of the device and a folder of its own; it returns what it measured, or raises
    seconds: int = 300  # time limit
    needs_gpu: str = ""  # why a CPU cannot run it


CHECKS: dict[str, Check] = {}


def check(name: str, shows: str, **limits: Any) -> Callable[[F], F]:
    """Register a function as a check, with fields of `Check`."""

    def register(function: F) -> F:
        CHECKS[name] = Check(name, shows, function, **limits)
        return function

    return register
