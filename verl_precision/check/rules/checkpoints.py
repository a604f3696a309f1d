"""Rules of checkpoints: when the first comes, how many are kept, whether the disk holds them, which one is resumed."""

import math
from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.verl_config import engines
from verl_precision.check.rules.files import names_in
from verl_precision.check.rules.gpu_memory import GIB, SINGLE, ModelShape
from verl_precision.check.rules.rule import Environment, Fault, Machine, Severity, rule
from verl_precision.integration.trainer.saving import every_minutes, saves

MOMENTS = 2 * SINGLE  # of Adam, a trained parameter
HOUR = 3600
# The assumptions of recipes/README.md, whose seconds a step are met within a factor of 3, and are exceeded by less than
# 2: tokens a second that vLLM draws on a GPU for a small and for a large model (parameters), FLOP/s of 40% of an H100,
# a fifth for all else.
SMALL, FAST, SLOW, FLOPS, ALL_ELSE = 8e9, 5_000, 1_500, 0.4 * 989e12, 1.2
LONG_HOURS = 12  # without a checkpoint, of a job whose limit is not known; half of slurm.sbatch's


@rule("one-checkpoint", "warning")
def one_checkpoint(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl removes the former checkpoint before all of the new one is written."""
    setting = "trainer.max_actor_ckpt_to_keep"
    if saves(config) and OmegaConf.select(config, setting) == 1:
        problem = "verl removes the former before the new one is complete: a run that ends in between has none"
        yield Fault(setting, problem, "2 or more, or null for all", f"Set {setting}=2.")


@rule("first-checkpoint-late", about="the time to the first checkpoint")
def first_checkpoint_late(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """A job that ends before its first checkpoint starts from scratch, as often as it is queued again."""
    if config.trainer.device == "cpu" or not saves(config) or (shape := environment.shape) is None:
        return
    if (step := step_seconds(config, shape)) is None:
        return
    steps = config.trainer.save_freq or 0
    by_time, last = math.ceil(60 * every_minutes(config) / step), config.trainer.total_training_steps
    first = step * min(number for number in (by_time, steps, last or 0, math.inf) if number > 0)
    left = environment.seconds_left
    if first <= (LONG_HOURS * HOUR if left is None else left):
        return
    limit = "clusters end most jobs after a day or less" if left is None else f"the job ends in {left / HOUR:.1f} hours"
    severity: Severity = "error" if left is not None and first > 2 * left else "warning"
    problem = f"at about {step / 60:.0f} minutes a step (by rough arithmetic) the first checkpoint comes after "
    problem += f"{first / HOUR:.1f} hours, and {limit}: a job that ends earlier has to start from scratch"
    remedy = "Set checkpoint.every_minutes=60 (with + where no scale= is chosen), or save more often."
    allowed = "a first checkpoint well before the job ends"
    yield Fault("trainer.save_freq", problem, allowed, remedy, severity=severity)


def step_seconds(config: DictConfig, shape: ModelShape) -> float | None:
    """Return about how long a step takes on H100s, with responses of half the allowed length; None: no such counts."""
    data, trainer = config.data, config.trainer
    counts = data.train_batch_size, config.actor_rollout_ref.rollout.n, data.max_response_length
    gpus = (trainer.nnodes, trainer.n_gpus_per_node)
    if not all(isinstance(count, int) and count > 0 for count in (*counts, *gpus)):
        return None
    tokens = math.prod(counts) / 2
    idle = 3 * (shape.experts - shape.experts_per_token) * shape.hidden * shape.intermediate  # a token, a layer
    active = shape.parameters - shape.layers * idle
    drawn = FAST if shape.parameters < SMALL else SLOW
    return ALL_ELSE * tokens / math.prod(gpus) * (1 / drawn + 8 * active / FLOPS)


@rule("checkpoint-space", of_machine=True, about="disk for checkpoints")
def checkpoint_space(config: DictConfig, machine: Machine) -> Iterator[Fault]:
    """The disk holds the checkpoints that a run keeps, those of its earlier starts counted, and one being written."""
    if not saves(config) or machine.checkpoint_disk is None:
        return
    if (one := checkpoint_bytes(config, machine.parameters)) is None:
        return
    keep = config.trainer.max_actor_ckpt_to_keep
    number = max(keep or 1, 1)  # without a limit their number is not known
    needed = (number + 1) * one
    earlier = machine.removable if keep and engines(config)[0].our_fsdp else 0  # verl's own engine never removes them
    held = f", and {earlier / GIB:.1f} in checkpoints of earlier starts" if earlier else ""
    if machine.checkpoint_disk + earlier < needed:
        problem = f"{machine.checkpoint_disk / GIB:.1f} GiB are free there{held}; {number + 1} checkpoints of "
        problem += f"{one / GIB:.1f} GiB need {needed / GIB:.1f} GiB ({number} kept, and one being written)"
        remedy = "Free some, name another folder, or keep fewer: trainer.max_actor_ckpt_to_keep."
        yield Fault("trainer.default_local_dir", problem, "a folder on a disk with that much space", remedy)


@rule("resume-refused")
def resume_refused(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl looks for a checkpoint once everything is loaded, and stops with UnboundLocalError or an assertion."""
    mode, path = config.trainer.get("resume_mode", "auto"), config.trainer.get("resume_from_path")
    if mode not in ("auto", "disable", "resume_path"):
        yield Fault("trainer.resume_mode", "verl knows no such mode", "auto, disable, resume_path", "Set it to auto.")
    elif mode == "resume_path" and (not isinstance(path, str) or "global_step_" not in path):
        problem = "with resume_mode=resume_path it has to name a checkpoint: a path that ends with global_step_<number>"
        yield Fault("trainer.resume_from_path", problem, "such a path", "Set it, or trainer.resume_mode=auto.")


def checkpoint_bytes(config: DictConfig, parameters: int | None) -> int | None:
    """Return about how many bytes a checkpoint of the actor takes: FP32 weights, and Adam's two moments in FP32."""
    if parameters is None:
        return None
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    adapter = (model.get("lora_rank") or 0) > 0  # its moments are those of the adapter: below 1% of the model
    sizes = {"model": SINGLE, "optimizer": 0 if adapter else MOMENTS, "hf_model": SINGLE}
    return parameters * sum(sizes.get(content, 0) for content in names_in(actor.checkpoint, "save_contents"))
