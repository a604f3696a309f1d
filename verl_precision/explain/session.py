"""An explanation from end to end: the stations that are missing are computed, then the page is written."""

import shutil
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from verl_precision.explain.allotment import Allotment, allot
from verl_precision.explain.operations import OperationComparer, Operations, read_operations
from verl_precision.explain.path import Station, path, reference
from verl_precision.explain.rounded import rounded_copy
from verl_precision.explain.settings import Explanation, check_model
from verl_precision.explain.verdict import Finding, findings
from verl_precision.integration.fsdp_scorer import TrainerEngine
from verl_precision.integration.vllm_sampler import VllmEngine
from verl_precision.sampling.engine import Request, Response
from verl_precision.sampling.journal import open_journal
from verl_precision.sampling.model import Model, Prompt, find_model, tokenize
from verl_precision.sampling.store import Series, Store
from verl_precision.sampling.work import Work, start_engine, work_through
from verl_precision.versions import installed_versions

Maker = Callable[..., Any]
_RECORDED_TOKENS = 128


@dataclass(frozen=True)
class Result:
    """What was found.

    Attributes:
        findings: Of each step, faults first.
        allotment: The gap and its parts, in the order of the path.
        bf16_cost: Mean |δ| that BF16 makes in the trainer's engine, nats.
        operations: Station of vLLM -> what its operations do, on one sequence; empty where vLLM ran compiled.
    """

    findings: list[Finding]
    allotment: Allotment
    bf16_cost: float
    operations: dict[str, Operations]


def explain(
    job: Explanation,
    prompts: list[Prompt],
    folder: Path,
    console: Console,
    ray_address: str | None = None,
    in_flight: int = 256,
    vllm: Maker = VllmEngine,
    trainer: Maker = TrainerEngine,
) -> Result:
    """Compute what is missing in the folder, and judge it.

    Args:
        job: What is explained.
        prompts: The prompts, as read.
        folder: A new or empty folder, or that of an earlier job with the same settings.
        console: Where progress is shown.
        ray_address: Address of a Ray cluster whose GPUs share the work; None for this machine.
        in_flight: Sequences computed together, by each engine.
        vllm: Makes the rollout's engine; takes what `VllmEngine` does.
        trainer: Makes the trainer's engine; takes what `TrainerEngine` does.

    Raises:
        ConfigurationError: If something cannot work; it is raised before a model loads.
        RunFailedError: If an engine fails; what was done is kept.
    """
    models = {"trainer": find_model(job.model)}
    models["rollout"] = models["trainer"] if job.rollout_model is None else find_model(job.rollout_model)
    prompt_ids = tokenize(prompts, models["trainer"])
    longest = max(map(len, prompt_ids))
    check_model(job, models["rollout"], longest)
    recorded = {
        **asdict(job),
        "model_fingerprint": models["trainer"].fingerprint,
        "rollout_model_fingerprint": models["rollout"].fingerprint,
        **{f"version of {name}": version for name, version in installed_versions().items()},
        "prompt_token_ids": prompt_ids,
    }
    stations = path(job)
    before, after = reference(job, stations)
    wanted = list(dict.fromkeys([*stations, after]))
    recorded_at = [one.name for one in stations if one.engine == "vllm" and one.alone] if ray_address is None else []
    with closing(open_journal(folder, recorded)) as journal:
        store = Store(journal, job, prompt_ids)
        journal.show_resumed(store.count, console)

        def fill(name: str, works: Sequence[tuple[Work, int]], build: Callable[[], partial]) -> None:
            if any(work.done < work.total for work, _ in works):
                with closing(start_engine(build(), name, folder, ray_address)) as engine:
                    for work, together in works:
                        work_through(engine, work, together, console)

        for stops in _by_process(wanted):
            works: list[tuple[Work, int]] = [(_series(store, one), 1 if one.alone else in_flight) for one in stops]
            records = [Record(store, folder, one.name) for one in stops if one.name in recorded_at]
            build = partial(_engine, job, stops[0], models, folder, longest, vllm, trainer)
            fill(stops[0].name, [*works, *((record, 1) for record in records)], build)
        same_weights = next(one for one in stations if one.cause == "engine")
        compared: list[tuple[Work, int]] = [(Comparison(folder, name), 1) for name in recorded_at]
        fill("operations", compared, lambda: partial(OperationComparer, _weights(same_weights, models, folder)))
        operations = {name: read_operations(Comparison(folder, name).path) for name in recorded_at}
        drawn = {one.name: _log_probs(store, one) for one in wanted}
    for record in folder.glob("record-*"):
        record.unlink()
    for weights in folder.glob("weights-*"):
        shutil.rmtree(weights)
    allotment = allot([drawn[one.name] for one in stations])
    bf16_cost = float(np.nanmean(np.abs(drawn[after.name] - drawn[before.name])))
    return Result(findings(job, stations, allotment, bf16_cost), allotment, bf16_cost, operations)


