"""What we rely on in verl and vLLM, by symbol. A failure here reads "verl changed X", before a user meets it."""

import importlib
import inspect
from pathlib import Path

import pytest

from verl_precision.errors import RegistrationError
from verl_precision.integration.ledger import LEDGER, LedgerEntry, require_expected_signature
from verl_precision.plugin import REGISTRATIONS
from verl_precision.versions import installed_vllm, loads_adapters


@pytest.mark.parametrize("entry", LEDGER, ids=lambda entry: entry.name)
def test_ledger_symbol_looks_as_tested(entry: LedgerEntry):
    require_expected_signature(entry, importlib.import_module(entry.module))
    for text in (entry.why, entry.how, entry.upstream, entry.until):
        assert text
    assert entry.kind in ("patched", "overridden", "used", "relied on")


def test_ledger_refuses_a_symbol_that_changed():
    entry = LedgerEntry("json", "dumps", ("other",), "used", "a test", "-", "-", "-")
    with pytest.raises(RegistrationError, match=r"json\.dumps takes .*the tested releases take \('other',\)"):
        require_expected_signature(entry, importlib.import_module("json"))
    gone = LedgerEntry("json", "nothing.here", (), "used", "a test", "-", "-", "-")
    with pytest.raises(RegistrationError, match="does not exist"):
        require_expected_signature(gone, importlib.import_module("json"))


@pytest.mark.parametrize(
    ("name", "form", "message"),
    [
        ("JSONDecoder", dict, "JSONDecoder is of type type; in the tested releases it is a dict"),
        ("JSONDecoder.nothing", None, "JSONDecoder.nothing does not exist"),
        ("nothing", dict, "nothing does not exist"),
        ("__all__", ("self",), "__all__ does not exist"),
    ],
)
def test_ledger_refuses_what_is_not_callable_and_changed(name, form, message):
    for entry_name, entry_form in (("JSONDecoder", type), ("JSONDecoder.object_hook", None), ("__all__", list)):
        entry = LedgerEntry("json", entry_name, entry_form, "used", "a test", "-", "-", "-")
        require_expected_signature(entry, importlib.import_module("json"))
    with pytest.raises(RegistrationError, match=message):
        changed = LedgerEntry("json", name, form, "used", "a test", "-", "-", "-")
        require_expected_signature(changed, importlib.import_module("json"))


def test_verl_loads_adapters_into_this_vllm_or_the_check_refuses_them():
    """verl asks vLLM >= 0.25 for the method that 0.29 renamed; older releases are not asked."""
    from verl.utils.vllm.utils import VLLMHijack, is_version_ge
    from vllm.model_executor.models.utils import WeightsMapper

    vllm = installed_vllm()
    assert "get_unstacked_mapper" in inspect.getsource(VLLMHijack), "verl changed: it loads adapters in another way"
    has_it = hasattr(WeightsMapper, "get_unstacked_mapper")
    assert loads_adapters(vllm) == (has_it or not is_version_ge(minver="0.25.0")), f"vLLM {vllm}"


@pytest.mark.parametrize("registration", REGISTRATIONS, ids=lambda r: r.what)
def test_registration_points_at_real_modules(registration):
    importlib.import_module(registration.host_module)
    module, _, function = registration.function.partition(":")
    module = f"verl_precision.integration.{module}"
    assert callable(getattr(importlib.import_module(module), function))


def test_verl_loads_entry_points_and_swallows_their_errors():
    """Why the plugin logs at ERROR by itself."""
    import verl

    source = Path(verl.__file__).read_text()
    assert 'group="verl.plugins"' in source and "Failed to load plugin" in source


def test_engine_registry_takes_device_and_vendor():
    from verl.workers.engine.base import EngineRegistry

    assert list(inspect.signature(EngineRegistry.register).parameters) == ["model_type", "backend", "device", "vendor"]


def test_worker_extension_can_be_chosen_by_engine_kwargs():
    """verl's own value comes first in the arguments of vLLM, the user's engine_kwargs after it."""
    from verl.workers.rollout.vllm_rollout import vllm_async_server

    source = inspect.getsource(vllm_async_server)
    assert source.index('"worker_extension_cls": self._get_worker_extension_cls()') < source.index("**engine_kwargs,")


def test_trainer_reads_and_writes_the_fields_that_we_read():
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, PPOTrainer

    assert {"sync", "colocate_async", "separate_async"} <= TRAINER_REGISTRY.keys()
    source = inspect.getsource(PPOTrainer._compute_advantage)
    assert '"rollout_log_probs"' in source and '"old_log_probs"' in source


def test_hydra_swallows_exceptions_of_callbacks():
    """Why the preflight ends the process with SystemExit."""
    from hydra._internal.callbacks import Callbacks

    assert "except Exception" in inspect.getsource(Callbacks._notify)


def test_file_logger_reads_its_path_from_the_environment():
    from verl.utils.tracking import FileLogger

    assert "VERL_FILE_LOGGER_PATH" in inspect.getsource(FileLogger)
