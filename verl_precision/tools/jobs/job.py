"""Every job that draws or scores: its folder, its journal, its engines, the loop over its tasks, and what it leaves."""

import math
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from verl_precision.base.files import write_file
from verl_precision.base.versions import installed_versions
from verl_precision.tools.engines.engine import Response, SampleRequest
from verl_precision.tools.engines.engine_process import EngineProcess, RayEngines
from verl_precision.tools.jobs.journal import Journal, Key
from verl_precision.tools.jobs.settings import JobSettings
from verl_precision.tools.show.tables import write_json

_VERSION = "version of "
PROMPTS = "prompt_token_ids"
_SECONDS_BETWEEN_LINES = 60


class Tasks:
    """The responses that a job wants, each asked for once, in their order; what it does with them is its own."""

    in_flight: int | None = None  # responses in flight for each engine; None for the job's number

    def __init__(self, words: str, keys: Sequence[Key], finished: Collection[Key]) -> None:
        """Begin with what is finished, to which `record` adds; `words` say what `done` counts."""
        self._words, self.total = words, len(keys)
        self.missing = [key for key in keys if key not in finished]
        self._finished = finished
        self._unasked = iter(self.missing)

    @property
    def done(self) -> int:
        """How much is done; the tasks are finished when this is `total`."""
        return len(self._finished)

    @property
    def words(self) -> str:
        """What `done` counts."""
        return self._words

    def next_requests(self, limit: int) -> list[SampleRequest]:
        """Return up to so many requests, each once."""
        return [self._request(*key) for key in islice(self._unasked, limit)]

    def _request(self, problem: str, response: int) -> SampleRequest:
        raise NotImplementedError

    def record(self, response: Response) -> None:
        """Write a response to the journal, then count it."""
        raise NotImplementedError


class Job:
    """A job under way in its folder; each adds its own tasks."""

    def __init__(self, settings: JobSettings, console: Console) -> None:
        self.settings, self.console, self.folder = settings, console, settings.folder
        self._recorded: dict[str, Any] = {}

    @contextmanager
    def journal(self, recorded: Mapping[str, Any]) -> Iterator[Journal]:
        """Open the journal; arguments and errors are those of `Journal`."""
        self._recorded = {name: value for name, value in recorded.items() if not name.startswith((_VERSION, PROMPTS))}
        with closing(Journal(self.folder, recorded)) as journal:
            if journal.resumed > 0:
                torn = "; a torn last line was cut off" if journal.torn else ""
                self.console.print(f"resuming: {journal.resumed} responses are in the journal{torn}", highlight=False)
            yield journal

    def complete(self, name: str, tasks: Sequence[Tasks], build: partial) -> None:
        """Finish tasks one after the other on one engine, which starts only if one of them is unfinished.

        `name` is in the log's name and in errors. An engine that fails raises `RunFailedError`; what was done is kept.
        """
        unfinished = [each for each in tasks if each.done < each.total]
        if unfinished:
            with closing(start_engine(build, name, self.folder, self.settings.ray_address)) as engine:
                for each in unfinished:
                    work_through(engine, each, each.in_flight or self.settings.in_flight, self.console)

    def envelope(self) -> dict[str, Any]:
        """Return what stands in every summary beside the results."""
        return {"settings": self._recorded, "versions": installed_versions(), "command": sys.argv}

    def write(self, content: Mapping[str, Any], table: str | None = None) -> None:
        """Write summary.json, and table.md, which is shown too."""
        write_json(self.folder / "summary.json", {**content, **self.envelope()})
        if table is not None:
            write_file(self.folder / "table.md", table, replace=True)
            self.console.print(Markdown(table))

    def show_written(self, names: Sequence[str]) -> None:
        """Say which files are in the folder."""
        self.console.print(f"wrote {', '.join(names)} to {self.folder}", highlight=False, soft_wrap=True)


def work_through(engine: EngineProcess | RayEngines, tasks: Tasks, in_flight: int, console: Console) -> None:
    """Ask an engine until the tasks are finished; what is still in flight then is left unfinished.

    `in_flight` responses for each engine keep it full. Progress is a live bar on a terminal, a line a minute elsewhere.
    """
    asked, said = 0, -math.inf
    left = TimeRemainingColumn(elapsed_when_finished=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), left)
    with Progress(*columns, console=console, refresh_per_second=2, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=tasks.total)
        while True:
            finished, now = tasks.done == tasks.total, time.monotonic()
            bar.update(task, completed=tasks.done, description=tasks.words)
            if not console.is_terminal and (finished or now >= said + _SECONDS_BETWEEN_LINES):
                console.print(f"{tasks.done}/{tasks.total} {tasks.words}", highlight=False)
                said = now
            if finished:
                return
            wanted = tasks.next_requests(in_flight * engine.engines - asked)
            if wanted:
                engine.submit(wanted)
            responses = engine.poll()
            for response in responses:
                tasks.record(response)
            asked += len(wanted) - len(responses)


def recorded_versions() -> dict[str, str]:
    """Return the installed versions, as a journal has them."""
    return {f"{_VERSION}{name}": version for name, version in installed_versions().items()}


def start_engine(build: partial, name: str, folder: Path, ray_address: str | None) -> EngineProcess | RayEngines:
    """Start one engine on this machine, or with an address one on each GPU of that Ray cluster; see `complete`."""
    return EngineProcess(build, name, folder / "logs") if ray_address is None else RayEngines(build, ray_address)
