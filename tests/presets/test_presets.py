"""Every preset composes on verl's config, passes verl's own validation, and sets what its name says."""

import numpy as np
import pytest
import torch
from composer import compose_estimator, compose_verl, differing
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, get_adv_estimator_fn
from verl.utils.config import omega_conf_to_dataclass, validate_config

from verl_precision.check.rules.registry import find_faults
from verl_precision.check.rules.rule import Environment
from verl_precision.engine.arithmetic_choice import INNER, VARIABLE
from verl_precision.engine.settings import LossScaleSettings
from verl_precision.integration.engine.engine_config import PrecisionFSDPConfig
from verl_precision.integration.resolvers import register_search_path
from verl_precision.losses import POLICY_LOSSES
from verl_precision.presets import PRESETS_DIR, preset_names

PROMISED = {
    "precision": "bf16 fp16 fp32 bf16_train_fp16_rollout bf16_train_fp32_rollout fp16_train_bf16_rollout "
    "fp32_train_bf16_rollout fp32_train_fp16_rollout",
    "estimator": "cispo cispo_rollout dapo dppo_kl dppo_tv geo_mask grpo grpo_seq_mis grpo_token_tis grpo_unclipped "
    "gspo icepop kpop off_policy_sequence_mask off_policy_sequence_mask_decoupled pg_seq_is pg_seq_mis pg_seq_tis "
    "ratio_one trm",
    "scale": "1x1_gpu 1x8_a100 1x8_h100 2x8_h100 8x8_h100 cpu cpu_2nodes",
}
PRESETS = [(group, name) for group in PROMISED for name in preset_names(group)]
DTYPES = {"bf16": ("bf16", "bfloat16"), "fp16": ("fp16", "float16"), "fp32": ("fp32", "float32")}
VLLM = "actor_rollout_ref.rollout.name=vllm"
FP16 = "+precision=fp16"
# Rollouts that do not read the manifest of the weights.
UNREAD = ("name=sglang", "checkpoint_engine.backend=mooncake", "engine_kwargs.vllm.worker_extension_cls=somebody.Else")


def estimator(name: str, length: int = 20480):
    return compose_estimator(name, f"data.max_response_length={length}")


@pytest.mark.parametrize("group", PROMISED)
def test_the_promised_presets_are_there(group):
    assert set(PROMISED[group].split()) <= set(preset_names(group))


@pytest.mark.parametrize(("group", "name"), PRESETS)
def test_every_preset_measures_the_mismatch_and_installs_the_preflight(group, name):
    config = compose_verl(f"+{group}={name}", VLLM, return_hydra_config=True)
    preflight = config.hydra.callbacks.verl_precision._target_
    assert config.mismatch.enabled is True and preflight == "verl_precision.check.preflight.PreflightCallback"


def test_one_variable_says_what_operations_compute_in():
    for name in preset_names("arithmetic"):
        variables = compose_verl(f"+arithmetic={name}", VLLM).ray_kwargs.ray_init.runtime_env.env_vars
        assert variables[VARIABLE] == name and name in INNER
    assert preset_names("arithmetic") == sorted(INNER)


