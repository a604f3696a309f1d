"""Gives configs the preset groups of this package, and the resolvers `${verl_precision.<name>:<arguments>}`."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omegaconf import DictConfig


def register_search_path(hydra_main: ModuleType) -> None:
    """Append the presets to Hydra's search path, once, so that `+precision=fp16` works with any config."""
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class VerlPrecisionSearchPath(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            search_path.append(provider="verl_precision", path="pkg://verl_precision.presets")

    plugins = Plugins.instance()
    if VerlPrecisionSearchPath.__name__ not in {known.__name__ for known in plugins.discover(SearchPathPlugin)}:
        plugins.register(VerlPrecisionSearchPath)


def register_resolvers(omegaconf: ModuleType) -> None:
    """Register the functions below with OmegaConf under their names, once."""
    of_a_config = (sync_is_verified, stochastic_rounding_to, run_name)
    for function in (tiny_model, fraction, per_rank, sequence_length, *of_a_config):
        name = f"verl_precision.{function.__name__}"
        if not omegaconf.OmegaConf.has_resolver(name):
            omegaconf.OmegaConf.register_new_resolver(name, function)


def tiny_model(architecture: str) -> str:
    """Return the folder of a tiny model; a part installed beside the plugin builds the model at the first call."""
    from verl_precision.base.extensions import features_asked_for

    (cached_tiny_model,) = features_asked_for("resolve", {"tiny_model": True}.get, promised=["tiny_model"])
    return str(cached_tiny_model(architecture))


def fraction(length: int, parts: int) -> int:
    """Return a length divided by a whole number, at least 1."""
    return max(length // parts, 1)


def per_rank(prompts: int, responses: int, ranks: int) -> int:
    """Return the number of responses of one rank: the largest micro-batch size, since verl requires a divisor of it."""
    return max(prompts * responses // ranks, 1)


def sequence_length(prompt: int, response: int, at_least: int = 0) -> int:
    """Return the number of tokens of the longest sequence, the least value for `rollout.max_model_len`."""
    return max(prompt + response, at_least)


def sync_is_verified(_root_: DictConfig) -> bool:
    """Return whether `VerifiedWeightSyncExtension` reads the stream; others would load the manifest as a weight."""
    from omegaconf import OmegaConf

    from verl_precision.base.verl_config import CARRYING

    keys = ("name", "checkpoint_engine.backend", "engine_kwargs.vllm.worker_extension_cls")
    name, backend, extension = (OmegaConf.select(_root_, f"actor_rollout_ref.rollout.{key}") for key in keys)
    return name == "vllm" and backend in CARRYING and str(extension).startswith("verl_precision.")


def stochastic_rounding_to(_root_: DictConfig) -> str | None:
    """Return the rollout's dtype if `weight_sync.rounding=stochastic` rounds weights to it, otherwise None."""
    from omegaconf import OmegaConf

    from verl_precision.base.verl_config import rollout_dtype

    return rollout_dtype(_root_) if OmegaConf.select(_root_, "weight_sync.rounding") == "stochastic" else None


def run_name(_root_: DictConfig) -> str:
    """Return a run's name of dtypes, loss and weights: fp16_pg_seq_is, or bf16_train_fp16_rollout_grpo_vp_token_tis."""
    from verl_precision.base.verl_config import engines, rollout_dtype

    train, rollout = engines(_root_)[0].compute, rollout_dtype(_root_)
    precision = train if train == rollout else f"{train}_train_{rollout}_rollout"
    weights = (_root_.algorithm.get("rollout_correction") or {}).get("rollout_is")
    loss = _root_.actor_rollout_ref.actor.policy_loss.loss_mode
    return "_".join([precision, loss.removeprefix("vp_"), *([weights] if weights else [])])
