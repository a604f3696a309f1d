"""The table of dtypes: what of a run computes and is kept in which, and the setting that decides."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from verl_precision.base.dtypes import short
from verl_precision.base.verl_config import ROLLOUT, engine_kwargs, engines, rollout_dtype, transport_dtype
from verl_precision.check.models import model_config
from verl_precision.check.rules.attention import gated_delta_nets
from verl_precision.check.served_models import served_models


@dataclass(frozen=True)
class Row:
    """One line of the table: what runs in which dtype, and the setting that decides."""

    what: str
    dtype: str
    source: str


def dtype_table(config: DictConfig, model: Mapping[str, Any] | None = None) -> Iterator[Row]:
    """Yield what will run in which dtype; `model` is the content of its `config.json`, looked for where not given."""
    for engine in engines(config):
        of_weights, of_sums = engine.sources
        yield Row(f"{engine.role} forward", engine.compute, engine.source)
        yield Row(f"{engine.role} {'master weights, Adam' if engine.trains else 'weights'}", engine.master, of_weights)
        if engine.trains:
            yield Row(f"{engine.role} gradient reduction", engine.reduce, of_sums)
    yield Row("rollout", rollout_dtype(config), "actor_rollout_ref.rollout.dtype")
    yield from (Row(served.role, served.dtype, served.source) for served in served_models(config))
    yield Row("weights to the rollout", *transport_dtype(config))
    yield from _states(config, model_config(config) if model is None else model)
    name = config.actor_rollout_ref.rollout.name
    takes = "vLLM takes them in FP32" if name == "vllm" else f"as {name} gives them: not verified here"
    yield Row("rollout log-probs", "fp32", takes)
    actor = engines(config)[0]
    if actor.our_fsdp and actor.node.get("fp32_log_probs", True):
        yield Row("trainer log-probs", "fp32", f"{actor.setting}.fp32_log_probs")
    elif actor.strategy == "megatron":
        yield Row(
            "trainer log-probs", "fp32", f"Megatron's vocabulary-parallel sum; a temperature divides {actor.compute}"
        )
    elif config.trainer.device == "cpu":
        yield Row("trainer log-probs", actor.compute, "log-softmax in the logits' dtype (device cpu)")
    else:
        yield Row("trainer log-probs", "fp32", "verl: autocast, or flash-attn's kernel, takes them in FP32")


def _states(config: DictConfig, model: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the dtypes of what a layer with a gated delta net keeps of the tokens before."""
    text = gated_delta_nets(model)
    if not text or config.actor_rollout_ref.rollout.name != "vllm":
        return
    given, setting = engine_kwargs(config), f"{ROLLOUT}.engine_kwargs.vllm"
    recent = short(given.get("mamba_cache_dtype", "auto"))
    recent = rollout_dtype(config) if recent == "auto" else recent
    named = text.get("mamba_ssm_dtype") if str(text.get("model_type")).startswith("qwen3_5") else None
    asked = short(given.get("mamba_ssm_cache_dtype", "auto"))
    state, source = (asked, "") if asked != "auto" else (short(named or recent), " (auto)")
    if asked == "auto" and named:
        source = " (auto: mamba_ssm_dtype of the model's config.json)"
    yield Row("rollout recurrent state", state, f"{setting}.mamba_ssm_cache_dtype{source}")
    yield Row("rollout convolution state", recent, f"{setting}.mamba_cache_dtype")
    yield Row("trainer recurrent state", "fp32", "transformers: the delta rule is computed in FP32")
