"""Rules of a run's progress: nothing is trained, nothing is written, or what was written is not read again."""

import math
from pathlib import PurePosixPath

from omegaconf import DictConfig

from verl_precision.base.verl_config import engines, lora_rank
from verl_precision.check.rules.files import names_in
from verl_precision.check.rules.rule import Environment, Faults, rule, told_where
from verl_precision.integration.trainer.saving import every_minutes, saves

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
LONG = 20  # steps on GPUs; of fewer nobody misses a checkpoint
IN_MEMORY = ("/dev/shm", "/run")
OF_A_HOST = ("/tmp", "/var/tmp", *IN_MEMORY)


@rule("nothing-trained")
def not_updated(config: DictConfig, environment: Environment) -> Faults:
    """Steps are made and paid for, and the weights stay as they are."""
    trainer, optim, rank = config.trainer, config.actor_rollout_ref.actor.optim, lora_rank(config)
    clip = "clip_grad" if optim.get("grad_clip") is None else "grad_clip"
    steps, alpha = trainer.total_training_steps, config.actor_rollout_ref.model.lora_alpha
    validates, never = trainer.get("val_only"), _number(trainer.critic_warmup) >= _number(steps)
    counts = {f"total_{unit}": trainer.get(f"total_{unit}") for unit in ("epochs", "training_steps")}
    wrong = {
        "clip": not _number(optim.get(clip)) > 0,
        "alpha": rank and not _number(alpha) > 0,
        "warm-up": never and not validates,
        "validation": validates and not trainer.get("val_before_train", True),
    }
    wrong |= {key: number is not None and not _number(number) >= 1 and not validates for key, number in counts.items()}
    yield from told_where("nothing-trained", wrong, clip=clip, twice=2 * rank, steps=steps)


@rule("trains-little", "warning")
def trains_little(config: DictConfig, environment: Environment) -> Faults:
    """Runs that may be meant, and mostly are not."""
    trainer, actor, rollout = config.trainer, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    steps, optim = trainer.total_training_steps, actor.optim
    way, too_long = "lr_warmup_steps_ratio", _number(optim.get("lr_warmup_steps_ratio")) >= 1
    if (fixed := _number(optim.get("lr_warmup_steps"))) > 0:
        way, too_long = "lr_warmup_steps", fixed > _number(steps)
    waits = _number(trainer.critic_warmup) > 0 and all(engine.role != "critic" for engine in engines(config))
    wrong = {
        "rate": optim.lr == 0,
        "warm-up": too_long,
        "critic": waits,
        "kl": actor.use_kl_loss and actor.kl_loss_coef == 0,
        "eos": rollout.get("ignore_eos"),
    }
    yield from told_where("trains-little", wrong, way=way, optim=optim)


@rule("progress-not-kept", "warning")
def progress_not_kept(config: DictConfig, environment: Environment) -> Faults:
    """Checkpoints that are not written, that lie where a restart does not find them, or that it does not read."""
    trainer, contents = config.trainer, config.actor_rollout_ref.actor.checkpoint
    steps, kept, gpus = trainer.total_training_steps, saves(config), trainer.device != "cpu"
    long, folder = gpus and isinstance(steps, int) and steps >= LONG, PurePosixPath(str(trainer.default_local_dir))
    places = OF_A_HOST if trainer.nnodes > 1 and gpus else IN_MEMORY
    save, load = ({str(name) for name in names_in(contents, f"{key}_contents")} for key in ("save", "load"))
    unwritten, unread = sorted(({"model"} | load) - save), sorted({"model", "optimizer", "extra"} - load)
    wrong = {
        "never": long and not kept,
        "last": long and kept and trainer.save_freq >= steps and not every_minutes(config),
        "restart": kept and trainer.get("resume_mode") == "disable",
        "removed": kept and trainer.get("del_local_ckpt_after_load"),
        "lost": kept and any(folder.is_relative_to(place) for place in places),
        "unwritten": kept and unwritten,
        "unread": kept and unread,
        "metrics": names_in(config, "trainer.logger") in ([], [None]),
    }
    said = {"unwritten": ", ".join(unwritten), "unread": ", ".join(unread)}
    yield from told_where("progress-not-kept", wrong, steps=steps, **said)


def _number(value: object) -> float:
    """Return a number as it is, and NaN for anything else, with which no comparison holds."""
    return value if isinstance(value, int | float) else math.nan
