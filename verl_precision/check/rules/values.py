"""Rules of single values: out of range, without effect, or such that nothing is trained."""

from omegaconf import DictConfig, OmegaConf

from verl_precision.check.rules.rule import Environment, Fault, Faults, rule

# Settings that are counts, and what fails at 0.
COUNTS = {
    "trainer.nnodes": "there is no host",
    "trainer.n_gpus_per_node": "there is no GPU",
    "data.train_batch_size": "there is no prompt in a batch",
    "data.max_prompt_length": "no prompt is that short",
    "data.max_response_length": "there is no room for a response",
    "actor_rollout_ref.rollout.n": "there is no response",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "there is no prompt in a mini-batch",
    "actor_rollout_ref.actor.ppo_epochs": "no update is made",
    "actor_rollout_ref.rollout.agent.num_workers": "nobody asks for responses",
}
# verl's estimators that compare the responses to one prompt with each other
GROUP_ESTIMATORS = ("grpo", "rloo")


@rule("value-out-of-range")
def value_out_of_range(config: DictConfig, environment: Environment) -> Faults:
    """Numbers with which a run fails in the middle, or does nothing."""
    for setting, effect in COUNTS.items():
        value = OmegaConf.select(config, setting)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield Fault(
                setting=setting, problem=effect, allowed="a whole number >= 1", remedy=f"Set {setting}=1 or more."
            )
    temperature = "actor_rollout_ref.rollout.temperature"
    value = OmegaConf.select(config, temperature)
    if not isinstance(value, int | float) or value <= 0:
        yield Fault(
            setting=temperature,
            problem="the trainer divides logits by it, and greedy sampling has no distribution to train",
            allowed="a number > 0; validation has its own, rollout.val_kwargs.temperature",
            remedy=f"Set {temperature}=1.0.",
        )


@rule("nothing-trained")
def nothing_trained(config: DictConfig, environment: Environment) -> Faults:
    """A run of no steps loads everything, and ends without an error."""
    trainer = config.trainer
    if trainer.get("val_only"):
        if not trainer.get("val_before_train", True):
            yield Fault(
                setting="trainer.val_before_train",
                problem="verl reads val_only=True only where it validates before training: this run trains",
                allowed="True with val_only=True",
                remedy="Set trainer.val_before_train=True.",
            )
        return
    setting = "trainer.total_epochs" if trainer.total_training_steps is None else "trainer.total_training_steps"
    if not isinstance(value := OmegaConf.select(config, setting), int) or value < 1:
        yield Fault(
            setting=setting,
            problem="the run ends before its first step, without an error",
            allowed="a whole number >= 1; trainer.val_only=True only validates",
            remedy=f"Set {setting}=1 or more.",
        )


@rule("group-of-one", "warning")
def group_of_one(config: DictConfig, environment: Environment) -> Faults:
    """Estimators that compare the responses to a prompt have nothing to compare."""
    estimator = config.algorithm.adv_estimator
    if config.actor_rollout_ref.rollout.n == 1 and estimator in GROUP_ESTIMATORS:
        yield Fault(
            setting="actor_rollout_ref.rollout.n",
            problem=f"adv_estimator={estimator} compares the responses to one prompt: of one alone verl takes the bare "
            "reward for the advantage, without a baseline",
            allowed="2 or more",
            remedy="Set actor_rollout_ref.rollout.n=8.",
        )


@rule("resume-refused")
def resume_refused(config: DictConfig, environment: Environment) -> Faults:
    """verl looks for a checkpoint once everything is loaded."""
    mode, path = config.trainer.get("resume_mode", "auto"), config.trainer.get("resume_from_path")
    if mode not in ("auto", "disable", "resume_path"):
        yield Fault(
            setting="trainer.resume_mode",
            problem="verl knows no such mode, and stops with UnboundLocalError once everything is loaded",
            allowed="auto, disable, resume_path",
            remedy="Set trainer.resume_mode=auto.",
        )
    elif mode == "resume_path" and (not isinstance(path, str) or "global_step_" not in path):
        yield Fault(
            setting="trainer.resume_from_path",
            problem="with resume_mode=resume_path verl asserts, once everything is loaded, that it names a checkpoint",
            allowed="a path that ends with global_step_<number>",
            remedy="Set it, or trainer.resume_mode=auto.",
        )
