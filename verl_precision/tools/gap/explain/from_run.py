"""The settings that a recipe or a run would have explained, and what is wrong by them alone."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.options import as_options
from verl_precision.base.verl_config import FSDP, engine_kwargs, engines, lora_rank, rollout_dtype
from verl_precision.check.rules.attention import attention_of
from verl_precision.engine.arithmetic_choice import ARITHMETIC_SETTING
from verl_precision.mismatch.metric_names import K3_KL, value_of
from verl_precision.tools.checking.composing import recorded_config
from verl_precision.tools.gap.explain.judge import CAUSES
from verl_precision.tools.gap.explain.settings import Explanation
from verl_precision.tools.gap.explain.variants import variants
from verl_precision.tools.kept_tokens.kept_file import beside, index_of
from verl_precision.tools.runs.read import Run, read_runs

Rows = Sequence[Mapping[str, float]]
_MASKS = "actor_rollout_ref.rollout.custom.sampling_masks"


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
                "explain has no engine for it", setting=f"actor_rollout_ref.{setting}", value=value,
                allowed=" or ".join(allowed), remedy="Explain the model alone: leave --recipe and --run out.",
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
        "max_response_tokens": min(int(config.data.max_response_length), 512),  # more cost time, and show the same
        "prompts": str(files if isinstance(files, str) else files[0]),
        "prompt_field": str(config.data.get("prompt_key", "prompt")),
        "max_prompts": 16,
        "arithmetic": "native" if on_gpu else OmegaConf.select(config, ARITHMETIC_SETTING) or "native",
    }


def read_run(source: Path) -> tuple[Run, DictConfig | None]:
    """Return a run's metrics and config; None where it has left no config.

    It is a folder of `verl-precision compare`, a metrics file, or a folder of checkpoints, whose metrics file stands
    beside it under the same name.
    """
    of_checkpoints = source.with_name(f"{source.name}.jsonl")
    run, *others = read_runs([of_checkpoints if of_checkpoints.is_file() else source])
    if others:
        names = ", ".join(each.name for each in (run, *others))
        problem, remedy = "there are several runs in it", f"Name one of {names}."
        raise ConfigurationError(problem, setting="--run", value=str(source), allowed="one run", remedy=remedy)
    found = (recorded_config(folder) for folder in (source, run.path.parent, run.path.with_suffix("")))
    return run, next((config for config in found if config is not None), None)


def show_run(source: Path, console: Console) -> None:
    """Print the gap that a run has measured, which faults its config tells, and what a rerun would add."""

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    run, config = read_run(source)
    say(f"{gap_of(run.rows)} Its alarms, and all that it measured: verl-precision report {run.path}")
    if config is None:
        say("It has left no config. A rerun tells the share of each cause: verl-precision explain --recipe RECIPE.yaml")
        return
    faults = faults_of(config)
    for cause, seen in faults.items():
        say(f"Something is wrong. {cause}: {CAUSES[cause].title} ({seen}). {CAUSES[cause].remedy}.")
    if not faults:
        say("Nothing in its config is wrong.")
    settings, tokens = explained_by(config), beside(run.path)
    # Tokens that were sampled with the weights of the model can be computed again.
    if step := next((one.step for one in index_of(tokens) if one.version == 0), None):
        drawn = ("prompts", "prompt_field", "max_prompts")
        settings = {name: value for name, value in settings.items() if name not in drawn}
        settings |= {"tokens": str(tokens), "step": step}
    causes = ", ".join(one.cause for one in variants(Explanation(**settings))[1:])
    say(f"A rerun tells the share of each cause ({causes}):")
    say(f"verl-precision explain {shlex.join(as_options(Explanation, settings))}")
    if lora_rank(config):
        say("It trains an adapter: add --adapter and the folder lora_adapter of a checkpoint.")


def faults_of(config: DictConfig) -> dict[str, str]:
    """Return the causes that are faults by a config alone, and what was seen of each."""
    settings, found = explained_by(config), {}
    truncated = settings["top_p"] < 1 or settings["top_k"] > 0
    if settings["raw_log_probs"] and settings["temperature"] != 1:
        found["temperature"] = f"logprobs_mode=raw_logprobs at temperature {settings['temperature']:g}"
    if truncated and not settings["raw_log_probs"] and not OmegaConf.select(config, _MASKS):
        found["sampling"] = f"top_p {settings['top_p']:g}, top_k {settings['top_k'] or -1}, and no masks are replayed"
    if not settings["fp32_log_probs"]:
        found["log_probs"] = "16-bit log-probs"
    return found


def gap_of(rows: Rows) -> str:
    """Return the whole gap of a run in words."""
    k3 = {row["step"]: value for row in rows if (value := value_of(row, K3_KL)) is not None}
    if not k3:
        return "The run has not measured its mismatch. Every preset sets mismatch.enabled=True."
    mean, last = fmean(k3.values()), max(k3)
    return f"Steps {min(k3):.0f} to {last:.0f}: k3 {mean:.2e} on average, {k3[last]:.2e} at the last step."
