"""What a recipe, or a run that is over, would have explained: the settings of `Explanation` in verl's config."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.verl_config import FSDP, engine_kwargs, engines, rollout_dtype
from verl_precision.check.rules.attention import attention_of

_LONGEST = 512  # tokens of a response: more of them cost time, and show the same
_PROMPTS = 16  # of the training set


def explained_by(config: DictConfig) -> dict[str, Any]:
    """Return the settings of an `Explanation`, and of its prompts, as the command line has them.

    Args:
        config: A composed config.

    Raises:
        ConfigurationError: If it trains with another engine than FSDP, or samples with another than vLLM.
    """
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    actor, overrides = engines(config)[0], engine_kwargs(config)
    for setting, value, allowed, known in (
        ("actor_rollout_ref.actor.strategy", actor.strategy, " or ".join(FSDP), actor.strategy in FSDP),
        ("actor_rollout_ref.rollout.name", rollout.name, "vllm", rollout.name == "vllm"),
    ):
        if not known:
            raise ConfigurationError(
                "explain has no engine for it", setting=setting, value=value, allowed=allowed,
                remedy="Explain the model alone: leave --recipe and --run out.",
            )  # fmt: skip
    on_gpu = config.trainer.device != "cpu"
    verls_fp32 = on_gpu or actor.compute == "fp32"  # verl's own engine takes log-probs in the logits' dtype on a CPU
    files = config.data.train_files
    return {
        "model": str(model.path),
        "rollout_dtype": rollout_dtype(config),
        "train_dtype": actor.compute,
        "temperature": float(rollout.temperature),
        "top_p": float(rollout.top_p),
        "top_k": max(int(rollout.top_k), 0),
        "raw_log_probs": overrides.get("logprobs_mode", rollout.get("logprobs_mode")) == "raw_logprobs",
        "prefix_caching": bool(rollout.get("enable_prefix_caching", True)),
        "cuda_graphs": on_gpu and not rollout.get("enforce_eager", False),
        "attention": attention_of(config) if on_gpu else "sdpa",
        "packed": bool(model.get("use_remove_padding", False)),
        "fp32_output_head": bool(actor.ours and actor.node.get("fp32_output_head")),
        "fp32_log_probs": bool(actor.node.get("fp32_log_probs", True)) if actor.ours else verls_fp32,
        "micro_batch_tokens": int(config.actor_rollout_ref.actor.get("ppo_max_token_len_per_gpu") or 16384),
        "max_response_tokens": min(int(config.data.max_response_length), _LONGEST),
        "prompts": str(files if isinstance(files, str) else files[0]),
        "prompt_field": str(config.data.get("prompt_key", "prompt")),
        "max_prompts": _PROMPTS,
    }  # fmt: skip


def replays_sampling(config: DictConfig) -> bool:
    """Return whether the trainer knows which tokens top-p and top-k left out."""
    return bool(OmegaConf.select(config, "actor_rollout_ref.rollout.custom.sampling_masks"))
