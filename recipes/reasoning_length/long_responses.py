"""What makes 8,192 tokens affordable on a CPU; verl imports this module (`actor_rollout_ref.model.external_lib`).

- Attention in blocks: `banded_attention.py`.
- An agent loop, `whole_response`: vLLM returns a response when it has ended, as token ids. By default it returns what
  it has after every token, with its text, which nothing reads.
- A control, off by default: `added_spread=1.6` gives the log-weights of short responses the spread of long ones.
"""

import random
from typing import Any

from verl.experimental.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from vllm.sampling_params import RequestOutputKind

from recipes.reasoning_length import banded_attention  # noqa: F401 - registers the attention


@register("whole_response")
class WholeResponse(SingleTurnAgentLoop):
    """One turn, as verl's, sampled alike."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Sample one response; arguments and result are verl's."""
        asked = {**sampling_params, "output_kind": RequestOutputKind.FINAL_ONLY, "detokenize": False}
        output = await super().run(asked, **kwargs)
        if self.config.added_spread:
            output.response_logprobs = with_spread(output.response_logprobs, self.config.added_spread)
        return output


def with_spread(log_probs: list[float], spread: float) -> list[float]:
    """Return a rollout's log-probs with independent noise on every random word, ε ~ N(σ²/2, σ²): E[exp(-ε)] is 1.

    The noise of a response's N random words adds up to `spread` nats, σ = spread / √N, as the gaps of a precision do.
    The same log-probs get the same noise.
    """
    drawn = random.Random(repr(log_probs))
    words = [place for place, log_prob in enumerate(log_probs) if log_prob < -1]
    deviation = spread / max(1, len(words)) ** 0.5
    noisy = list(log_probs)
    for place in words:
        noisy[place] += drawn.gauss(deviation**2 / 2, deviation)
    return noisy
