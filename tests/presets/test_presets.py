"""Every preset composes on verl's config, passes verl's own validation, and sets what its name says."""

import pytest
import yaml
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass, validate_config

from verl_precision.engine.settings import LossScaleSettings
from verl_precision.integration.engine_config import PrecisionFSDPConfig
from verl_precision.presets import PRESETS_DIR, preset_names

DTYPES = {"bf16": ("bf16", "bfloat16"), "fp16": ("fp16", "float16"), "fp32": ("fp32", "float32")}


def test_every_yaml_is_a_listed_preset_in_a_group():
    files = sorted(PRESETS_DIR.rglob("*.yaml"))
    assert files
    for path in files:
        assert path.read_text().startswith("# @package _global_\n"), path
        if path.parent.parent == PRESETS_DIR / "precision":  # the halves presets are made of
            assert path.parent.name in ("train", "rollout") and path.stem in DTYPES
            continue
        if path.parent == PRESETS_DIR / "scale" / "parts":  # what several scales share
            continue
        assert path.parent.parent == PRESETS_DIR
        assert path.stem in preset_names(path.parent.name)
        assert yaml.safe_load(path.read_text())["hydra"]["callbacks"]["verl_precision"], path


def halves(precision: str) -> tuple[str, str]:
    """fp16 -> (fp16, fp16); bf16_train_fp16_rollout -> (bf16, fp16)."""
    train, _, rollout = precision.removesuffix("_rollout").partition("_train_")
    return train, rollout or train


def test_the_promised_precisions_are_there():
    assert preset_names("precision") == sorted(
        "bf16 fp16 fp32 bf16_train_fp16_rollout bf16_train_fp32_rollout fp16_train_bf16_rollout "
        "fp32_train_bf16_rollout".split()
    )


