"""The first operation that two engines compute differently, and which operations add most to the gap.

vLLM has recorded the inputs and outputs of every operation of one forward. Each is computed again by transformers'
module, in FP32, from the same inputs: the difference is that operation's own error, whatever came before it. Added to
the same place of transformers' forward, the errors of one kind of operation give that kind's effect on the log-probs,
and the errors of all kinds together give vLLM's log-probs again: so nothing is left out unseen.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_precision.tools.engines.engine import Request, Response
from verl_precision.tools.engines.model import model_location
from verl_precision.tools.gap.explain.attribution import attribute
from verl_precision.tools.gap.explain.error_injection import injected
from verl_precision.tools.gap.explain.operation_error import KINDS, operation_errors, whole_head
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
    # The largest error in each layer, the first layer first; one number outside of the layers.
    errors: tuple[float, ...]


@dataclass(frozen=True)
class Operations:
    """What was found in one record.

    Attributes:
        operations: Each kind that was matched, the largest share first; none if the model's family is not known, or if
            vLLM ran compiled.
        first: The first operation, in the order of the forward, whose error is above `bound`; None if none is.
        bound: Largest relative error that rounding makes in one operation.
        nats: Mean |gap| between vLLM's forward and transformers' in FP32, on the tokens of the record.
        remainder: Mean |gap| that is left when all errors are added: what was not matched.
    """

    operations: tuple[Operation, ...]
    first: str | None
    bound: float
    nats: float
    remainder: float


def compare(model: Any, record: dict[str, Any]) -> Operations:
    """Find what each kind of operation of a record does.

    Args:
        model: A causal language model of transformers in FP32, with the weights that vLLM had.
        record: As `vllm_sampler.OperationRecorder` writes it.
    """
    if model.config.model_type not in FAMILIES or not any(".layers." in call["name"] for call in record["calls"]):
        return Operations((), None, 0.0, 0.0, 0.0)
    bound = max(_BOUND_IN_EPSILONS * torch.finfo(getattr(torch, record["dtype"])).eps, _LEAST_BOUND)
    ids = torch.tensor([record["token_ids"]], device=model.device)
    errors = list(operation_errors(model, record["calls"]))
    head = whole_head(record["calls"])["outputs"][0]
    labels = ids[0, 1 : len(head) + 1]

    def log_probs(*kinds: str) -> Any:
        with torch.no_grad(), injected(model, [error for error in errors if error.kind in kinds]):
            logits = model(input_ids=ids, use_cache=False).logits[0, : len(head)]
        return _of_labels(logits, labels)

    plain, found = log_probs(), _of_labels(head, labels)
    kinds = [kind for kind in KINDS if any(error.kind == kind for error in errors)]
    steps = [plain]
    for kind in kinds:
        steps.append(steps[-1] + log_probs(kind) - plain)
    attribution = attribute([*steps, found])
    operations = []
    for kind, part in zip(kinds, attribution.parts, strict=False):
        of_kind = [error for error in errors if error.kind == kind]
        worst = max(of_kind, key=lambda error: error.relative)
        layers = sorted({-1 if error.layer is None else error.layer for error in of_kind})
        largest = tuple(max(e.relative for e in of_kind if e.layer in (layer, None)) for layer in layers)
        operations.append(Operation(kind, worst.layer, worst.relative, attribution.share(part), largest))
    return Operations(
        operations=tuple(sorted(operations, key=lambda one: -one.share)),
        first=next((f"{e.kind} ({e.name})" for e in errors if e.relative > bound), None),
        bound=bound,
        nats=attribution.nats,
        remainder=float(abs(log_probs(*kinds) - found).mean()),
    )


def _of_labels(logits: Tensor, labels: Tensor) -> Any:
    return logits.float().log_softmax(-1).gather(-1, labels[:, None])[:, 0].double().cpu().numpy()


class FileWork:
    """`Work` whose one result is a file."""

    total = 1
    in_flight = 1

    def __init__(self, path: Path, what: str, request: Callable[[], Request], made_from_it: Path | None = None) -> None:
        """Note what is wanted.

        Args:
            path: The file.
            what: What it is, in words.
            request: Returns the request that has the file written.
            made_from_it: A file that is made from it; where that is, this one is wanted no more.
        """
        self.path, self._what, self._request, self._made_from_it = path, what, request, made_from_it
        self._asked = False

    @property
    def done(self) -> int:
        """1 if the file is there, or is wanted no more."""
        return int(any(path.exists() for path in (self.path, self._made_from_it) if path))

    def next_requests(self, limit: int) -> list[Request]:
        """Return the one request, once."""
        asked, self._asked = self._asked, True
        return [] if asked or self.done else [self._request()]

    def record(self, response: Response) -> None:
        """Do nothing: the file is there."""

    def progress(self) -> str:
        """Say what is done."""
        return self._what


def recording(store: Store, folder: Path, variant: str) -> FileWork:
    """Have a variant record its operations on the beginning of the longest sequence, a response to its first token."""
    path = folder / f"record-{variant}.pt"

    def request() -> Request:
        samples = ((key, store.journal.read(store.positions["rollout", None][key])["token_ids"]) for key in store.keys)
        sequences = [store.prompt_ids[int(problem)] + tuple(ids) for (problem, _), ids in samples]
        ids = max(sequences, key=len)[:_RECORDED_TOKENS]
        return Request("record", 0, ids[:1], response_token_ids=ids[1:], record_to=str(path))

    return FileWork(path, f"operations recorded: {variant}", request, made_from_it=_compared(folder, variant))


def comparison(folder: Path, variant: str) -> FileWork:
    """Have the record of a variant compared with transformers."""
    path, record = _compared(folder, variant), str(folder / f"record-{variant}.pt")
    return FileWork(path, f"operations compared: {variant}", lambda: Request(record, 0, (), record_to=str(path)))


def _compared(folder: Path, variant: str) -> Path:
    return folder / f"operations-{variant}.json"


class OperationComparer:
    """An engine: asked for a variant, it compares the variant's record, and writes what it finds."""

    def __init__(self, model: str) -> None:
        """Load the model with transformers, in FP32.

        Args:
            model: A model as in `find_model`, with the weights that vLLM had.
        """
        from transformers import AutoModelForCausalLM

        device = "cuda" if torch.cuda.is_available() else "cpu"
        location = model_location(model)
        loaded = AutoModelForCausalLM.from_pretrained(location, dtype=torch.float32, attn_implementation="sdpa")
        self._model = loaded.eval().to(device)
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
    content = json.loads(path.read_text())
    operations = tuple(Operation(**{**one, "errors": tuple(one["errors"])}) for one in content["operations"])
    return Operations(**{**content, "operations": operations})
