"""Rules of checkpoints: how many are kept, whether the disk holds them, and which one a run resumes from."""

from omegaconf import DictConfig

from verl_precision.check.rules.gpu_memory import GIB, SINGLE
from verl_precision.check.rules.rule import Environment, Fault, Faults, Machine, rule

MOMENTS = 2 * SINGLE  # of Adam, a trained parameter


@rule("one-checkpoint", "warning")
def one_checkpoint(config: DictConfig, environment: Environment) -> Faults:
    """verl removes the former checkpoint before `latest_checkpointed_iteration.txt` names the new one."""
    if config.trainer.save_freq > 0 and config.trainer.max_actor_ckpt_to_keep == 1:
        yield Fault(
            setting="trainer.max_actor_ckpt_to_keep",
            problem="verl removes the former checkpoint while latest_checkpointed_iteration.txt still names it: a run "
            "that ends in between finds no checkpoint, and starts from scratch",
            allowed="2 or more, or null for all",
            remedy="Set trainer.max_actor_ckpt_to_keep=2.",
        )


@rule("checkpoint-space", of_machine=True)
def checkpoint_space(config: DictConfig, machine: Machine) -> Faults:
    """The disk holds the checkpoints that a run keeps, and the one that is being written."""
    one = checkpoint_bytes(config, machine.parameters)
    if config.trainer.save_freq <= 0 or one is None or machine.checkpoint_disk is None:
        return
    number = config.trainer.max_actor_ckpt_to_keep or 1  # without a limit their number is not known
    needed = (number + 1) * one
    if machine.checkpoint_disk < needed:
        yield Fault(
            setting="trainer.default_local_dir",
            problem=f"{machine.checkpoint_disk / GIB:.1f} GiB are free there; {number + 1} checkpoints of "
            f"{one / GIB:.1f} GiB need {needed / GIB:.1f} GiB ({number} kept, and one being written)",
            allowed="a folder on a disk with that much space",
            remedy="Free some, name another folder, or keep fewer: trainer.max_actor_ckpt_to_keep.",
        )


@rule("resume-refused")
def resume_refused(config: DictConfig, environment: Environment) -> Faults:
    """verl looks for a checkpoint once everything is loaded."""
    mode, path = config.trainer.get("resume_mode", "auto"), config.trainer.get("resume_from_path")
    if mode not in ("auto", "disable", "resume_path"):
        problem = "verl knows no such mode, and stops with UnboundLocalError once everything is loaded"
        remedy = "Set trainer.resume_mode=auto."
        yield Fault(setting="trainer.resume_mode", problem=problem, allowed="auto, disable, resume_path", remedy=remedy)
    elif mode == "resume_path" and (not isinstance(path, str) or "global_step_" not in path):
        yield Fault(
            setting="trainer.resume_from_path",
            problem="with resume_mode=resume_path verl asserts, once everything is loaded, that it names a checkpoint",
            allowed="a path that ends with global_step_<number>",
            remedy="Set it, or trainer.resume_mode=auto.",
        )


def checkpoint_bytes(config: DictConfig, parameters: int | None) -> int | None:
    """Return about how many bytes a checkpoint of the actor takes: FP32 weights, and Adam's two moments in FP32."""
    if parameters is None:
        return None
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    adapter = (model.get("lora_rank") or 0) > 0  # its moments are those of the adapter: below 1% of the model
    sizes = {"model": SINGLE, "optimizer": 0 if adapter else MOMENTS, "hf_model": SINGLE}
    return parameters * sum(sizes.get(content, 0) for content in actor.checkpoint.save_contents)
