"""What tests of rules plant their faults in: verl's own config, with words of a command in short forms."""

import functools
import re

from composer import compose_verl

SHORT = {
    "DISAGGREGATED": "trainer.v1.trainer_mode=vp_separate_async trainer.v1.separate_async.parameter_sync_step=4 "
    "rollout.nnodes=1 rollout.n_gpus_per_node=8",
    "MASKS": "+sampling_masks=replay rollout.top_k=64",
    "VERLS_ENGINE": "fsdp._target_=verl.workers.config.FSDPEngineConfig +presets=yield",
    "EXACT": "+precision=bf16 +arithmetic=exact trainer.device=cpu rollout.enforce_eager=True "
    "rollout.tensor_model_parallel_size=1",
    "SDPA": "model.override_config.attn_implementation=sdpa",
    "ULYSSES": "ulysses_sequence_parallel_size",
    "FINISHED": "+reward.custom_reward_function.reward_kwargs.require_finished=True "
    "reward.custom_reward_function.path=pkg://verl_precision.tools.rewards.boxed_answer",
    "LOOP": "rollout.agent.default_agent_loop=vp_single_turn",
    "REPLAY": "+precision=bf16 +router_replay=rollout",
    "DISTILLED": "distillation.enabled=True distillation.nnodes=1 "
    "distillation.teacher_models.teacher_model.model_path=owner/teacher",
    "REWARDED": "reward.reward_model.enable=True reward.reward_model.model_path=owner/judge "
    "reward.reward_model.rollout.name=vllm",
    "FILTERED": "algorithm.filter_groups.enable=True algorithm.filter_groups.metric=reward",
    "SHAPED": "+reward.reward_kwargs={overlong_buffer_cfg:{enable:True,len:128,penalty_factor:1.0},max_resp_len:512}",
    "ACTOR_FP16": "+fsdp.mixed_precision=FP16 rollout.dtype=float16",
}


def in_full(words: str) -> list[str]:
    """Return words of a command, from their short forms."""
    for word, meant in SHORT.items():
        words = words.replace(word, meant)
    words = re.sub(r"(?<!\S)(\+?)fsdp\.", r"\1actor.fsdp_config.", words)
    words = re.sub(r"(?<!\S)(\+?)(actor|rollout|ref|model)\.", r"\1actor_rollout_ref.\2.", words)
    words = re.sub(r"(?<!\S)correction\.", "algorithm.rollout_correction.", words)
    return re.sub("=FP(16|32)", r"={param_dtype:fp\1,reduce_dtype:fp32,buffer_dtype:fp32}", words).split()


@functools.cache
def composed(words: str = ""):
    """Compose verl's own config with the rollout's log-probs, so that rules about them have something to look at."""
    rollout = (f"actor_rollout_ref.rollout.{setting}" for setting in ("name=vllm", "n=8", "calculate_log_probs=True"))
    advantage = () if "+estimator=" in words else ("algorithm.adv_estimator=grpo",)
    return compose_verl(*advantage, *rollout, *in_full(words), return_hydra_config=True)
