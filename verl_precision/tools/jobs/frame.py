"""The frame of every job that draws or scores: its folder, its journal, its engines, and what it leaves."""

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from verl_precision.base.files import write_file
from verl_precision.base.settings import recorded
from verl_precision.base.versions import installed_versions
from verl_precision.tools.engines.engine import Engine
from verl_precision.tools.engines.engine_process import EngineProcess
from verl_precision.tools.jobs.journal import Journal
from verl_precision.tools.jobs.settings import Job, PromptedJob
from verl_precision.tools.jobs.store import Store
from verl_precision.tools.jobs.work import Work, complete
from verl_precision.tools.show.tables import write_json

_VERSION = "version of "
_PROMPTS = "prompt_token_ids"


class Frame:
    """A job under way in its folder; each job adds its own work."""

    def __init__(self, job: Job, console: Console) -> None:
        self.job, self.console, self.folder = job, console, job.folder
        self._settings: dict[str, Any] = {}

    @contextmanager
    def journal(self, settings: Mapping[str, Any], outputs: Collection[str] | None = None) -> Iterator[Journal]:
        """Open the journal; arguments and errors are those of `Journal`."""
        self._settings = {name: value for name, value in settings.items() if not name.startswith((_VERSION, _PROMPTS))}
        with closing(Journal(self.folder, settings, outputs)) as journal:
            if journal.resumed > 0:
                torn = "; a torn last line was cut off" if journal.torn else ""
                self.console.print(f"resuming: {journal.resumed} responses are in the journal{torn}", highlight=False)
            yield journal

    @contextmanager
    def store(self, job: PromptedJob, prompt_ids: Sequence[tuple[int, ...]], **fingerprints: Any) -> Iterator[Store]:
        """Open the journal of samples and scores; it belongs to these prompts, fingerprints and versions."""
        settings = {**recorded(job), **fingerprints, **recorded_versions(), _PROMPTS: prompt_ids}
        with self.journal(settings) as journal:
            yield Store(journal, job, prompt_ids)

    def complete(self, name: str, works: Sequence[Work], build: partial, engines: int | None = None) -> None:
        """Finish works one after the other on one engine, which starts only if one of them is unfinished.

        `engines` is the number of engines on Ray, None for one on each GPU; `name` is in the log's name and in errors.
        An engine that fails raises `RunFailedError`; what was done is kept.
        """
        folder, address = self.folder, self.job.ray_address
        complete(works, lambda: start_engine(build, name, folder, address, engines), self.job.in_flight, self.console)

    def envelope(self) -> dict[str, Any]:
        """Return what stands in every summary beside the results."""
        return {"settings": self._settings, "versions": installed_versions(), "command": sys.argv}

    def write(self, content: Mapping[str, Any], table: str | None = None) -> None:
        """Write summary.json, and table.md, which is shown too."""
        write_json(self.folder / "summary.json", {**content, **self.envelope()})
        if table is not None:
            write_file(self.folder / "table.md", table, replace=True)
            self.console.print(Markdown(table))

    def show_written(self, names: Sequence[str]) -> None:
        """Say which files are in the folder."""
        self.console.print(f"wrote {', '.join(names)} to {self.folder}", highlight=False, soft_wrap=True)


def recorded_versions() -> dict[str, str]:
    """Return the installed versions, as a journal has them."""
    return {f"{_VERSION}{name}": version for name, version in installed_versions().items()}


def start_engine(build: partial, name: str, folder: Path, ray_address: str | None, engines: int | None) -> Engine:
    """Start one engine on this machine, or with an address one on each GPU of that Ray cluster; see `complete`."""
    if ray_address is None:
        return EngineProcess(build, name, folder / "logs")
    from verl_precision.tools.engines.ray_engines import RayEngines

    return RayEngines(build, ray_address, engines)
