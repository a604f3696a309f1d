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

# Hydra turns an exception of a callback into a warning, and goes on.
_ends_the_start = ending_the_process("the preflight")


class PreflightCallback(Callback):
    """Hydra callback that checks the composed config, and has the driver act at Hydra's moments."""

    def __init__(self) -> None:
        """Begin with a driver that has done nothing yet."""
        self._driver = Driver()

    @_ends_the_start
    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuse words, let presets win, fit the config to its engine, and name the run.

        The last moment at which the config that verl will get can change; Hydra's multirun has none.
        """
        try:
            require_overrides(list(OmegaConf.select(config, "hydra.overrides.task") or ()))
            require_complete(config)
            for each in let_presets_win(config):
                said = f"{each.word} is replaced by {each.wanted}, of {each.preset}"
                print(f"verl_precision: presets=win: {said}", file=sys.stderr)
            if wrong := mistyped(config):  # resolvers and rules would compute with the text
                raise wrong[0]
            fit_to_engine(config)
            self._driver.name(config)
        except OmegaConfBaseException as error:
            raise unresolved(error, "the config") from error

    @_ends_the_start
    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Follow the config's platform, ask every rule, and begin; end with the messages of all errors."""
        follow_platform(config)
        if problems := find_problems(config):
            print("\n".join(f"verl_precision: {problem}" for problem in problems), file=sys.stderr)
            raise SystemExit(1)
        self._driver.begin(config)

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        """Leave nothing behind; the error of a job that failed ends the process, whatever is raised here."""
        if job_return.status.name == "COMPLETED":
            with ending_the_process("the preflight"):
                self._driver.end(config, completed=True)
        else:
            self._driver.end(config, completed=False)


def find_problems(config: DictConfig) -> list[str]:
    """Ask every rule about the config and this machine; return the messages of what would not work.

    What could not be looked at is not said: the run itself is about to. The driver does not ask for GPUs, which would
    start CUDA in it, and they may be larger than those a scale is named after: what exceeds these is said, not refused.
    Of warnings, those about a preset that is not wholly in force are said.
    """
    if wrong := mistyped(config):  # a rule would compute with the text
        return [str(error) for error in wrong]
    found = find_faults(config, probe_environment(config))
    errors = [fault for fault in found if fault.severity == "error"]
    for fault in found:
        if fault.name in ((OF_GPU,) if fault.severity == "error" else (*OF_PRESETS, WITHOUT_PARTS)):
            print(f"verl_precision: warning: {fault}", file=sys.stderr)
    return [str(fault) for fault in errors if fault.name != OF_GPU]
