"""The folder of an analysis. Every file appears complete or not at all, so that what exists need not be done again.

    settings.json                                settings, prompts as token ids, versions
    samples/<rollout>/<shard>.parquet            token ids, log μ(yₜ), one response a row
    scores/<train>/<rollout>/<shard>.parquet     log π(yₜ) of the same rows
    logs/                                        what vLLM and verl printed
    table.md, summary.json, *.png                the results, written again each time

shard: consecutive responses, `shard_responses` of them.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_precision.errors import ConfigurationError
from verl_precision.offline.settings import OfflineSettings

SETTINGS = "settings.json"
FORMAT = "verl_precision offline analysis 1"


@dataclass(frozen=True)
class Store:
    """An analysis on disk.

    Attributes:
        folder: with `settings.json`.
        settings: as recorded.
        prompt_ids: token ids of each prompt.
    """

    folder: Path
    settings: OfflineSettings
    prompt_ids: list[list[int]]

    @classmethod
    def open(cls, folder: Path) -> "Store":
        """Return the analysis in a folder that `create_or_resume` made."""
        recorded = json.loads((folder / SETTINGS).read_text())
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in recorded["settings"].items()}
        return cls(folder, OfflineSettings(**values), recorded["prompt_ids"])

    @property
    def total_responses(self) -> int:
        """Responses of one rollout dtype."""
        return len(self.prompt_ids) * self.settings.responses

    @property
    def shards(self) -> list[range]:
        """Responses of each shard; response i answers prompt i // settings.responses."""
        size = self.settings.shard_responses
        return [range(start, min(start + size, self.total_responses)) for start in range(0, self.total_responses, size)]

    def sample_file(self, rollout: str, shard: int) -> Path:
        """Return where a shard's samples are or will be."""
        return self.folder / "samples" / rollout / f"{shard:05d}.parquet"

    def score_file(self, train: str, rollout: str, shard: int) -> Path:
        """Return where a shard's scores are or will be."""
        return self.folder / "scores" / train / rollout / f"{shard:05d}.parquet"


def create_or_resume(
    folder: Path, settings: OfflineSettings, prompt_ids: list[list[int]], versions: dict[str, str]
) -> Store:
    """Make the folder, or go on in one made with the same settings, prompts and versions.

    Args:
        folder: new, empty, or of an earlier run.
        settings: what is measured.
        prompt_ids: token ids of each prompt.
        versions: of the packages that decide what is measured.

    Raises:
        ConfigurationError: if the folder holds something else, or an analysis with other settings.
    """
    wanted = {"format": FORMAT, "settings": asdict(settings), "prompt_ids": prompt_ids, "versions": versions}
    wanted = json.loads(json.dumps(wanted))
    record = folder / SETTINGS
    if record.is_file():
        _require_same(folder, _read_record(record), wanted)
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(
            f"--output {folder}: it exists, and is no analysis of this command (no {SETTINGS}). Nothing was written. "
            "Allowed: a new folder, an empty one, or an earlier analysis. Give another --output."
        )
    else:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(record, json.dumps(wanted))
    return Store(folder, settings, prompt_ids)


def _read_record(record: Path) -> dict[str, Any]:
    try:
        found = json.loads(record.read_text())
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ConfigurationError(
            f"--output {record.parent}: its {SETTINGS} was not written by this command ({FORMAT!r} is missing). "
            "Nothing was written. Give another --output."
        )
    return found


def _require_same(folder: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    differing = [
        f"{name} (there {found[part].get(name)!r}, now {wanted[part].get(name)!r})"
        for part in ("settings", "versions")
        for name in sorted({*found[part], *wanted[part]})
        if found[part].get(name) != wanted[part].get(name)
    ]
    if not differing and found["prompt_ids"] != wanted["prompt_ids"]:
        differing = ["the prompts' tokens (the prompts file or the model's tokenizer changed)"]
    if differing:
        raise ConfigurationError(
            f"--output {folder} holds an analysis with other settings: {'; '.join(differing)}. Samples of two settings "
            "are not mixed. Repeat the old command to go on, or give another --output."
        )


def write_whole(path: Path, text: str) -> None:
    """Write a text file that appears complete or not at all."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text)
    scratch.replace(path)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as a parquet file that appears complete or not at all."""
    from pyarrow import Table, parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    parquet.write_table(Table.from_pylist(rows), scratch)
    scratch.replace(path)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file that `write_rows` wrote."""
    from pyarrow import parquet

    return parquet.read_table(path, partitioning=None).to_pylist()
