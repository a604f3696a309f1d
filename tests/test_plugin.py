"""verl loads the plugin by itself, once, loudly, and changes nothing for a user who chooses no preset."""

import inspect
import json
import re

import pytest

from verl_precision.errors import RegistrationError

LOADED = re.compile(r"INFO.*verl_precision \S+ loaded into verl \S+: .*platform cpu")

SHOW = """
import json, sys
{before}
import verl
from verl.plugin.platform import PlatformRegistry
plugin = sys.modules["verl_precision.plugin"]
print(json.dumps([PlatformRegistry.get("cpu").__module__, list(plugin.registered())]))
"""


def test_import_verl_alone_registers_and_says_so_once(run_python):
    done = run_python(SHOW.format(before=""))
    assert done.returncode == 0, done.stderr
    module, registered = json.loads(done.stdout)
    assert module == "verl_precision.integration.cpu.platform"
    assert "platform cpu" in registered
    assert len(LOADED.findall(done.stderr)) == 1, done.stderr


@pytest.mark.parametrize(
    "before",
    [
        "import verl_precision.plugin",
        "import verl, importlib, verl_precision.plugin; importlib.reload(verl_precision.plugin)",
        "import verl.workers.engine.fsdp.transformer_impl, verl.utils.distributed",
    ],
    ids=["plugin first", "reloaded", "host modules already there"],
)
def test_any_order_and_twice_is_once(run_python, before):
    count = """
import verl.utils.distributed, wrapt
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.base import EngineRegistry
assert EngineRegistry._engines["language_model"]["fsdp2"][("cpu", "cpu")].__name__ == "FSDPEngineWithLMHeadOnCPU"
wrapped = verl.utils.distributed.initialize_global_process_group_ray
assert isinstance(wrapped, wrapt.FunctionWrapper) and not isinstance(wrapped.__wrapped__, wrapt.FunctionWrapper)
"""
    done = run_python(SHOW.format(before=before) + count)
    assert done.returncode == 0, done.stderr


def test_external_modules_route_and_entry_point_together_register_once(run_python):
    done = run_python(SHOW.format(before=""), VERL_USE_EXTERNAL_MODULES="verl_precision.plugin")
    assert done.returncode == 0, done.stderr
    assert len(LOADED.findall(done.stderr)) == 1


def test_untested_verl_is_refused_loudly_with_the_range(run_python):
    done = run_python(
        "import verl_precision.versions as v; from packaging.specifiers import SpecifierSet\n"
        "v.TESTED['verl'] = SpecifierSet('>=0.1,<0.2')\n"
        "import verl\n"
    )
    assert done.returncode == 0, "verl itself goes on without the plugin"
    assert "ERROR" in done.stderr and "verl runs WITHOUT it" in done.stderr
    assert "Traceback" in done.stderr
    assert "<0.2" in done.stderr and "VERL_USE_EXTERNAL_PLUGINS=none" in done.stderr


def test_platform_name_of_another_package_is_refused_not_overwritten(run_python, tmp_path):
    (tmp_path / "stranger.py").write_text(
        "from verl.plugin.platform import PlatformRegistry\n"
        "from verl.plugin.platform.platform_cuda import PlatformCUDA\n"
        "@PlatformRegistry.register(platform='cpu')\n"
        "class Stranger(PlatformCUDA): pass\n"
    )
    done = run_python(
        "import verl\nfrom verl.plugin.platform import PlatformRegistry\nprint(PlatformRegistry.get('cpu').__name__)",
        VERL_USE_EXTERNAL_MODULES="stranger",
        PYTHONPATH=str(tmp_path),
    )
    assert done.stdout.strip() == "Stranger"
    assert "already registered by stranger.Stranger" in done.stderr and "ERROR" in done.stderr


def test_engine_key_of_another_package_is_refused(monkeypatch):
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp import transformer_impl

    from verl_precision.integration.cpu.fsdp_engine import KEY, register_engines

    class Stranger(transformer_impl.FSDPEngineWithLMHead):
        pass

    monkeypatch.setitem(EngineRegistry._engines["language_model"]["fsdp2"], KEY, Stranger)
    with pytest.raises(RegistrationError, match="already registered by .*Stranger"):
        register_engines(transformer_impl)


