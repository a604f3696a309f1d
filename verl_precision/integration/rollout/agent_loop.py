"""verl's single-turn agent loop with more sampling settings for vLLM: stop strings, min-p, seeds, masks.

In a recipe:

    actor_rollout_ref.rollout:
      agent: {default_agent_loop: vp_single_turn}
      custom: {stop: ["</answer>"], min_p: 0.05, sampling_masks: True}

A stop string stays at the end of the response, so that the policy learns to write it. Training and validation stop
alike. Sampling masks are the tokens that top-k, top-p and min-p kept (docs/options.md). With `seeded: True` each
response is drawn with a seed of its own (docs/options.md). With `mark_truncated: True` rewards find in `extra_info`
whether a response was `truncated`: it has the largest length, and its last token is not the end token.
"""

from types import ModuleType
from typing import Any

import numpy as np
from verl.experimental.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from verl_precision.base.content import response_seed
from verl_precision.base.verl_config import AGENT_LOOP
from verl_precision.engine.log_probs import MASK_ANSWER_KEY, MASK_FIELD, MASK_REQUEST_KEY, pack


class MaskedOutput(AgentLoopOutput):
    """A response with the tokens that sampling kept at each position."""

    def as_dict(self) -> dict[str, Any]:
        """Return verl's fields of the sample, and the mask."""
        counts, ids = self.extra_fields.pop(MASK_ANSWER_KEY)
        fields = super().as_dict()
        return {**fields, MASK_FIELD: pack(np.asarray(counts[: len(self.response_ids)]), np.asarray(ids))}


class PrecisionAgentLoop(SingleTurnAgentLoop):
    """One turn, sampled with the settings of `rollout.custom`, which check/rules/rollout.py has checked."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Sample one response; arguments and result are verl's."""
        custom, asked = self.rollout_config.custom or {}, dict(sampling_params)
        if custom.get("stop"):
            asked |= {"stop": list(custom["stop"]), "include_stop_str_in_output": True}
        if custom.get("min_p"):
            asked["min_p"] = custom["min_p"]
        top_k = sampling_params.get("top_k", -1)
        if custom.get("sampling_masks") and sampling_params["temperature"] > 0 and top_k > 0:
            # vLLM also keeps logits that equal the logit of rank top_k.
            asked[MASK_REQUEST_KEY] = min(2 * top_k + 16, len(self.tokenizer))
        if custom.get("seeded"):
            asked["seed"] = response_seed(self.rollout_config.seed, kwargs["uid"], kwargs["session_id"])
        output = await super().run(asked, **kwargs)
        if custom.get("mark_truncated"):
            ids = output.response_ids
            full = len(ids) >= self.response_length
            output.extra_fields["truncated"] = full and ids[-1] != self.tokenizer.eos_token_id
        if MASK_ANSWER_KEY in output.extra_fields:
            return MaskedOutput(**{name: getattr(output, name) for name in output.model_fields_set})
        return output


def register_agent_loop(single_turn: ModuleType) -> None:
    """Register the agent loop with verl, under its name."""
    register(AGENT_LOOP)(PrecisionAgentLoop)
