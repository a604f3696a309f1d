"""Every check of the self-test: its name, what it shows, where its function is."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from verl_precision.base.files import table_of

# What a check measured, by name with its unit.
Figures = dict[str, float | int | str]


@dataclass(frozen=True)
class Check:
    """One check. Its function has the check's name; it is called with the device and a folder of its own.

    It returns what it measured, and raises if the machine fails.
    """

    name: str  # on the command line and in selftest.json
    part: str  # "A" (engine) or "B" (whole stack)
    shows: str  # what is known when it has passed
    module: str  # of its function
    seconds: int = 300  # time limit
    needs_gpu: str = ""  # why a CPU cannot run it
    alone: bool = False  # no other check may use the GPU meanwhile: vLLM compares free memory when it sleeps

    def load(self) -> Callable[[str, Path], Figures]:
        """Import the check's function."""
        return getattr(import_module(self.module), self.name)


_KNOWN = table_of(__file__)
CHECKS = tuple(Check(**{**known, "module": f"{__package__}.{known['module']}"}) for known in _KNOWN)
