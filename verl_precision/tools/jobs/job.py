"""A job that samples or scores: its folder, journal, engines, task loop and results.

The journal has a line {rollout, problem, response, token_ids, log_probs} for each sample, and a line {rollout, train,
problem, response, log_probs} for each score. `rollout` names the engine that sampled, `train` the engine that scored,
and `problem` is the number of the prompt. Log-probs have nine digits, which distinguish all FP32 numbers. If experts
are recorded, a line also has `routed_experts`: {shape, data}, int16 in base64.
"""

import math
import sys
import time
from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Markdown, TableElement

from verl_precision.base.content import response_seed
from verl_precision.base.errors import CheckpointStateError
from verl_precision.base.files import write_file
from verl_precision.base.settings import recorded
from verl_precision.base.versions import installed_versions
from verl_precision.tools.engines.engine import Response, SampleRequest
from verl_precision.tools.engines.engine_process import EngineProcess
from verl_precision.tools.jobs.journal import START_AGAIN, Journal, Key
from verl_precision.tools.jobs.settings import JobSettings, PromptedJob
from verl_precision.tools.show.tables import terminal_table, write_json

_VERSION = "version of "
PROMPTS = "prompt_token_ids"
_SECONDS_BETWEEN_LINES = 60
_FIELDS = {"rollout": str, "problem": str, "response": int, "log_probs": list}


class Tasks:
    """The responses that a job needs, each requested once, in order."""

    in_flight: int | None = None  # responses in flight; None: the number in the job's settings

    def __init__(self, words: str, keys: Sequence[Key], finished: Collection[Key]) -> None:
        """Start from the finished tasks, to which `record` adds; `words` describe what `done` counts."""
        self.words, self.total = words, len(keys)
        self.missing = [key for key in keys if key not in finished]
        self._finished = finished
        self._unasked = iter(self.missing)

    @property
    def done(self) -> int:
        """Return the number of finished tasks; all tasks are finished at `total`."""
        return len(self._finished)

    def next_requests(self, limit: int) -> list[SampleRequest]:
        """Return at most `limit` requests; each request is returned only once."""
        return [self._request(*key) for key in islice(self._unasked, limit)]

    def _request(self, problem: str, response: int) -> SampleRequest:
        raise NotImplementedError

    def record(self, response: Response) -> None:
        """Write a response to the journal, then count it."""
        raise NotImplementedError


class _Table(TableElement):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        (table,) = super().__rich_console__(console, options)
        rows = zip(*(map(str, column.cells) for column in table.columns), strict=True)  # type: ignore[union-attr]
        yield terminal_table([str(column.header) for column in table.columns], rows)  # type: ignore[union-attr]


class Job:
    """A running job in its folder."""

    def __init__(self, settings: JobSettings, console: Console) -> None:
        self.settings, self.console, self.folder = settings, console, settings.folder
        self._recorded: dict[str, Any] = {}

    @contextmanager
    def journal(self, recorded: Mapping[str, Any]) -> Iterator[Journal]:
        """Open the journal; arguments and errors are those of `Journal`."""
        self._recorded = {name: value for name, value in recorded.items() if not name.startswith((_VERSION, PROMPTS))}
        with closing(Journal(self.folder, recorded)) as journal:
            if journal.resumed > 0:
                torn = "; an incomplete last line was removed" if journal.torn else ""
                self.console.print(f"resuming: {journal.resumed} responses are in the journal{torn}", highlight=False)
            yield journal

    def complete(self, name: str, tasks: Sequence[Tasks], build: partial) -> None:
        """Finish tasks one after the other on one engine, which starts only if a task is unfinished.

        `name` is in the log's name and in errors. A failed engine raises `RunFailedError`; finished tasks are kept.
        """
        unfinished = [each for each in tasks if each.done < each.total]
        if unfinished:
            with closing(EngineProcess(build, name, self.folder / "logs")) as engine:
                for each in unfinished:
                    work_through(engine, each, each.in_flight or self.settings.in_flight, self.console)

    def envelope(self) -> dict[str, Any]:
        """Return the part of a summary that all jobs share."""
        return {"settings": self._recorded, "versions": installed_versions(), "command": sys.argv}

    def write(self, content: Mapping[str, Any], table: str | None = None) -> None:
        """Write summary.json and, if there is a table, table.md; also print the table."""
        write_json(self.folder / "summary.json", {**content, **self.envelope()})
        if table is not None:
            write_file(self.folder / "table.md", table, replace=True)
            page = Markdown(table)
            page.elements = page.elements | {"table_open": _Table}  # type: ignore[misc]
            self.console.print(page)

    def show_written(self, names: Sequence[str], then: str = "") -> None:
        """Print which files were written to the folder, and then the next step."""
        self.console.print(f"wrote {', '.join(names)} to {self.folder}{then}", highlight=False, soft_wrap=True)


