"""Rules of a run's schedule: nothing is trained, nothing is written, or what was written is not read again."""

import math
from collections.abc import Iterator
from pathlib import PurePosixPath

from omegaconf import DictConfig

from verl_precision.base.verl_config import lora_rank
from verl_precision.check.rules.files import names_in
from verl_precision.check.rules.rule import Environment, Fault, rule
from verl_precision.integration.trainer.saving import saves

ACTOR = "actor_rollout_ref.actor"
LONG = 20  # steps on GPUs; of fewer nobody misses a checkpoint
IN_MEMORY = ("/dev/shm", "/run")
OF_A_HOST = ("/tmp", "/var/tmp", *IN_MEMORY)
AT_LEAST_ONE = "a whole number >= 1; trainer.val_only=True only validates"


@rule("nothing-trained")
def not_updated(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Steps are made and paid for, and the weights stay as they are; or there are none, and no error."""
    trainer, optim = config.trainer, config.actor_rollout_ref.actor.optim
    clip, steps = "clip_grad" if optim.get("grad_clip") is None else "grad_clip", trainer.total_training_steps
    if not _number(optim.get(clip)) > 0:
        problem = "gradients are scaled down to this norm: 0 leaves nothing of them, null ends the first update"
        yield _correct(f"{ACTOR}.optim.{clip}", problem, "a number above 0, such as verl's 1.0")
    if lora_rank(config) and not _number(config.actor_rollout_ref.model.lora_alpha) > 0:
        problem = "the adapter's output is scaled by lora_alpha / lora_rank: it adds nothing, and has no gradient"
        yield _correct("actor_rollout_ref.model.lora_alpha", problem, "a number above 0, such as twice lora_rank")
    if trainer.get("val_only"):
        if not trainer.get("val_before_train", True):
            problem = "verl reads val_only only where it validates before training: this run trains"
            yield _correct("trainer.val_before_train", problem, "True with val_only=True")
        return
    if _number(trainer.critic_warmup) >= _number(steps):
        problem = f"the actor waits that many steps for the critic, of {steps} in all"
        yield _correct("trainer.critic_warmup", problem, f"less than {steps}")
    for key in ("total_epochs", "total_training_steps"):
        if (number := trainer.get(key)) is not None and not _number(number) >= 1:
            yield _correct(f"trainer.{key}", "the run ends before its first step, without an error", AT_LEAST_ONE)


@rule("trains-little", "warning")
def trains_little(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Runs that may be meant, and mostly are not."""
    actor, steps = config.actor_rollout_ref.actor, config.trainer.total_training_steps
    optim = actor.optim
    way, too_long = "lr_warmup_steps_ratio", _number(optim.get("lr_warmup_steps_ratio")) >= 1
    if (fixed := _number(optim.get("lr_warmup_steps"))) > 0:
        way, too_long = "lr_warmup_steps", fixed > _number(steps)
    if optim.lr == 0:
        yield _correct(f"{ACTOR}.optim.lr", "the weights stay as they are", "a number above 0")
    if too_long:
        problem = f"the warm-up outlasts the run: the rate never reaches lr={optim.lr}"
        yield _correct(f"{ACTOR}.optim.{way}", problem, "fewer steps than the run has")
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        problem = "the reference is loaded and asked, and its KL counts nothing"
        yield _correct(f"{ACTOR}.kl_loss_coef", problem, "a number above 0, or use_kl_loss=False")
    if config.actor_rollout_ref.rollout.get("ignore_eos"):
        problem = "every response goes on after its end, to the full length, and what follows is trained on"
        yield _correct("actor_rollout_ref.rollout.ignore_eos", problem, "False")


@rule("progress-not-kept", "warning")
def progress_not_kept(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Checkpoints that are not written, that lie where a restart does not find them, or that it does not read."""
    trainer, contents = config.trainer, config.actor_rollout_ref.actor.checkpoint
    steps, gpus = trainer.total_training_steps, trainer.device != "cpu"
    if not saves(config):
        if gpus and isinstance(steps, int) and steps >= LONG:
            problem = f"no checkpoint is written in {steps} steps, not even the last"
            yield _correct("trainer.save_freq", problem, "1 or more")
        return
    if trainer.get("resume_mode") == "disable":
        problem = "a run that is started again begins at step 0, and writes over its own checkpoints"
        yield _correct("trainer.resume_mode", problem, "auto")
    if trainer.get("del_local_ckpt_after_load"):
        problem = "a resumed run removes its checkpoint: if it ends before the next one, it has none"
        yield _correct("trainer.del_local_ckpt_after_load", problem, "False")
    places = OF_A_HOST if trainer.nnodes > 1 and gpus else IN_MEMORY
    if any(PurePosixPath(str(trainer.default_local_dir)).is_relative_to(place) for place in places):
        problem = "a host keeps that for itself, or in memory: after a restart, or on another host, it is gone"
        yield _correct("trainer.default_local_dir", problem, "a folder on a shared disk")
    save, load = ({str(name) for name in names_in(contents, f"{key}_contents")} for key in ("save", "load"))
    if unwritten := ", ".join(sorted(({"model"} | load) - save)):
        problem = f"no run can resume: nothing is written of {unwritten}"
        yield _correct(f"{ACTOR}.checkpoint.save_contents", problem, "at least model, and all of load_contents")
    if unread := ", ".join(sorted({"model", "optimizer", "extra"} - load)):
        problem = f"a resumed run begins without its {unread}"
        yield _correct(f"{ACTOR}.checkpoint.load_contents", problem, "the same as save_contents")


def _correct(setting: str, problem: str, allowed: str) -> Fault:
    return Fault(setting, problem, allowed, f"Correct {setting}, or leave it out.")


def _number(value: object) -> float:
    """Return a number as it is, and NaN for anything else, with which no comparison holds."""
    return value if isinstance(value, int | float) else math.nan
