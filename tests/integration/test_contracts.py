"""How verl, vLLM and Hydra behave where this package relies on it; the ledger holds the symbols by themselves."""

import inspect
import pkgutil

import pytest

from verl_precision.base.versions import installed_vllm, loads_adapters


def test_verl_loads_adapters_into_this_vllm_or_the_check_refuses_them():
    """verl asks vLLM >= 0.25 for the method that 0.29 renamed; older releases are not asked."""
    from verl.utils.vllm.utils import VLLMHijack, is_version_ge
    from vllm.model_executor.models.utils import WeightsMapper

    vllm = installed_vllm()
    assert "get_unstacked_mapper" in inspect.getsource(VLLMHijack), "verl changed: it loads adapters in another way"
    has_it = hasattr(WeightsMapper, "get_unstacked_mapper")
    assert loads_adapters(vllm) == (has_it or not is_version_ge(minver="0.25.0")), f"vLLM {vllm}"


@pytest.mark.parametrize(("symbol", "words"), [
    ("verl", ('group="verl.plugins"', "Failed to load plugin")),  # an error is swallowed: why the plugin logs at ERROR
    ("hydra._internal.callbacks:Callbacks._notify", ("except Exception",)),  # why the preflight ends with SystemExit
    ("verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_advantage", ('"rollout_log_probs"', '"old_log_probs"')),
])  # fmt: skip
def test_source_of_a_host_has_the_words(symbol, words):
    source = inspect.getsource(pkgutil.resolve_name(symbol))
    assert all(word in source for word in words)


def test_worker_extension_can_be_chosen_by_engine_kwargs():
    """verl's own value comes first in the arguments of vLLM, the user's engine_kwargs after it."""
    source = inspect.getsource(pkgutil.resolve_name("verl.workers.rollout.vllm_rollout.vllm_async_server"))
    assert source.index('"worker_extension_cls": self._get_worker_extension_cls()') < source.index("**engine_kwargs,")