@pytest.mark.parametrize("precision", preset_names("precision"))
def test_precision_sets_actor_ref_critic_and_rollout_together(precision):
    train, _, rollout = precision.removesuffix("_rollout").partition("_train_")
    short, long = DTYPES[train]
    config = compose_verl(f"+precision={precision}", VLLM)
    actor_rollout_ref = config.actor_rollout_ref
    actor, ref = actor_rollout_ref.actor.fsdp_config, actor_rollout_ref.ref.fsdp_config
    rollout_dtype = DTYPES[rollout or train][1]
    for engine in (actor, ref, config.critic.fsdp):
        assert engine.mixed_precision == {"param_dtype": short, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
        assert engine.dtype == long and engine.model_dtype == "fp32", "and FP32 master weights"
        typed = omega_conf_to_dataclass(engine)
        assert isinstance(typed, PrecisionFSDPConfig)
        assert typed.compute_dtype == short and typed.fp32_log_probs
        assert typed.loss_scale == LossScaleSettings(), "the presets spell out the defaults"
        assert not typed.shadow.enabled and typed.shadow.dtype == rollout_dtype
        assert typed.send_weight_manifest, "vLLM, fed by the trainer: the extension reads it"
        assert ("loss_scale" in engine) is (train == "fp16")
    assert ref.forward_only and not actor.forward_only
    assert actor_rollout_ref.rollout.dtype == rollout_dtype


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_verl_builds_the_typed_config_through_its_own_actor(strategy):
    actor = f"actor_rollout_ref.actor.strategy={strategy}", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"
    config = compose_verl(FP16, *actor, "actor_rollout_ref.actor.fsdp_config.loss_scale.initial=1024.0")
    engine = omega_conf_to_dataclass(config.actor_rollout_ref.actor).engine
    assert isinstance(engine, PrecisionFSDPConfig) and engine.loss_scale.initial == 1024
    assert engine.strategy == strategy


@pytest.mark.parametrize("precision", preset_names("precision"))
def test_nothing_else_changes(precision):
    """A precision preset touches the engines' dtypes, loss scale and log-probs, the weight-sync guard, and metrics."""
    changed = differing(compose_verl(VLLM), compose_verl(f"+precision={precision}", VLLM), resolve=False)
    allowed = (
        *("dtype", "worker_extension_cls", "mixed_precision", "._target_", "fp32_log_probs", "log_prob_chunk_tokens"),
        *("fp32_output_head", "send_weight_manifest", "stochastic_rounding_to", "loss_scale.", "shadow."),
        *(".mismatch.", ".weight_sync."),
        *(("attn_implementation",) if precision.startswith("fp32") else ()),  # flash attention has no FP32
    )
    assert not {key for key in changed if not any(word in f".{key}" for word in allowed)}


@pytest.mark.parametrize("override", ["name=vllm", "checkpoint_engine.backend=nccl", *UNREAD])
def test_the_manifest_is_sent_only_to_who_reads_it(override):
    config = compose_verl(FP16, VLLM, f"actor_rollout_ref.rollout.{override}")
    assert config.actor_rollout_ref.actor.fsdp_config.send_weight_manifest is (override not in UNREAD)


@pytest.mark.parametrize("name", preset_names("estimator"))
def test_estimator_is_valid_and_has_its_loss(name):
    config = estimator(name)
    validate_config(config, use_reference_policy=False, use_critic=False)
    assert [str(fault) for fault in find_faults(config, Environment()) if fault.severity == "error"] == []
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.policy_loss.loss_mode in POLICY_LOSS_REGISTRY
    assert actor.loss_agg_mode != "seq-mean-token-sum-norm" or actor.loss_scale_factor == 20480
    ours = POLICY_LOSSES.get(actor.policy_loss.loss_mode)
    of_rollout = ours is not None and "rollout_log_probs" in ours.parameters
    assert config.algorithm.rollout_correction.bypass_mode is (of_rollout or name == "cispo_rollout")


@pytest.mark.parametrize("name", preset_names("estimator"))
def test_every_value_of_an_estimator_has_its_source_and_the_docs_name_it(name, root):
    for line in (PRESETS_DIR / "estimator" / f"{name}.yaml").read_text().splitlines():
        key, _, value = line.strip().partition(":")
        if key and value and not line.startswith("#"):
            assert " # " in line, f"{name}: {line.strip()} has no source"
    assert f"`{name}`" in (root / "docs/math.md").read_text()


def test_settings_of_the_papers():
    """Those of `dapo` and `grpo_seq_mis` in Table 3, which recipes take from the presets: recipes/test_table_3.py."""
    grpo, gspo = (estimator(name).actor_rollout_ref.actor for name in ("grpo", "gspo"))
    assert (grpo.clip_ratio_low, grpo.clip_ratio_high) == (0.2, 0.28)
    assert (gspo.clip_ratio_low, gspo.clip_ratio_high) == (3e-4, 4e-4)
    assert gspo.loss_agg_mode == "seq-mean-token-mean"
    assert estimator("dapo", length=64).reward.reward_kwargs.overlong_buffer_cfg.len == 12
    for name in ("pg_seq_tis", "pg_seq_mis"):
        correction = estimator(name).actor_rollout_ref.actor.policy_loss.rollout_correction
        assert correction.rollout_is_threshold == 3.0


@pytest.mark.parametrize("name", ["grpo_unclipped", "ratio_one"])
def test_interventions_differ_from_grpo_in_the_loss_only(name):
    changed = differing(estimator("grpo"), estimator(name), resolve=False)
    assert {key.rpartition(".")[2] for key in changed} <= {"loss_mode", "clip_ratio_low", "clip_ratio_high"}
    assert estimator(name).actor_rollout_ref.actor.policy_loss.loss_mode == f"vp_{name}"


@pytest.mark.parametrize("name", sorted(set(preset_names("estimator")) - {"dapo"}))
def test_advantage_leaves_the_response_out_of_its_baseline(name):
    """Rewards 1, 0, 0, 2 of one group: A_i = R_i - mean of the others, not divided by a standard deviation."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 2.0]).unsqueeze(-1)
    advantages_of = get_adv_estimator_fn(estimator(name).algorithm.adv_estimator)
    groups = np.array(["a"] * 4)
    advantages, _ = advantages_of(token_level_rewards=rewards, response_mask=torch.ones(4, 1), index=groups)
    torch.testing.assert_close(advantages[:, 0], torch.tensor([1 - 2 / 3, -1.0, -1.0, 2 - 1 / 3]))


@pytest.mark.parametrize("scale", [name for name in preset_names("scale") if name[0].isdigit()])
def test_gpu_scales_say_hosts_and_gpus(scale):
    config = compose_verl(f"+scale={scale}", FP16)
    hosts, gpus = scale.partition("_")[0].split("x")
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (int(hosts), int(gpus))
    assert config.trainer.device == "cuda" and config.actor_rollout_ref.ref.strategy == "fsdp2"
    address = "local" if scale == "1x1_gpu" else None if hosts == "1" else "auto"
    assert config.ray_kwargs.ray_init.get("address") == address
    kwargs = config.actor_rollout_ref.rollout.engine_kwargs.vllm
    assert kwargs.get("disable_cascade_attn", False) is ("a100" in scale)
    assert "worker_extension_cls" in kwargs, "the precision's own settings stay"
    assert not config.actor_rollout_ref.actor.fsdp_config.offload_policy
    asked = compose_verl(f"+scale={scale}", "+state_exceeds_8_gpus=True")
    assert asked.actor_rollout_ref.actor.fsdp_config.offload_policy is (hosts == "1" and scale != "1x1_gpu")


def test_one_gpu_runs_the_tiny_model_with_the_settings_of_gpus():
    one, many, cpu = (compose_verl(f"+scale={scale}", FP16) for scale in ("1x1_gpu", "1x8_h100", "cpu"))
    for key in (
        *("model.use_remove_padding", "model.enable_gradient_checkpointing", "actor.use_dynamic_bsz"),
        *("actor.use_torch_compile", "rollout.enforce_eager", "rollout.free_cache_engine", "rollout.load_format"),
    ):
        assert OmegaConf.select(one, f"actor_rollout_ref.{key}") == OmegaConf.select(many, f"actor_rollout_ref.{key}")
    assert one.data == cpu.data and one.actor_rollout_ref.model.path == cpu.actor_rollout_ref.model.path
    assert one.actor_rollout_ref.model.override_config.attn_implementation == "sdpa"
    assert "env_vars" not in (one.ray_kwargs.ray_init.get("runtime_env") or {})
    rough = compose_verl("+scale=1x1_gpu", FP16, "+tiny_architecture=qwen3_rough")
    assert "qwen3_rough" in rough.actor_rollout_ref.model.path


def test_two_cpu_nodes_are_scale_cpu_in_a_cluster():
    one, two = compose_verl("+scale=cpu"), compose_verl("+scale=cpu_2nodes")
    hydra = compose_verl("+scale=cpu", return_hydra_config=True).hydra
    assert (two.trainer.nnodes, two.trainer.n_gpus_per_node) == (2, 1)
    ray = two.ray_kwargs.ray_init
    assert (ray.address, ray.num_cpus, ray.num_gpus) == ("auto", None, None), "a running cluster has its own numbers"
    assert ray.runtime_env.env_vars == one.ray_kwargs.ray_init.runtime_env.env_vars
    assert ray.runtime_env.env_vars == hydra.job.env_set, "of driver and workers"
    assert ray.runtime_env.env_vars.VERL_PLATFORM == "cpu"
    two.trainer.nnodes, two.ray_kwargs = 1, one.ray_kwargs
    assert one == two


def test_search_path_is_registered_once():
    register_search_path(None)
    names = [plugin.__name__ for plugin in Plugins.instance().discover(SearchPathPlugin)]
    assert names.count("VerlPrecisionSearchPath") == 1