WITHOUT_PRESET = """
import json, verl
from verl.plugin.platform import get_platform
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils import distributed
from verl.workers.engine import EngineRegistry

def name(thing): return f"{thing.__module__}.{thing.__qualname__}"

print(json.dumps({
    "platform": name(type(get_platform())),
    "losses": {key: name(value) for key, value in core_algos.POLICY_LOSS_REGISTRY.items()
               if type(value).__module__ == "builtins"},  # ours are added under names of their own
    # ours or verl's: verl's classes that define what the engine does, in the order in which they are asked
    "engines": {f"{m} {b}": [name(c) for c in EngineRegistry.get_engine_cls(m, b).__mro__
                             if not c.__module__.startswith("verl_precision.")]
                for m in ("language_model", "value_model") for b in ("fsdp", "fsdp2")},
    "trainers": {m: name(get_trainer_cls(m)) for m in ("sync", "colocate_async", "separate_async")},
    "process group": [distributed.initialize_global_process_group_ray.__name__,
                      str(__import__("inspect").signature(distributed.initialize_global_process_group_ray))],
}))
"""


def test_without_preset_verl_chooses_what_it_chose_without_us(run_python):
    """Platform, losses and trainers are verl's own, with the plugin as without it; engines on CUDA subclass verl's.

    That such an engine runs verl's code unless its config is ours: the next test, and bit for bit on real ranks
    `tests/engine/test_ranks.py::test_without_our_config_the_engine_is_verls_bit_for_bit`.
    """
    cuda = {"VERL_ENGINE_DEVICE": "cuda", "VERL_ENGINE_VENDOR": "nvidia"}
    ours = run_python(WITHOUT_PRESET, **cuda)
    theirs = run_python(WITHOUT_PRESET, VERL_USE_EXTERNAL_PLUGINS="none", **cuda)
    assert ours.returncode == theirs.returncode == 0, ours.stderr + theirs.stderr
    assert json.loads(ours.stdout) == json.loads(theirs.stdout)


@pytest.mark.parametrize("backend", ["fsdp", "fsdp2"])
@pytest.mark.parametrize("model_type", ["language_model", "value_model"])
def test_every_override_of_an_engine_is_verls_method_without_our_config(monkeypatch, model_type, backend):
    """Each method our engines define passes its arguments to verl's, once, and returns what verl returns."""
    from unittest.mock import MagicMock, patch

    from verl.workers.config import FSDPEngineConfig
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp import transformer_impl

    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "nvidia")
    engine_cls = EngineRegistry.get_engine_cls(model_type, backend)
    verls = {"language_model": "FSDPEngineWithLMHead", "value_model": "FSDPEngineWithValueHead"}[model_type]
    position = engine_cls.__mro__.index(getattr(transformer_impl, verls))
    ours, theirs = engine_cls.__mro__[:position], engine_cls.__mro__[position:]
    overridden = {key for c in ours for key, value in vars(c).items() if callable(value)} & set(dir(theirs[0]))
    overridden -= set(dir(object))
    expected = {"_build_fsdp_module", "train_batch", "optimizer_step", "lr_scheduler_step"}
    expected |= {"save_checkpoint", "load_checkpoint", "forward_step"}
    if model_type == "language_model":
        expected |= {"prepare_model_outputs", "to", "disable_adapter"}
        expected |= {"get_per_tensor_param", "_merged_lora_per_tensor_param"}
    assert overridden == expected
    engine = object.__new__(engine_cls)
    engine.engine_config = FSDPEngineConfig(mixed_precision={"param_dtype": "fp16"})
    for method in sorted(overridden):
        owner = next(c for c in theirs if method in vars(c))
        arity = len(inspect.signature(vars(owner)[method]).parameters) - 1
        arguments = [MagicMock() for _ in range(min(arity, 4))]
        with patch.object(owner, method, return_value=object()) as verl_method:
            result = getattr(engine, method)(*arguments)
        verl_method.assert_called_once_with(*arguments)
        assert result is verl_method.return_value or method.endswith("_checkpoint"), method
        assert set(vars(engine)) == {"engine_config"}, f"{method} left state behind"


def test_import_stays_light(run_python):
    """The plugin adds no heavy module to `import verl`."""
    script = "import sys, verl, json; print(json.dumps(sorted(sys.modules)))"
    ours = set(json.loads(run_python(script).stdout))
    theirs = set(json.loads(run_python(script, VERL_USE_EXTERNAL_PLUGINS="none").stdout))
    added = {name.partition(".")[0] for name in ours - theirs}
    assert "verl_precision" in added
    assert not added & {"vllm", "hydra", "matplotlib", "torchvision", "typer", "flash_attn"}
    assert not {name for name in ours - theirs if name.startswith("verl.")}, "no verl module is imported early"


def test_messages_are_heard_once_even_where_root_shows_errors_only(run_python):
    """verl's workers end up with a root handler at level ERROR."""
    script = """
import logging, verl
log = logging.getLogger("verl_precision.engine")
log.warning("first")
for handler in logging.root.handlers:
    handler.setLevel(logging.ERROR)
log.info("second"); log.error("third")
"""
    lines = run_python(script).stderr.splitlines()
    for message in ("first", "second", "third"):
        assert sum(line.endswith(f":{message}") for line in lines) == 1, lines
