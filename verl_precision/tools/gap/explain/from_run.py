"""The settings of `explain` for a recipe or a run."""

import shlex
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.options import as_options
from verl_precision.base.verl_config import FSDP, engine_kwargs, engines, lora_rank, rollout_dtype
from verl_precision.check.rules.engine import attention_of
from verl_precision.engine.arithmetic_choice import ARITHMETIC_SETTING
from verl_precision.tools.checking.composing import recorded_config
from verl_precision.tools.gap.explain.variants import variants
from verl_precision.tools.jobs.settings import Explanation
from verl_precision.tools.runs.read import read_runs


def explained_by(config: DictConfig) -> dict[str, Any]:
    """Return the settings of an `Explanation`, and of its prompts, as the command line has them."""
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    actor, overrides = engines(config)[0], engine_kwargs(config)
    for setting, value, allowed in (
        ("actor.strategy", actor.strategy, FSDP),
        ("rollout.name", rollout.name, ("vllm",)),
    ):
        if value not in allowed:
            raise ConfigurationError(
                "explain has no engine for this setting", setting=f"actor_rollout_ref.{setting}", value=value,
                allowed=" or ".join(allowed), remedy="Leave out --recipe and --run to explain the model alone.",
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
        "fp32_output_head": bool(actor.our_fsdp and actor.node.get("fp32_output_head")),
        "fp32_log_probs": bool(actor.node.get("fp32_log_probs", True)) if actor.our_fsdp else verls_fp32,
        "micro_batch_tokens": int(config.actor_rollout_ref.actor.get("ppo_max_token_len_per_gpu") or 16384),
        "max_response_tokens": min(int(config.data.max_response_length), 512),  # longer responses show the same
        "prompts": str(files if isinstance(files, str) else files[0]),
        "prompt_field": str(config.data.get("prompt_key", "prompt")),
        "max_prompts": 16,
        "arithmetic": "native" if on_gpu else OmegaConf.select(config, ARITHMETIC_SETTING) or "native",
    }


def show_run(source: Path, console: Console) -> None:
    """Print the command that explains a run: a folder of `verl-precision compare`, or a metrics file."""
    say = partial(console.print, highlight=False, soft_wrap=True)  # not wrapped: commands are copied
    run, *others = read_runs([source])
    if others:
        names = ", ".join(each.name for each in (run, *others))
        problem, remedy = "there are several runs in it", f"Name one of {names}."
        raise ConfigurationError(problem, setting="--run", value=str(source), allowed="one run", remedy=remedy)
    found = (recorded_config(folder) for folder in (source, run.path.parent, run.path.with_suffix("")))
    say(f"For the gap that this run measured, and its alarms: verl-precision report {run.path}")
    config = next((config for config in found if config is not None), None)
    if config is None:
        say("This run has no config. For the share of each cause: verl-precision explain --recipe RECIPE.yaml")
        return
    settings = explained_by(config)
    causes = ", ".join(one.cause for one in variants(Explanation(**settings))[1:])
    say(f"To measure the share of each cause ({causes}), run:")
    say(f"verl-precision explain {shlex.join(as_options(Explanation, settings))}")
    if lora_rank(config):
        say("The run trains an adapter. The command leaves it out and explains the base model.")