@pytest.mark.parametrize("precision", preset_names("precision"))
def test_precision_sets_actor_ref_critic_and_rollout_together(compose_verl, precision):
    train, rollout = halves(precision)
    short, long = DTYPES[train]
    vllm = "actor_rollout_ref.rollout.name=vllm"
    config = compose_verl(f"+precision={precision}", vllm, return_hydra_config=True)
    callback = config.hydra.callbacks.verl_precision
    assert callback._target_ == "verl_precision.integration.preflight.PreflightCallback"
    arr = config.actor_rollout_ref
    for engine in (arr.actor.fsdp_config, arr.ref.fsdp_config, config.critic.fsdp):
        assert engine.mixed_precision == {"param_dtype": short, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
        assert engine.dtype == long
        assert engine.model_dtype == "fp32", "master weights"
        typed = omega_conf_to_dataclass(engine)
        assert isinstance(typed, PrecisionFSDPConfig)
        assert typed.compute_dtype == short and typed.fp32_log_probs
        assert typed.loss_scale == LossScaleSettings(), "the presets spell out the defaults"
        assert not typed.shadow.enabled and typed.shadow.dtype == DTYPES[rollout][1]
        assert typed.send_weight_manifest, "vLLM, fed by the trainer: the extension reads it"
        assert ("loss_scale" in engine) is (train == "fp16")
    assert arr.ref.fsdp_config.forward_only and not arr.actor.fsdp_config.forward_only
    assert arr.rollout.dtype == DTYPES[rollout][1]


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_verl_builds_the_typed_config_through_its_own_actor(compose_verl, strategy):
    config = compose_verl(
        "+precision=fp16",
        f"actor_rollout_ref.actor.strategy={strategy}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.actor.fsdp_config.loss_scale.initial=1024.0",
    )
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert isinstance(actor.engine, PrecisionFSDPConfig) and actor.engine.loss_scale.initial == 1024
    assert actor.engine.strategy == strategy


@pytest.mark.parametrize("precision", preset_names("precision"))
def test_nothing_else_changes(compose_verl, precision):
    """A precision preset touches the engines' dtypes, loss scale and log-probs, the weight-sync guard, and metrics."""

    def flat(config) -> dict:
        found = {}

        def walk(node, path):
            if isinstance(node, dict):
                for key, value in node.items():
                    walk(value, f"{path}.{key}")
            else:
                found[path] = node

        walk(OmegaConf.to_container(config, resolve=False), "")
        return found

    before, after = flat(compose_verl()), flat(compose_verl(f"+precision={precision}"))
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    allowed = (
        "dtype",
        "worker_extension_cls",
        "mixed_precision",
        "._target_",
        "fp32_log_probs",
        "log_prob_chunk_tokens",
        "fp32_output_head",
        "send_weight_manifest",
        "loss_scale.",
        "shadow.",
        ".mismatch.",
        ".weight_sync.canary.",
    )
    assert {key for key in changed if not any(word in key for word in allowed)} <= {
        ".actor_rollout_ref.rollout.engine_kwargs"  # verl's empty dict, now with one entry
    }


@pytest.mark.parametrize(
    ("override", "sent"),
    [
        ("name=vllm", True),
        ("name=sglang", False),
        ("checkpoint_engine.backend=nccl", False),
        ("engine_kwargs.vllm.worker_extension_cls=somebody.Else", False),
    ],
)
def test_the_manifest_is_sent_only_to_who_reads_it(compose_verl, override, sent):
    vllm = "actor_rollout_ref.rollout.name=vllm"
    config = compose_verl("+precision=fp16", vllm, f"actor_rollout_ref.rollout.{override}")
    assert config.actor_rollout_ref.actor.fsdp_config.send_weight_manifest is sent


def test_unknown_preset_lists_the_allowed(compose_verl):
    with pytest.raises(Exception, match="(?s)precision/fp61.*bf16.*fp16.*fp32"):
        compose_verl("+precision=fp61")


@pytest.mark.parametrize("precision", preset_names("precision"))
@pytest.mark.parametrize("scale", preset_names("scale"))
def test_recipe_composes_and_passes_verls_validation(compose_recipe, precision, scale):
    config = compose_recipe("recipes/quickstart/quickstart.yaml", f"precision={precision}", f"scale={scale}")
    OmegaConf.resolve(config)
    validate_config(config, use_reference_policy=False, use_critic=False)
    assert (config.trainer.device == "cpu") is scale.startswith("cpu")
    assert config.actor_rollout_ref.actor.strategy == "fsdp2"


def test_the_promised_scales_are_there():
    assert preset_names("scale") == ["1x8_a100", "1x8_h100", "2x8_h100", "8x8_h100", "cpu", "cpu_2nodes"]


@pytest.mark.parametrize("scale", [name for name in preset_names("scale") if name[0].isdigit()])
def test_gpu_scales_say_hosts_and_gpus(compose_verl, scale):
    config = compose_verl(f"+scale={scale}", "+precision=fp16")
    hosts, gpus = scale.partition("_")[0].split("x")
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (int(hosts), int(gpus))
    assert config.trainer.device == "cuda" and config.actor_rollout_ref.ref.strategy == "fsdp2"
    assert config.ray_kwargs.ray_init.get("address") == (None if hosts == "1" else "auto")
    kwargs = config.actor_rollout_ref.rollout.engine_kwargs.vllm
    assert kwargs.get("disable_cascade_attn", False) is ("a100" in scale)
    assert "worker_extension_cls" in kwargs, "the precision's own settings stay"
    assert not config.actor_rollout_ref.actor.fsdp_config.offload_policy
    asked = compose_verl(f"+scale={scale}", "+state_exceeds_8_gpus=True")
    assert asked.actor_rollout_ref.actor.fsdp_config.offload_policy is (hosts == "1")


def test_two_cpu_nodes_are_scale_cpu_in_a_cluster(compose_verl):
    one, two = compose_verl("+scale=cpu"), compose_verl("+scale=cpu_2nodes")
    assert (two.trainer.nnodes, two.trainer.n_gpus_per_node) == (2, 1)
    ray = two.ray_kwargs.ray_init
    assert (ray.address, ray.num_cpus, ray.num_gpus) == ("auto", None, None), (
        "Ray refuses numbers for a running cluster"
    )
    assert ray.runtime_env.env_vars == one.ray_kwargs.ray_init.runtime_env.env_vars
    two.trainer.nnodes, two.ray_kwargs = 1, one.ray_kwargs
    assert one == two


def test_scale_cpu_works_on_verls_own_config(compose_verl):
    config = compose_verl("+scale=cpu", "+precision=fp16", return_hydra_config=True)
    environment = config.ray_kwargs.ray_init.runtime_env.env_vars
    assert environment.VERL_PLATFORM == "cpu"
    assert config.hydra.job.env_set == environment, "driver and workers get the same environment"
    assert config.hydra.callbacks.verl_precision._target_ == "verl_precision.integration.preflight.PreflightCallback"


def test_tiny_model_resolver_builds_and_returns_a_folder(compose_verl):
    from pathlib import Path

    path = Path(compose_verl("+scale=cpu").actor_rollout_ref.model.path)
    assert (path / "config.json").is_file() and path.is_absolute()


def test_search_path_is_registered_once():
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    from verl_precision.integration.search_path import VerlPrecisionSearchPath, register_search_path

    register_search_path(None)
    assert Plugins.instance().discover(SearchPathPlugin).count(VerlPrecisionSearchPath) == 1
