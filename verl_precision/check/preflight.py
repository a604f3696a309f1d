"""What can be known to fail, said before Ray or a model starts.

Every preset installs `PreflightCallback` into Hydra, which calls it in the driver once the config is composed. A
problem ends the process with its message and exit code 1: setting, value got, what is allowed, what to do.
"""

import os
import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_precision.base.errors import ending_the_process
from verl_precision.base.other_engines import fit_to_engine
from verl_precision.check.composition import require_complete, require_overrides, unresolved
from verl_precision.check.probe import probe_environment
from verl_precision.check.rules.mains import WITHOUT_PARTS
from verl_precision.check.rules.memory import GPU_RULES
from verl_precision.check.rules.presets import OF_PRESETS
from verl_precision.check.rules.registry import find_faults
from verl_precision.check.verl_refusals import mistyped
from verl_precision.check.winning_words import let_presets_win
from verl_precision.integration.rollout.weight_socket import choose_name
from verl_precision.integration.trainer.found_checkpoints import mend_tracker
from verl_precision.integration.trainer.run_identity import claim_folder, name_the_run
from verl_precision.integration.trainer.saving import SignalRequests, saves
from verl_precision.integration.trainer.trainers import PREFIX, measured_mode
from verl_precision.tools.actions import rescue

# Hydra turns an exception of a callback into a warning, and goes on.
_ends_the_start = ending_the_process("the preflight")


class PreflightCallback(Callback):
    """Hydra callback that prepares the driver and checks the composed config."""

    _requests: SignalRequests | None = None
    _presets: tuple[str, ...] = ()  # the groups that the config has a choice for

    @_ends_the_start
    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Have verl start the trainer that measures the mismatch, unless `mismatch.enabled` is False; name the run.

        The last moment at which the config that verl will get can change. Hydra's multirun has no such moment: there,
        `trainer.v1.trainer_mode=vp_sync` says it, and a run's name has no digest.
        """
        try:
            require_overrides(list(OmegaConf.select(config, "hydra.overrides.task") or ()))
            require_complete(config)
            for replaced in let_presets_win(config):
                print(f"verl_precision: presets=win: {replaced}", file=sys.stderr)
            if wrong := mistyped(config):  # resolvers and rules would compute with the text
                raise wrong[0]
            for note in fit_to_engine(config):
                print(f"verl_precision: warning: {note}", file=sys.stderr)
            measured = measured_mode(config)
            name_the_run(config)
            self._presets = tuple(OmegaConf.select(config, "hydra.runtime.choices") or ())
            if (found := rescue.of_run(config)) is not None:
                rescue.become(config, found, self._presets)
        except OmegaConfBaseException as error:
            raise unresolved(error, "the config") from error
        if measured is not None:
            config.trainer.v1.trainer_mode = measured

    @_ends_the_start
    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Follow the config's platform, ask every rule, own the run's folder, name the weight sockets, hear signals.

        Raises:
            SystemExit: With the messages of all errors.
        """
        follow_platform(config)
        if problems := find_problems(config):
            print("\n".join(f"verl_precision: {problem}" for problem in problems), file=sys.stderr)
            raise SystemExit(1)
        claim_folder(config)
        mend_tracker(config)
        choose_name()
        if str(config.trainer.v1.trainer_mode).startswith(PREFIX):  # the trainers that answer
            self._requests = SignalRequests(Path(config.trainer.default_local_dir), saves(config))
            self._requests.listen()

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        """End with the exit code of a run that was asked to end, if that is why it has ended; go on with its rescue."""
        if self._requests is None:
            return
        if job_return.status.name == "COMPLETED":
            self._end_well(config, self._requests)
        else:  # the job's own error ends the process, whatever is raised here
            self._requests.end(completed=False)

    @_ends_the_start
    def _end_well(self, config: DictConfig, requests: SignalRequests) -> None:
        requests.end(completed=True)
        if (found := rescue.of_run(config)) is not None:
            import ray

            ray.shutdown()
            rescue.become(config, found, self._presets)


def follow_platform(config: DictConfig) -> None:
    """Make verl's platform in this process the one the config asks for.

    Importing `verl.trainer.main_ppo` resolves verl's platform before any config exists: without accelerator, `nvidia`.
    """
    if config.trainer.device != "cpu":
        return
    from verl.plugin.platform import get_platform, set_platform

    from verl_precision.integration.cpu.platform import PlatformCPU

    os.environ["VERL_PLATFORM"] = "cpu"
    if not isinstance(get_platform(), PlatformCPU):
        set_platform(PlatformCPU())


def find_problems(config: DictConfig) -> list[str]:
    """Ask every rule about the config and this machine; return the messages of what would not work.

    What could not be looked at is not said: the run itself is about to. The driver does not ask for GPUs, which would
    start CUDA in it: only warnings depend on them. The memory of the GPU that a scale is named after is not always that
    of the GPU that is there, so what exceeds it is said and not refused. Of warnings, those about a preset that is not
    wholly in force are said.
    """
    if wrong := mistyped(config):  # a rule would compute with the text
        return [str(error) for error in wrong]
    found = find_faults(config, probe_environment(config))
    errors = [fault for fault in found if fault.severity == "error"]
    for fault in found:
        if fault.name in (GPU_RULES if fault.severity == "error" else (*OF_PRESETS, WITHOUT_PARTS)):
            print(f"verl_precision: warning: {fault}", file=sys.stderr)
    return [str(fault) for fault in errors if fault.name not in GPU_RULES]
