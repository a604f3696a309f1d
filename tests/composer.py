"""The one composer of configs for all tests.

A composition costs half a second, a third of it to read the same forty YAML files again. So each text and each
interpolation is parsed once in a process, each choice of groups is composed once, and settings are put on top of a
copy, by Hydra's own function. Every caller gets a copy that it may change, unpickled: seven times faster.
"""

import functools
import pickle
import types
from pathlib import Path

import omegaconf.base
import omegaconf.omegaconf
import verl  # noqa: F401 - loads the plugin, and with it search path and resolvers
import yaml
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf._utils import get_yaml_loader

from verl_precision.base.verl_config import leaves

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*/*.yaml") if path.parent.name != "launch")
# Their task is a tiny model's: nothing of it belongs on a GPU.
CPU_ONLY = tuple(
    "quickstart sanity_arithmetic phantom_clipping collapse reasoning_length tied_head distillation".split()
)
# A task of this project with a pre-trained model, on a CPU and on a GPU.
PRE_TRAINED = ("smollm2", "long_text")
PAPER = [path for path in RECIPES if path.stem not in (*CPU_ONLY, *PRE_TRAINED)]


@functools.cache
def _parsed(text: str):
    return yaml.load(text, Loader=get_yaml_loader())


def _parse(stream, Loader):
    """`yaml.load` as OmegaConf calls it, always with the same loader; it copies what it gets into nodes of its own."""
    return _parsed(stream if isinstance(stream, str) else stream.read())


# The tree of an interpolation is only ever read.
omegaconf.base.parse = functools.cache(omegaconf.base.parse)
omegaconf.omegaconf.yaml = types.SimpleNamespace(**{**vars(yaml), "load": _parse})


def _load_once(source, config_path: str):
    """`load_config` of a package's file, which no test changes."""
    key = source.provider, source.path, config_path
    if key not in _LOADED:
        _LOADED[key] = pickle.dumps(_load_config(source, config_path))
    return pickle.loads(_LOADED[key])


_LOADED: dict[tuple[str, str, str], bytes] = {}
_load_config = ImportlibResourcesConfigSource.load_config
ImportlibResourcesConfigSource.load_config = _load_once


def _list_once(**asked):
    """`create_defaults_list`; once for files that no test changes, since a check asks again for a composition's."""
    places = tuple(dict.fromkeys(source.path for source in asked["repo"].get_sources()))
    if not all(place.startswith(_UNCHANGED) or "/" not in place for place in places):
        return _create_list(**asked)
    words = tuple(each.input_line for each in asked["overrides_list"])
    key = places, asked["config_name"], words, asked["prepend_hydra"], asked["skip_missing"]
    if key not in _LISTED:
        _LISTED[key] = _create_list(**asked)
    return _LISTED[key]


_LISTED: dict[tuple, object] = {}
_UNCHANGED = str(ROOT / "recipes")
_create_list = config_loader_impl.create_defaults_list
config_loader_impl.create_defaults_list = _list_once


def compose_verl(*overrides: str, return_hydra_config: bool = False) -> DictConfig:
    """Compose verl's own `ppo_trainer` with overrides; presets come from the plugin's search path."""
    return _loaded(_composed(None, overrides), return_hydra_config)


def compose_recipe(path: str | Path, *overrides: str, return_hydra_config: bool = False) -> DictConfig:
    """Compose a recipe, named from the repository's root, with overrides."""
    return _loaded(_composed(ROOT / path, overrides), return_hydra_config)


def compose_estimator(name: str, *overrides: str) -> DictConfig:
    """Compose verl's own config with an estimator and what verl asks for besides, resolved."""
    batch = ("actor.ppo_micro_batch_size_per_gpu=4", "rollout.log_prob_micro_batch_size_per_gpu=4", "rollout.name=vllm")
    config = compose_verl(*(f"actor_rollout_ref.{setting}" for setting in batch), f"+estimator={name}", *overrides)
    OmegaConf.resolve(config)
    return config


def actor_config(config: DictConfig, **global_batch_info: int):
    """Return verl's typed ActorConfig, as `ppo_loss` hands it to a loss."""
    from verl.utils.config import omega_conf_to_dataclass

    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    actor.global_batch_info.update(loss_scale_factor=actor.loss_scale_factor, **global_batch_info)
    return actor


def differing(one: DictConfig, other: DictConfig, resolve: bool = True) -> set[str]:
    """Return the path of every value in which two configs differ; unresolved, an interpolation is its own text."""
    each = (leaves(OmegaConf.to_container(config, resolve=resolve)) for config in (one, other))
    before, after = ({key: value for key, value in found if value != {}} for found in each)
    return {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}


@functools.cache
def _composed(recipe: Path | None, overrides: tuple[str, ...]) -> bytes:
    settings = [override for override in overrides if _is_setting(override)]
    if not settings:
        return pickle.dumps(compose_in_full(recipe, overrides))
    config = pickle.loads(_composed(recipe, tuple(each for each in overrides if each not in settings)))
    ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(settings), config)
    with open_dict(config):
        config.hydra.overrides.task = [each for each in overrides if not each.startswith("hydra.")]
    return pickle.dumps(config)


def _is_setting(override: str) -> bool:
    """Return whether an override is one of a value below the top, which no choice of a group depends on."""
    key = override.partition("=")[0]
    return "." in key and "@" not in key and not key.lstrip("+~").startswith("hydra")


def compose_in_full(recipe: Path | None, overrides: tuple[str, ...]) -> DictConfig:
    """Compose as a run does, with all overrides at once."""
    if recipe is None:
        with initialize_config_module("verl.trainer.config", version_base=None):
            return compose("ppo_trainer", overrides=[*overrides], return_hydra_config=True)
    own = OmegaConf.select(OmegaConf.load(recipe), "hydra.searchpath") or []
    folders = ",".join(["pkg://verl.trainer.config", *own, "pkg://verl_precision.presets"])
    with initialize_config_dir(str(recipe.parent), version_base=None):
        searched = [f"hydra.searchpath=[{folders}]", *overrides]
        return compose(recipe.stem, overrides=searched, return_hydra_config=True)


def _loaded(pickled: bytes, with_hydra: bool) -> DictConfig:
    config = pickle.loads(pickled)
    if not with_hydra:
        with open_dict(config):
            del config["hydra"]
    return config
