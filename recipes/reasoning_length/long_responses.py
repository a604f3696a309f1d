"""What makes 8,192 tokens affordable on a CPU; verl imports this module (`actor_rollout_ref.model.external_lib`).

- Attention in blocks: `banded_attention.py`.
- An agent loop, `whole_response`: vLLM returns a response when it has ended, as token ids. By default it returns what
  it has after every token, with its text, which nothing reads.
"""

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
        return await super().run(asked, **kwargs)