class FileWork:
    """`Work` whose one result is a file."""

    total = 1

    def __init__(self, path: Path, what: str) -> None:
        self.path, self._what, self._asked = path, what, False

    @property
    def done(self) -> int:
        """1 if the file is there."""
        return int(self.path.exists())

    def next_requests(self, limit: int) -> list[Request]:
        """Return the one request, once."""
        asked, self._asked = self._asked, True
        return [] if asked or self.done else [self.request()]

    @abstractmethod
    def request(self) -> Request:
        """Return what has the file written."""

    def record(self, response: Response) -> None:
        """Do nothing: the file is there."""

    def progress(self) -> str:
        """Say what is done."""
        return self._what


class Record(FileWork):
    """What every operation gets and gives at a station, for the beginning of the longest sequence."""

    def __init__(self, store: Store, folder: Path, station: str) -> None:
        super().__init__(folder / f"record-{station}.pt", f"operations recorded: {station}")
        self._store, self._compared = store, Comparison(folder, station)

    @property
    def done(self) -> int:
        """1 if the file is there, or has been compared already."""
        return super().done or self._compared.done

    def request(self) -> Request:
        """Return the sequence as a response to its first token."""
        store = self._store
        samples = ((key, store.journal.read(store.positions["rollout", None][key])["token_ids"]) for key in store.keys)
        sequences = [store.prompt_ids[int(problem)] + tuple(ids) for (problem, _), ids in samples]
        ids = max(sequences, key=len)[:_RECORDED_TOKENS]
        return Request("record", 0, ids[:1], response_token_ids=ids[1:], record_to=str(self.path))


class Comparison(FileWork):
    """A record of a station, beside transformers."""

    def __init__(self, folder: Path, station: str) -> None:
        super().__init__(folder / f"operations-{station}.json", f"operations compared: {station}")
        self._record = folder / f"record-{station}.pt"

    def request(self) -> Request:
        """Name the record and the result."""
        return Request(str(self._record), 0, (), record_to=str(self.path))


def _by_process(stations: Sequence[Station]) -> list[list[Station]]:
    """Group stations that one process computes, in the order in which their first one stands."""
    groups: dict[Station, list[Station]] = {}
    for one in stations:
        groups.setdefault(one.process, []).append(one)
    return list(groups.values())


def _series(store: Store, station: Station) -> Series:
    if station.draws:
        return Series(store, station.name, what=f"responses drawn: {station.words}")
    return Series(store, "rollout", station.name, what=f"responses scored: {station.words}")


def _engine(
    job: Explanation,
    station: Station,
    models: dict[str, Model],
    folder: Path,
    longest: int,
    vllm: Maker,
    trainer: Maker,
) -> partial:
    model = _weights(station, models, folder)
    if station.engine == "vllm":
        mode = "processed_logprobs" if station.processed else "raw_logprobs"
        settings: dict[str, Any] = {"top_p": job.top_p, "top_k": job.top_k, "divide_logits_by": job.temperature}
        if station.cause == "rollout_precision":
            settings["enforce_eager"] = True  # so that its operations can be recorded on a GPU too
        length = longest + job.max_response_tokens + 1
        return partial(vllm, model, station.dtype, length, log_probs=True, logprobs_mode=mode, **settings)
    return partial(
        trainer,
        model,
        station.dtype,
        station.attention,
        job.micro_batch_tokens,
        packed=station.packed,
        fp32_log_probs=station.fp32_log_probs,
        temperature=job.temperature,
    )


def _weights(station: Station, models: dict[str, Model], folder: Path) -> str:
    """Return the model that a station loads."""
    name, dtype = models[station.model].name, station.rounded_to
    return name if dtype is None else rounded_copy(name, dtype, folder / f"weights-{station.model}-{dtype}")


def _log_probs(store: Store, station: Station) -> np.ndarray:
    """Return a station's log-probs of all tokens; NaN from where it has drawn other tokens than the rollout."""
    values = []
    for key in store.keys:
        if not station.draws:
            found = store.journal.read(store.positions["rollout", station.name][key])["log_probs"]
        else:
            drawn = store.journal.read(store.positions["rollout", None][key])["token_ids"]
            again = store.journal.read(store.positions[station.name, None][key])
            equal = zip(drawn, again["token_ids"])  # noqa: B905 - they may end elsewhere
            same = np.cumprod([a == b for a, b in equal]).sum(dtype=int)
            found = again["log_probs"][:same] + [np.nan] * (len(drawn) - same)
        values.append(np.array(found, np.float32))
    return np.concatenate(values).astype(np.float64)
