"""verl's single-turn agent loop, which ends a response at a string: verl's own sampling has no stop strings.

In a recipe:

    actor_rollout_ref.rollout:
      agent: {default_agent_loop: vp_single_turn}
      custom: {stop: ["</answer>"]}

The string stays at the end of the response, so that the policy learns to write it. Training and validation stop alike.
"""

from types import ModuleType
from typing import Any

from verl.experimental.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from verl_precision.rules.rollout_rules import STOPPING_LOOP


class StoppingAgentLoop(SingleTurnAgentLoop):
    """One turn, which ends at one of `rollout.custom.stop`; rules/rollout_rules.py has checked that list."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Draw one response; verl's arguments and result."""
        stop = {"stop": list(self.rollout_config.custom["stop"]), "include_stop_str_in_output": True}
        return await super().run({**sampling_params, **stop}, **kwargs)


def register_agent_loop(single_turn: ModuleType) -> None:
    """Register the agent loop with verl, under its name.

    Args:
        single_turn: `verl.experimental.agent_loop.single_turn_agent_loop`.
    """
    register(STOPPING_LOOP)(StoppingAgentLoop)
