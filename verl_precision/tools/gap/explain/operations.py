"""The first operation that two engines compute differently, and which operations add most to the gap.

vLLM has recorded one forward. transformers' modules compute each operation again in FP32, from the same inputs: the
difference is its own error. Added to transformers' forward, the errors of one kind of operation give that kind's effect
on the log-probs, and the errors of all kinds together give vLLM's log-probs again: so nothing is left out unseen.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor

from verl_precision.base.dtypes import EXACT
from verl_precision.tools.engines.engine import Request, Response
from verl_precision.tools.engines.model import model_location
from verl_precision.tools.gap.explain.attribution import attribute
from verl_precision.tools.gap.explain.exact_operations import first_unequal
from verl_precision.tools.gap.explain.operation_error import KINDS, injected, operation_errors, whole_head
from verl_precision.tools.jobs.job import Tasks
from verl_precision.tools.jobs.store import Store
from verl_precision.tools.show.tables import write_json

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")  # whose layers have been compared

# A right operation rounds its output, by a third of an epsilon on average, and what is between. FP32's sums are long.
_BOUND_IN_EPSILONS, _LEAST_BOUND = 2, 1e-5
_RECORDED_TOKENS = 128


@dataclass(frozen=True)
class Operation:
    """One kind of operation."""

    kind: str  # one of `KINDS`
    layer: int | None  # the layer with the largest error; None outside of the layers
    error: float  # that error: ‖vLLM's - transformers'‖ / ‖transformers'‖ on equal inputs
    share: float  # the kind's share of the k3 between vLLM and transformers in FP32, on the tokens of the record
    errors: tuple[float | None, ...]  # the largest outside of the layers, then in each layer; None where there is none


@dataclass(frozen=True)
class Operations:
    """What was found in one record."""

    # Each kind that was matched, the largest share first; none for an unknown family, or if vLLM ran compiled.
    operations: tuple[Operation, ...]
    first: str | None  # in the order of the forward, the first whose error is above `bound`; None if none is
    bound: float  # largest relative error that rounding makes in one operation
    nats: float  # mean |gap| between vLLM's forward and transformers' in FP32, on the tokens of the record
    remainder: float  # mean |gap| that is left when all errors are added: what was not matched
    exact: bool = False  # whether it is a record of exact arithmetic, of which the first is one with another bit


def compare(model: Any, record: dict[str, Any]) -> Operations:
    """Find what each kind of operation of a record of `vllm_sampler.OperationRecorder` does.

    The model is transformers' in FP32, with the weights that vLLM had.
    """
    if model.config.model_type not in FAMILIES or not any(".layers." in call["name"] for call in record["calls"]):
        return Operations((), None, 0.0, 0.0, 0.0)
    bound = max(_BOUND_IN_EPSILONS * torch.finfo(getattr(torch, record["dtype"])).eps, _LEAST_BOUND)
    ids = torch.tensor([record["token_ids"]], device=model.device)
    errors = list(operation_errors(model, record["calls"]))
    head = whole_head(record["calls"])["outputs"][0]
    labels = ids[0, 1 : len(head) + 1, None]

    def of_labels(logits: Tensor) -> Any:
        return logits.float().log_softmax(-1).gather(-1, labels)[:, 0].double().cpu().numpy()

    def log_probs(*kinds: str) -> Any:
        with torch.no_grad(), injected(model, [error for error in errors if error.kind in kinds]):
            return of_labels(model(input_ids=ids, use_cache=False).logits[0, : len(head)])

    plain, found = log_probs(), of_labels(head)
    kinds = [kind for kind in KINDS if any(error.kind == kind for error in errors)]
    steps = np.cumsum([plain, *(log_probs(kind) - plain for kind in kinds)], axis=0)
    attribution = attribute([*steps, found])
    operations = []
    for kind, part in zip(kinds, attribution.parts, strict=False):
        of_kind = [error for error in errors if error.kind == kind]
        worst = max(of_kind, key=lambda error: error.relative)
        places = (None, *range(model.config.num_hidden_layers))
        largest = tuple(max((e.relative for e in of_kind if e.layer == place), default=None) for place in places)
        operations.append(Operation(kind, worst.layer, worst.relative, attribution.share(part), largest))
    exact = record.get("arithmetic") == EXACT
    beyond = next((f"{error.kind} ({error.name})" for error in errors if error.relative > bound), None)
    first = first_unequal(model, record) if exact else beyond
    remainder = float(abs(log_probs(*kinds) - found).mean())
    ordered = tuple(sorted(operations, key=lambda one: -one.share))
    return Operations(ordered, first, bound, attribution.nats, remainder, exact)


class FileTask(Tasks):
    """`Tasks` whose one result is a file, which a request has written; wanted no more where one made from it exists."""

    in_flight = 1

    def __init__(self, path: Path, what: str, request: Callable[[], Request], made_from_it: Path | None = None) -> None:
        self.path, self._make = path, request
        there = path.exists() or (made_from_it is not None and made_from_it.exists())
        super().__init__(what, [("", 0)], {("", 0)} if there else set())

    def _request(self, problem: str, response: int) -> Request:
        return self._make()

    def record(self, response: Response) -> None:
        """Count the file: the engine has written it."""
        self._finished = {("", 0)}


def recording(store: Store, folder: Path, variant: str) -> FileTask:
    """Have a variant record its operations on the beginning of the longest sequence, a response to its first token."""
    path, compared = folder / f"record-{variant}.pt", folder / f"operations-{variant}.json"

    def request() -> Request:
        samples = ((key, store.journal.read(store.positions["rollout", None][key])["token_ids"]) for key in store.keys)
        sequences = [store.prompt_ids[int(problem)] + tuple(ids) for (problem, _), ids in samples]
        ids = max(sequences, key=len)[:_RECORDED_TOKENS]
        return Request("record", 0, ids[:1], response_token_ids=ids[1:], record_to=str(path))

    return FileTask(path, f"operations recorded: {variant}", request, made_from_it=compared)


def comparison(folder: Path, variant: str) -> FileTask:
    """Have the record of a variant compared with transformers."""
    path, record = folder / f"operations-{variant}.json", str(folder / f"record-{variant}.pt")
    return FileTask(path, f"operations compared: {variant}", lambda: Request(record, 0, (), record_to=str(path)))


class OperationComparer:
    """An engine: it compares a variant's record with transformers in FP32, on vLLM's weights, and writes the result."""

    def __init__(self, model: str) -> None:
        from transformers import AutoModelForCausalLM

        device = "cuda" if torch.cuda.is_available() else "cpu"
        settings: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa"}
        self._model = AutoModelForCausalLM.from_pretrained(model_location(model), **settings).eval().to(device)
        self._asked: list[Request] = []

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; `problem` is the record's file and `record_to` that of the result."""
        self._asked += requests

    def poll(self) -> list[Response]:
        """Compare one record."""
        if not self._asked:
            return []
        request = self._asked.pop(0)
        record = torch.load(request.problem, map_location=self._model.device)
        write_json(Path(request.record_to), asdict(compare(self._model, record)))
        return [Response(request.problem, request.response, 0)]


def read_operations(path: Path) -> Operations:
    """Return what an `OperationComparer` wrote."""
    return TypeAdapter(Operations).validate_json(path.read_bytes())
