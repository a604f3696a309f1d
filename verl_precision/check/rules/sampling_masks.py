"""Rules of sampling masks: what contradicts them is refused before Ray starts."""

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.verl_config import FSDP, ROLLOUT, engine_kwargs, engines
from verl_precision.check.rules.rollout import replays_masks
from verl_precision.check.rules.rule import Environment, Fault, Faults, rule

SETTING = f"{ROLLOUT}.custom.sampling_masks"


@rule("sampling-masks")
def sampling_masks(config: DictConfig, environment: Environment) -> Faults:
    """Masks need a bounded number of kept tokens, a rollout that may return them, and a trainer that reads them."""
    if not replays_masks(config):
        return
    actor, rollout, model = engines(config)[0], config.actor_rollout_ref.rollout, config.actor_rollout_ref.model

    def fault(problem: str, allowed: str, setting: str = SETTING, remedy: str = "") -> Fault:
        return Fault(setting=setting, problem=problem, allowed=allowed, remedy=remedy or f"Set {setting}={allowed}.")

    if not actor.ours or actor.strategy not in FSDP:
        yield fault(
            "only this package's FSDP engine renormalises over them", "False", remedy="Choose a precision preset."
        )
    if rollout.top_k < 1:
        problem = "without top_k the mask of a token could hold the whole vocabulary"
        remedy = f"Set {ROLLOUT}.top_k=256, say: top_p alone rarely keeps more."
        yield fault(problem, "1 or more", f"{ROLLOUT}.top_k", remedy)
    most, least = engine_kwargs(config).get("max_logprobs", 20), 2 * rollout.top_k + 16
    if rollout.top_k >= 1 and 0 <= most < least:
        setting = f"{ROLLOUT}.engine_kwargs.vllm.max_logprobs"
        yield fault("vLLM refuses to return so many tokens", f"-1, or {least} or more", setting, f"Set ++{setting}=-1.")
    if rollout.get("repetition_penalty", 1.0) != 1:
        setting, problem = (
            f"{ROLLOUT}.repetition_penalty",
            "a penalty changes the log-probs of the tokens that are kept",
        )
        yield fault(problem, "1.0", setting)
    if not rollout.calculate_log_probs:
        yield fault("the masks come with the log-probs", "True", f"{ROLLOUT}.calculate_log_probs")
    mode = str(OmegaConf.select(config, "trainer.v1.trainer_mode"))
    if mode not in ("sync", "vp_sync"):
        problem = "verl joins the parts of a response that was interrupted, and drops their masks"
        yield fault(problem, "sync or vp_sync", "trainer.v1.trainer_mode")
    if actor.ours and not actor.node.get("fp32_log_probs", True):
        yield fault("verl's own log-probs know no masks", "True", f"{actor.setting}.fp32_log_probs")
    if model.get("use_fused_kernels"):
        setting = "actor_rollout_ref.model.use_fused_kernels"
        yield fault("fused kernels never show their logits", "False", setting)
    if actor.ulysses[1] > 1:
        yield fault("a rank then sees a part of each sequence", "1", actor.ulysses[0])
