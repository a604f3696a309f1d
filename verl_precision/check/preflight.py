"""Checks before Ray or a model starts.

Every preset installs `PreflightCallback` into Hydra, which calls it in the driver once the config is composed.
"""

import sys
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_precision.base.errors import ending_the_process
from verl_precision.base.other_engines import fit_to_engine
from verl_precision.check.keys import require_complete, require_overrides, unresolved
from verl_precision.check.probe import probe_environment
from verl_precision.check.rules.features import WITHOUT_PARTS
from verl_precision.check.rules.gpu_memory import OF_GPU
from verl_precision.check.rules.registry import OF_PRESETS, find_faults
from verl_precision.check.verl_refusals import mistyped
from verl_precision.check.who_decides import let_presets_win
from verl_precision.integration.trainer.driver import Driver, follow_platform

# Without this, Hydra turns an exception of a callback into a warning, and goes on.
_ends_the_start = ending_the_process("the preflight")


class PreflightCallback(Callback):
    """Hydra callback that checks the composed config, and calls the driver's tasks."""

    def __init__(self) -> None:
        """Begin with a driver that has done nothing yet."""
        self._driver = Driver()

    @_ends_the_start
    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuse wrong words, let presets win, fit the config to its engine, and name the run.

        After this call the config cannot change any more. Hydra's multirun does not make this call.
        """
        try:
            require_overrides(list(OmegaConf.select(config, "hydra.overrides.task") or ()))
            require_complete(config)
            for each in let_presets_win(config):
                said = f"{each.word} is replaced by {each.wanted}, of {each.preset}"
                print(f"verl_precision: presets=win: {said}", file=sys.stderr)
            if wrong := mistyped(config):  # resolvers and rules would compute with a text
                raise wrong[0]
            fit_to_engine(config)
            self._driver.name(config)
        except OmegaConfBaseException as error:
            raise unresolved(error, "the config") from error

    @_ends_the_start
    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Set the config's platform, apply every rule, and begin the run; or print all errors and exit."""
        follow_platform(config)
        if problems := find_problems(config):
            print("\n".join(f"verl_precision: {problem}" for problem in problems), file=sys.stderr)
            raise SystemExit(1)
        self._driver.begin(config)

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        """End the driver's tasks; the error of a failed job ends the process, even if these tasks raise."""
        if job_return.status.name == "COMPLETED":
            with ending_the_process("the preflight"):
                self._driver.end(config, completed=True)
        else:
            self._driver.end(config, completed=False)


def find_problems(config: DictConfig) -> list[str]:
    """Apply every rule to the config and this machine; return the messages of errors that end the run.

    Unchecked facts are left out: the run itself finds them. The driver does not look for GPUs, because this would start
    CUDA in it. The GPUs may be larger than those in the scale's name, so a memory error is printed but ends no run. Of
    the warnings, those about a preset that is not fully in force are printed.
    """
    if wrong := mistyped(config):  # a rule would compute with a text
        return [str(error) for error in wrong]
    found = find_faults(config, probe_environment(config))
    errors = [fault for fault in found if fault.severity == "error"]
    for fault in found:
        if fault.name in ((OF_GPU,) if fault.severity == "error" else (*OF_PRESETS, WITHOUT_PARTS)):
            print(f"verl_precision: warning: {fault}", file=sys.stderr)
    return [str(fault) for fault in errors if fault.name != OF_GPU]
