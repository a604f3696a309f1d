"""What the receiver of a weight sync could verify, on its way back to the trainer.

verl drops whatever a vLLM worker returns. So the trainer names a file in the manifest, the worker writes its report
there, and the trainer's engine, which is on the same machine, takes it when it next reports metrics.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

_PREFIX = "vp-weight-sync-"  # then the process that waits for the report


@dataclass(frozen=True)
class SyncReport:
    """One receiver's account of one weight sync.

    Attributes:
        verified_layers: layers shown to compute exactly what they were sent.
        unverified_layers: layers that this guard cannot verify: a layout it does not know, a quantised weight, a LoRA
            adapter. Layers whose turn comes in a later sync are in neither count.
        seconds: time spent on verification, on the receiver's side.
    """

    verified_layers: int
    unverified_layers: int
    seconds: float

    def metrics(self) -> dict[str, float]:
        """Return the report as metrics: `weight_sync/verified_layers`, `unverified_layers`, `seconds`."""
        return {f"weight_sync/{name}": float(value) for name, value in asdict(self).items()}


def merge(reports: Sequence[SyncReport]) -> SyncReport:
    """Return the account of several streams of one sync (LoRA sends the base weights and the adapter)."""
    return SyncReport(
        verified_layers=sum(report.verified_layers for report in reports),
        unverified_layers=sum(report.unverified_layers for report in reports),
        seconds=sum(report.seconds for report in reports),
    )


def write_report(path: str, report: SyncReport) -> None:
    """Write a report where the manifest asks for it, whole or not at all.

    Args:
        path: `reply_to` of the manifest.
        report: of this receiver.
    """
    scratch = Path(f"{path}.tmp")
    scratch.write_text(json.dumps(asdict(report)))
    os.replace(scratch, path)


class ReportBox:
    """The trainer's side: names a file for each stream of a sync, and takes the reports that came back."""

    def __init__(self) -> None:
        """Remove what processes that have ended left behind: the report of a run's last sync is never taken."""
        self._expected: list[Path] = []
        for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*.json"):
            process = left.name.removeprefix(_PREFIX).partition("-")[0]
            if process.isdigit() and not psutil.pid_exists(int(process)):
                left.unlink(missing_ok=True)

    def new_address(self) -> str:
        """Return the name of a file that does not exist yet, for one stream's report."""
        path = Path(tempfile.gettempdir()) / f"{_PREFIX}{os.getpid()}-{os.urandom(8).hex()}.json"
        self._expected.append(path)
        return str(path)

    def take(self) -> SyncReport | None:
        """Return what came back since the last call, merged, or None; the files are removed."""
        found = []
        for path in self._expected:
            with contextlib.suppress(FileNotFoundError):  # nobody answered: another rollout engine, or a failed sync
                found.append(SyncReport(**json.loads(path.read_text())))
                path.unlink()
        self._expected = []
        return merge(found) if found else None
