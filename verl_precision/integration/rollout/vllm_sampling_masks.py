"""verl's vLLM server with sampling masks: on request it returns the tokens that sampling kept at each position.

vLLM returns the most probable tokens of each position with their processed log-probs, which are -inf for tokens that
top-k, top-p and min-p dropped. The kept tokens' probabilities must sum to 1: then vLLM has returned all of them.
"""

from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any

import numpy as np

from verl_precision.base.errors import ConfigurationError
from verl_precision.engine.log_probs import MASK_ANSWER_KEY, MASK_REQUEST_KEY
from verl_precision.integration.ledger import wrap_actor_method_once

# The probabilities of thousands of tokens, from FP32 log-probs, sum to 1 within this.
_NORMALISED = 1e-3


def return_masks(server: ModuleType) -> None:
    """Wrap the server's `generate`, once."""
    wrap_actor_method_once(server.__name__, "vLLMHttpServer.generate", _generate)


async def _generate(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    given = dict(zip(("prompt_ids", "sampling_params", "request_id"), args, strict=False)) | kwargs
    returned, request = given["sampling_params"].pop(MASK_REQUEST_KEY, None), given["request_id"]
    if returned is None:
        return await wrapped(*args, **kwargs)
    if not isinstance(instance.engine.generate, _Recorded):
        instance.engine.generate = _Recorded(instance.engine.generate)
    recorded = instance.engine.generate
    recorded.asked[request] = returned
    try:
        output = await wrapped(*args, **kwargs)
    finally:
        del recorded.asked[request]
        log_probs = recorded.log_probs.pop(request, None)
    output.extra_fields[MASK_ANSWER_KEY] = kept_of(log_probs, len(output.token_ids), returned)
    return output


class _Recorded:
    """vLLM's `generate`; for a request with masks it returns more log-probs, and keeps them under the request's id."""

    def __init__(self, generate: Any) -> None:
        self._generate = generate
        self.asked: dict[str, int] = {}  # request -> number of tokens to return at each position
        self.log_probs: dict[str, Any] = {}  # request -> vLLM's log-probs

    async def __call__(self, **kwargs: Any) -> AsyncIterator[Any]:
        request = kwargs["request_id"]
        if request in self.asked:
            kwargs["sampling_params"].logprobs = self.asked[request]
            kwargs["sampling_params"].flat_logprobs = True
        async for output in self._generate(**kwargs):
            if request in self.asked and output.outputs:
                self.log_probs[request] = output.outputs[0].logprobs
            yield output


def kept_of(log_probs: Any, places: int, returned: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of kept tokens at each position of a response, and the tokens; raise if some are missing.

    `log_probs` are vLLM's `FlatLogprobs`: at each position the drawn token, then the `returned` most probable ones.
    """
    if not places:
        return np.zeros(0, np.int32), np.zeros(0, np.int32)
    starts, ends = np.asarray(log_probs.start_indices[:places]), np.asarray(log_probs.end_indices[:places])
    ids, values = np.asarray(log_probs.token_ids[: ends[-1]], np.int32), np.asarray(log_probs.logprobs[: ends[-1]])
    drawn = np.repeat(ids[starts], ends - starts)
    again = ids == drawn  # the drawn token is among the most probable ones too
    again[starts] = False
    kept = np.isfinite(values) & ~again
    mass = np.add.reduceat(np.where(kept, np.exp(values), 0), starts)
    if abs((worst := mass[np.abs(mass - 1).argmax()]) - 1) > _NORMALISED:
        raise ConfigurationError(
            f"vLLM sampled from more than the {returned} tokens that it returned: these have {worst:.4f} of "
            "the probability. vLLM also keeps all logits that equal the logit of rank top_k",
            setting="actor_rollout_ref.rollout.top_k",
            allowed="a top_k with at most 16 further tokens tied at its rank, or the size of the vocabulary",
            remedy="Choose a smaller top_k, or a rollout in FP16 or FP32, which has fewer ties.",
        )
    return np.add.reduceat(kept, starts, dtype=np.int32), ids[kept]
