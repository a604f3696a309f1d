"""The rollout's report on a weight sync. It is sent in a file, because verl drops workers' return values."""

import contextlib
import json
import os
import platform
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from verl_precision.base.files import write_file

_PREFIX = "vp-weight-sync-"  # followed by the id of the process that waits for the report, and at the end by its host


def _folder() -> Path:
    """Return the folder of the reports: that of vLLM's sockets, of which each run of `compare` has its own."""
    return Path(os.environ.get("VLLM_RPC_BASE_PATH") or tempfile.gettempdir())


@dataclass
class SyncReport:
    """The report of one rollout worker on one weight sync; its metrics begin with `weight_sync/`."""

    verified_layers: int = 0  # layers, also of an adapter, that compute exactly with the sent weights
    unverified_layers: int = 0  # unknown layout, or quantised; without layers that a later sync verifies
    seconds: float = 0.0  # time that the worker spent on verification
    weights_digest: int = 0  # 40 bits of the digests of the received tensors: equal for equal weights
    draft_layers: int = 0  # layers of a draft (speculative decoding) that are not the policy's
    draft_layers_unchanged: int = 0  # of these, the layers with the bits of the sync before
    drafted_tokens: int = 0  # since the sync before
    accepted_tokens: int = 0  # drafted, and sampled by the policy

    def metrics(self) -> dict[str, float]:
        """Return the report as metrics; without a draft there are none of a draft."""
        numbers = {name: float(value) for name, value in asdict(self).items()}
        drafted, accepted = numbers.pop("drafted_tokens"), numbers.pop("accepted_tokens")
        if drafted:
            numbers["draft_acceptance"] = accepted / drafted
        elif not self.draft_layers:
            del numbers["draft_layers"], numbers["draft_layers_unchanged"]
        return {f"weight_sync/{name}": value for name, value in numbers.items()}

    def write(self, path: str) -> bool:
        """Write the report to a file, complete or not at all; return whether this host is the one that reads it."""
        if here := path.endswith(f"-{platform.node()}.json"):
            write_file(Path(path), json.dumps(asdict(self)), replace=True)
        return here


class ReportBox:
    """The trainer's side: names a file for each weight stream of a sync, and reads the reports from these files."""

    def __init__(self) -> None:
        """Remove files of processes that have ended: no process reads the report of a run's last sync."""
        self._expected: list[Path] = []
        for left in _folder().glob(f"{_PREFIX}*.json"):
            process = left.name.removeprefix(_PREFIX).partition("-")[0]
            if process.isdigit() and not psutil.pid_exists(int(process)):
                left.unlink(missing_ok=True)

    def new_address(self) -> str:
        """Return the name of a file that does not exist yet, for the report on one weight stream."""
        path = _folder() / f"{_PREFIX}{os.getpid():010}-{os.urandom(8).hex()}-{platform.node()}.json"
        self._expected.append(path)
        return str(path)

    def take(self) -> SyncReport | None:
        """Return the sum of the reports since the last call (with LoRA two per sync), or None; remove their files."""
        found = []
        for path in self._expected:
            with contextlib.suppress(FileNotFoundError):  # another rollout engine, or a sync that failed
                found.append(json.loads(path.read_text()))
                path.unlink()
        self._expected = []
        return SyncReport(**{name: sum(report[name] for report in found) for name in found[0]}) if found else None

    def take_metrics(self) -> dict[str, float]:
        """Return the report of `take` as metrics."""
        return {} if (report := self.take()) is None else report.metrics()