def work_through(engine: EngineProcess, tasks: Tasks, in_flight: int, console: Console) -> None:
    """Send requests to an engine until the tasks are finished; requests still in flight then are not awaited.

    `in_flight` requests keep the engine busy. Progress is printed once a minute.
    """
    asked, said = 0, -math.inf
    while True:
        finished, now = tasks.done == tasks.total, time.monotonic()
        if finished or now >= said + _SECONDS_BETWEEN_LINES:
            console.print(f"{tasks.done}/{tasks.total} {tasks.words}", highlight=False)
            said = now
        if finished:
            return
        wanted = tasks.next_requests(in_flight - asked)
        if wanted:
            engine.submit(wanted)
        responses = engine.poll()
        for response in responses:
            tasks.record(response)
        asked += len(wanted) - len(responses)


def recorded_versions() -> dict[str, str]:
    """Return the installed versions under the names that a journal gives them."""
    return {f"{_VERSION}{name}": version for name, version in installed_versions().items()}


class Store:
    """The samples and scores of a job."""

    def __init__(self, journal: Journal, job: PromptedJob, prompt_ids: Sequence[tuple[int, ...]]) -> None:
        """Read which samples and scores the journal has."""
        self.job, self.journal, self.prompt_ids = job, journal, prompt_ids
        self.keys: list[Key] = [(str(p), r) for p in range(len(prompt_ids)) for r in range(job.responses)]
        # (rollout dtype, train dtype; None for the samples) -> the responses of that series so far
        self.series: dict[tuple[str, str | None], dict[Key, Response]] = defaultdict(dict)
        for record in journal.records(_FIELDS):
            response = _response(record)
            self.series[record["rollout"], record.get("train")][response.key] = response

    def log_probs(self, rollout: str, train: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return lengths [B] of all responses, log π [N] and log μ [N] of their tokens, in float64."""
        mu, pi = ([self.series[rollout, side][key].log_probs for key in self.keys] for side in (None, train))
        for (prompt, response), sampled, scored in zip(self.keys, mu, pi, strict=True):
            if len(sampled) != len(scored):
                problem = f"{self.journal.path}: response {response} to prompt {prompt} has {len(sampled)} tokens in "
                problem += f"{rollout}, and {len(scored)} scores in {train}"
                raise CheckpointStateError(problem, allowed="one score a token", remedy=START_AGAIN)
        lengths = np.array([len(values) for values in mu])
        return lengths, np.concatenate(pi).astype(np.float64), np.concatenate(mu).astype(np.float64)


def _response(record: dict[str, Any]) -> Response:
    log_probs, ids, experts = record["log_probs"], record.get("token_ids"), record.get("routed_experts")
    if experts is not None:
        experts = np.frombuffer(b64decode(experts["data"]), "<i2").reshape(experts["shape"])
    return Response(
        problem=record["problem"], response=record["response"], length=len(log_probs),
        log_probs=np.array(log_probs, np.float32), token_ids=ids and tuple(ids), routed_experts=experts,
    )  # fmt: skip


@contextmanager
def open_store(
    job: Job, settings: PromptedJob, prompt_ids: Sequence[tuple[int, ...]], **fingerprints: Any
) -> Iterator[Store]:
    """Open the journal of samples and scores; it belongs to these prompts, fingerprints and versions."""
    with job.journal({**recorded(settings), **fingerprints, **recorded_versions(), PROMPTS: prompt_ids}) as journal:
        yield Store(journal, settings, prompt_ids)


class Series(Tasks):
    """The samples of a rollout engine or, with `train`, the trainer's scores of these samples."""

    def __init__(
        self, store: Store, rollout: str, train: str | None = None, what: str = "", keys: Sequence[Key] | None = None
    ) -> None:
        """Find the missing responses; `what` describes the series, by default by its names; default `keys`: all."""
        self._store, self._rollout, self._train = store, rollout, train
        self._found = store.series[rollout, train]
        what = what or f"responses sampled in {rollout}" + (f", scored in {train}" if train else "")
        super().__init__(what, store.keys if keys is None else keys, self._found)

    def _request(self, problem: str, response: int) -> SampleRequest:
        store, prompt = self._store, self._store.prompt_ids[int(problem)]
        if self._train is None:
            seed = response_seed(store.job.seed, problem, response)
            return SampleRequest(problem, response, prompt, store.job.max_response_tokens, seed)
        drawn = store.series[self._rollout, None][problem, response].token_ids or ()
        return SampleRequest(problem, response, prompt, response_token_ids=drawn)

    def record(self, response: Response) -> None:
        """Write a sample or a score, then count it."""
        if (experts := response.routed_experts) is not None:
            experts = {"shape": experts.shape, "data": b64encode(experts.astype("<i2").tobytes()).decode()}
        record: dict[str, Any] = {
            "rollout": self._rollout,
            "train": self._train,
            "problem": response.problem,
            "response": response.response,
            "token_ids": response.token_ids,
            "log_probs": [float(f"{value:.9g}") for value in response.log_probs or ()],
            "routed_experts": experts,
        }
        self._store.journal.append(record)
        self._found[response.key] = _response(record)
