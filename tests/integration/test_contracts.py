"""How verl, vLLM and Hydra behave where this package relies on it; the ledger holds the symbols by themselves."""

import inspect
from pathlib import Path

from verl_precision.base.versions import installed_vllm, loads_adapters


def test_verl_loads_adapters_into_this_vllm_or_the_check_refuses_them():
    """verl asks vLLM >= 0.25 for the method that 0.29 renamed; older releases are not asked."""
    from verl.utils.vllm.utils import VLLMHijack, is_version_ge
    from vllm.model_executor.models.utils import WeightsMapper

    vllm = installed_vllm()
    assert "get_unstacked_mapper" in inspect.getsource(VLLMHijack), "verl changed: it loads adapters in another way"
    has_it = hasattr(WeightsMapper, "get_unstacked_mapper")
    assert loads_adapters(vllm) == (has_it or not is_version_ge(minver="0.25.0")), f"vLLM {vllm}"


def test_verl_loads_entry_points_and_swallows_their_errors():
    """Why the plugin logs at ERROR by itself."""
    import verl

    source = Path(verl.__file__).read_text()
    assert 'group="verl.plugins"' in source and "Failed to load plugin" in source


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
