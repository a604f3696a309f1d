"""Tasks of the driver, called by `check/preflight.py`: name the run, lock its folder, receive signals."""

import os
from functools import partial
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.extensions import features_asked_for
from verl_precision.integration.rollout.weight_socket import choose_name
from verl_precision.integration.trainer.checkpoints import mend_tracker
from verl_precision.integration.trainer.run_identity import claim_folder, name_the_run
from verl_precision.integration.trainer.saving import SignalRequests, saves
from verl_precision.integration.trainer.trainers import PREFIX, measured_mode
from verl_precision.mismatch.settings import ON_ALARM


class Driver:
    """The driver of one run."""

    _requests: SignalRequests | None = None
    _choices: tuple[str, ...] = ()  # the groups that the config has a choice for

    def name(self, config: DictConfig) -> None:
        """Name the run, and have verl start the trainer that measures it; or become the driver of another run."""
        measured = measured_mode(config)
        name_the_run(config)
        self._choices = tuple(OmegaConf.select(config, "hydra.runtime.choices") or ())
        self._hand_over(config)
        if measured is not None:
            config.trainer.v1.trainer_mode = measured

    def begin(self, config: DictConfig) -> None:
        """Lock the run's folder, name the weight sockets, and receive signals."""
        claim_folder(config)
        mend_tracker(config)
        choose_name()
        if str(config.trainer.v1.trainer_mode).startswith(PREFIX):  # only these trainers read requests
            self._requests = SignalRequests(Path(config.trainer.default_local_dir), saves(config))
            self._requests.listen()

    def end(self, config: DictConfig, completed: bool) -> None:
        """End with the exit code of a run that ended on request, or start the rescue."""
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
