"""Every preset composes on verl's config, passes verl's own validation, and sets what its name says."""

import pytest
import yaml
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass, validate_config

from verl_precision.presets import PRESETS_DIR, preset_names

DTYPES = {"bf16": ("bf16", "bfloat16"), "fp16": ("fp16", "float16"), "fp32": ("fp32", "float32")}


def test_every_yaml_is_a_listed_preset_in_a_group():
    files = sorted(PRESETS_DIR.rglob("*.yaml"))
    assert files
    for path in files:
        assert path.parent.parent == PRESETS_DIR
        assert path.stem in preset_names(path.parent.name)
        assert path.read_text().startswith("# @package _global_\n"), path
        assert yaml.safe_load(path.read_text())["hydra"]["callbacks"]["verl_precision"], path


@pytest.mark.parametrize("precision", preset_names("precision"))
def test_precision_sets_actor_ref_critic_and_rollout_together(compose_verl, precision):
    short, long = DTYPES[precision]
    config = compose_verl(f"+precision={precision}")
    arr = config.actor_rollout_ref
    for engine in (arr.actor.fsdp_config, arr.ref.fsdp_config, config.critic.fsdp):
        assert engine.mixed_precision == {"param_dtype": short, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
        assert engine.dtype == long
        assert engine.model_dtype == "fp32", "master weights"
    assert arr.rollout.dtype == long
    assert omega_conf_to_dataclass(arr.actor.fsdp_config).mixed_precision["param_dtype"] == short


@pytest.mark.parametrize("precision", preset_names("precision"))
def test_nothing_else_changes(compose_verl, precision):
    """A precision preset touches dtypes and the weight-sync extension only."""

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
    allowed = ("dtype", "worker_extension_cls", "mixed_precision")
    assert {key for key in changed if not any(word in key for word in allowed)} <= {
        ".actor_rollout_ref.rollout.engine_kwargs"  # verl's empty dict, now with one entry
    }


def test_unknown_preset_lists_the_allowed(compose_verl):
    with pytest.raises(Exception, match="(?s)precision/fp61.*bf16.*fp16.*fp32"):
        compose_verl("+precision=fp61")


@pytest.mark.parametrize("precision", preset_names("precision"))
@pytest.mark.parametrize("scale", preset_names("scale"))
def test_recipe_composes_and_passes_verls_validation(compose_recipe, precision, scale):
    config = compose_recipe("recipes/quickstart/quickstart.yaml", f"precision={precision}", f"scale={scale}")
    OmegaConf.resolve(config)
    validate_config(config, use_reference_policy=False, use_critic=False)
    assert config.trainer.device == "cpu" and config.actor_rollout_ref.actor.strategy == "fsdp2"


def test_scale_cpu_works_on_verls_own_config(compose_verl):
    config = compose_verl("+scale=cpu", "+precision=fp16", return_hydra_config=True)
    environment = config.ray_kwargs.ray_init.runtime_env.env_vars
    assert environment.VERL_PLATFORM == "cpu"
    assert config.hydra.job.env_set == environment, "driver and workers get the same environment"
    assert config.hydra.callbacks.verl_precision._target_ == "verl_precision.preflight.PreflightCallback"


def test_tiny_model_resolver_builds_and_returns_a_folder(compose_verl):
    from pathlib import Path

    path = Path(compose_verl("+scale=cpu").actor_rollout_ref.model.path)
    assert (path / "config.json").is_file() and path.is_absolute()


def test_search_path_is_registered_once():
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    from verl_precision.presets.search_path import VerlPrecisionSearchPath, register_search_path

    register_search_path(None)
    assert Plugins.instance().discover(SearchPathPlugin).count(VerlPrecisionSearchPath) == 1
