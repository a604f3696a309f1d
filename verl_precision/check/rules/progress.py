"""Rules of a run's progress: nothing is trained, nothing is written, or what was written is not read again."""

import math
from pathlib import PurePosixPath

from omegaconf import DictConfig

from verl_precision.base.verl_config import ROLLOUT, engines, lora_rank
from verl_precision.check.rules.files import names_in
from verl_precision.check.rules.rule import Environment, Faults, faults_where, rule
from verl_precision.integration.trainer.saving import every_minutes, saves

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
CORRECT = "Correct {}, or leave it as the recipe has it."
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
    once = "a whole number >= 1; trainer.val_only=True only validates"
    yield from faults_where(
        (not _number(optim.get(clip)) > 0, f"{ACTOR}.optim.{clip}", "gradients are scaled down to this norm: 0 leaves "
         "nothing of them, null is asserted against in the first update", "a number above 0, such as verl's 1.0"),
        (rank and not _number(alpha) > 0, f"{MODEL}.lora_alpha", "the adapter's output is scaled by lora_alpha / "
         "lora_rank: it adds nothing, and has no gradient", f"a number above 0, such as {2 * rank}"),
        (never and not validates, "trainer.critic_warmup", "the actor waits that many steps for the critic, of "
         f"{steps} in all", f"less than {steps}"),
        (validates and not trainer.get("val_before_train", True), "trainer.val_before_train", "verl reads val_only "
         "only where it validates before training: this run trains", "True with val_only=True"),
        *(
            (number is not None and not _number(number) >= 1 and not validates, f"trainer.{key}", "the run ends before "
             "its first step, without an error", once)
            for key in ("total_epochs", "total_training_steps") for number in [trainer.get(key)]
        ),
        remedy=CORRECT,
    )  # fmt: skip


@rule("trains-little", "warning")
def trains_little(config: DictConfig, environment: Environment) -> Faults:
    """Runs that may be meant, and mostly are not."""
    trainer, actor, rollout = config.trainer, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    steps, optim = trainer.total_training_steps, actor.optim
    way, too_long = "lr_warmup_steps_ratio", _number(optim.get("lr_warmup_steps_ratio")) >= 1
    if (fixed := _number(optim.get("lr_warmup_steps"))) > 0:
        way, too_long = "lr_warmup_steps", fixed > _number(steps)
    waits = _number(trainer.critic_warmup) > 0 and all(engine.role != "critic" for engine in engines(config))
    yield from faults_where(
        (optim.lr == 0, f"{ACTOR}.optim.lr", "the weights stay as they are", "a number above 0"),
        (too_long, f"{ACTOR}.optim.{way}", f"the warm-up outlasts the run: the rate never reaches lr={optim.lr}",
         "fewer steps than the run has"),
        (waits, "trainer.critic_warmup", "there is no critic, and the actor waits that many steps for it", "0"),
        (actor.use_kl_loss and actor.kl_loss_coef == 0, f"{ACTOR}.kl_loss_coef", "the reference is loaded and asked, "
         "and its KL counts nothing", "a number above 0, or use_kl_loss=False"),
        (rollout.get("ignore_eos"), f"{ROLLOUT}.ignore_eos", "every response goes on after its end, to the full "
         "length, and what follows is trained on", "False"),
        remedy=CORRECT,
    )  # fmt: skip


@rule("progress-not-kept", "warning")
def progress_not_kept(config: DictConfig, environment: Environment) -> Faults:
    """Checkpoints that are not written, that lie where a restart does not find them, or that it does not read."""
    trainer, contents = config.trainer, config.actor_rollout_ref.actor.checkpoint
    steps, kept, gpus = trainer.total_training_steps, saves(config), trainer.device != "cpu"
    long, folder = gpus and isinstance(steps, int) and steps >= LONG, PurePosixPath(str(trainer.default_local_dir))
    places = OF_A_HOST if trainer.nnodes > 1 and gpus else IN_MEMORY
    save, load = ({str(name) for name in names_in(contents, f"{key}_contents")} for key in ("save", "load"))
    unwritten, unread = ({"model"} | load) - save, {"model", "optimizer", "extra"} - load
    yield from faults_where(
        (long and not kept, "trainer.save_freq", f"no checkpoint is written in {steps} steps, not even the last",
         "1 or more"),
        (long and kept and trainer.save_freq >= steps and not every_minutes(config), "trainer.save_freq", "the only "
         f"checkpoint of {steps} steps is the last: a run that ends before has none", f"less than {steps}"),
        (kept and trainer.get("resume_mode") == "disable", "trainer.resume_mode", "a run that is started again begins "
         "at step 0, and writes over its own checkpoints", "auto"),
        (kept and trainer.get("del_local_ckpt_after_load"), "trainer.del_local_ckpt_after_load", "a resumed run "
         "removes its checkpoint: if it ends before the next one, it has none", "False"),
        (kept and any(folder.is_relative_to(place) for place in places), "trainer.default_local_dir", "a host keeps "
         "that for itself, or in memory: after a restart, or on another host, it is gone", "a folder on a shared disk"),
        (kept and unwritten, f"{ACTOR}.checkpoint.save_contents", "no run can resume: nothing is written of "
         f"{', '.join(sorted(unwritten))}", "at least model, and all of load_contents"),
        (kept and unread, f"{ACTOR}.checkpoint.load_contents", f"a resumed run begins without its "
         f"{', '.join(sorted(unread))}", "the same as save_contents"),
        (names_in(config, "trainer.logger") in ([], [None]), "trainer.logger", "no metric is written anywhere",
         "[console,file]"),
        remedy=CORRECT,
    )  # fmt: skip


def _number(value: object) -> float:
    """Return a number as it is, and NaN for anything else, with which no comparison holds."""
    return value if isinstance(value, int | float) else math.nan
