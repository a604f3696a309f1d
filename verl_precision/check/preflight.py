"""What the driver does before Ray or a model starts: it checks the config, names the run, and locks its folder.

Every preset installs `PreflightCallback` into Hydra, which calls it in the driver once the config is composed.
"""

import contextlib
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_precision.base.errors import ending_the_process
from verl_precision.base.extensions import features_asked_for
from verl_precision.base.other_engines import fit_to_engine
from verl_precision.check.keys import require_complete, require_overrides, unresolved
from verl_precision.check.probe import probe_environment
from verl_precision.check.rules.features import WITHOUT_PARTS
from verl_precision.check.rules.gpu_memory import OF_GPU
from verl_precision.check.rules.registry import OF_PRESETS, find_faults
from verl_precision.check.verl_refusals import mistyped
from verl_precision.check.who_decides import let_presets_win
from verl_precision.integration.rollout.weight_socket import choose_name
from verl_precision.integration.trainer.checkpoints import mend_tracker
from verl_precision.integration.trainer.run_identity import claim_folder, name_the_run
from verl_precision.integration.trainer.saving import SignalRequests, saves
from verl_precision.integration.trainer.trainers import PREFIX, measured_mode
from verl_precision.mismatch.settings import ON_ALARM

# Without this, Hydra turns an exception of a callback into a warning, and goes on.
_ends_the_start = ending_the_process("the preflight")


class PreflightCallback(Callback):
    """Hydra callback that checks the composed config of one run, and does the driver's tasks."""

    _requests: SignalRequests | None = None
    _choices: tuple[str, ...] = ()  # the groups that the config has a choice for

    @_ends_the_start
    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuse wrong words, let presets win, fit the config to its engine, and name the run.

        Have verl start the trainer that measures the run; or become the driver of another run. After this call the
        config cannot change any more. Hydra's multirun does not make this call.
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
            measured = measured_mode(config)
            name_the_run(config)
            self._choices = tuple(OmegaConf.select(config, "hydra.runtime.choices") or ())
            self._hand_over(config)
            if measured is not None:
                config.trainer.v1.trainer_mode = measured
        except OmegaConfBaseException as error:
            raise unresolved(error, "the config") from error

    @_ends_the_start
    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Set the config's platform, and apply every rule; print all errors and exit, or begin the run.

        The run begins with a lock on its folder, a name for the weight sockets, and handlers of signals.
        """
        follow_platform(config)
        if problems := find_problems(config):
            print("\n".join(f"verl_precision: {problem}" for problem in problems), file=sys.stderr)
            raise SystemExit(1)
        claim_folder(config)
        mend_tracker(config)
        choose_name()
        if str(config.trainer.v1.trainer_mode).startswith(PREFIX):  # only these trainers read requests
            self._requests = SignalRequests(Path(config.trainer.default_local_dir), saves(config))
            self._requests.listen()

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        """End with the exit code of a run that ended on request, or start the rescue.

        The error of a failed job ends the process, even if this call raises.
        """
        completed = job_return.status.name == "COMPLETED"
        with ending_the_process("the preflight") if completed else contextlib.nullcontext():
            if self._requests is not None:
                self._requests.end(completed)
                if completed:
                    self._hand_over(config)

    def _hand_over(self, config: DictConfig) -> None:
        """Let a feature replace this process: the rescue of a run goes on in its place."""
        promised = (f"{ON_ALARM}:rescue",)
        for go_on in features_asked_for("driver", partial(OmegaConf.select, config), promised):
            go_on(config, self._choices)


def follow_platform(config: DictConfig) -> None:
    """Set this process's platform by the config: verl chose one before any config existed."""
    if config.trainer.device != "cpu":
        return
    from verl.plugin.platform import get_platform, set_platform

    from verl_precision.integration.cpu.platform import PlatformCPU

    os.environ["VERL_PLATFORM"] = "cpu"
    if not isinstance(get_platform(), PlatformCPU):
        set_platform(PlatformCPU())


def find_problems(config: DictConfig) -> list[str]:
    """Apply every rule to the config and this machine; return the messages of errors that end the run.

    Unchecked facts are left out: the run itself finds them. The driver does not look for GPUs, because this would start
    CUDA in it. The GPUs may be larger than those in the scale's name, so a memory error is printed but ends no run. Of
    the warnings, those about a preset that is not fully in force are printed.
    """
    if wrong := mistyped(config):  # a rule would compute with a text
        return [str(error) for error in wrong]
    found = find_faults(config, probe_environment(config))
    for fault in found:
        if fault.name in ((OF_GPU,) if fault.severity == "error" else (*OF_PRESETS, WITHOUT_PARTS)):
            print(f"verl_precision: warning: {fault}", file=sys.stderr)
    return [str(fault) for fault in found if fault.severity == "error" and fault.name != OF_GPU]
