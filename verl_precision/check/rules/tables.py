"""Rules that are rows: numbers, names, settings that nothing reads. Of verl 0.9.1 and vLLM 0.28.0."""

from collections.abc import Iterator
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.verl_config import ROLLOUT, SEEDED, is_repeatable
from verl_precision.check.rules.files import names_in
from verl_precision.check.rules.rule import Environment, Fault, rule
from verl_precision.losses.registry import POLICY_LOSSES
from verl_precision.losses.rollout_weights import WEIGHT_KINDS

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
CLIP_C, LOSS = f"{ACTOR}.clip_ratio_c", f"{ACTOR}.policy_loss.loss_mode"
STRATEGY, V1 = f"{ACTOR}.strategy", "trainer.use_v1"
# What verl computes with, and rules too: null ends both with a TypeError. First those that others are made of.
COMPUTED_WITH = """
    data.train_batch_size data.max_prompt_length data.max_response_length data.train_max_samples trainer.nnodes
    trainer.n_gpus_per_node trainer.total_epochs trainer.save_freq trainer.test_freq trainer.critic_warmup
    trainer.v1.separate_async.parameter_sync_step trainer.default_local_dir
    transfer_queue.backend.SimpleStorage.num_data_storage_units
    actor_rollout_ref.rollout.n actor_rollout_ref.rollout.tensor_model_parallel_size
    actor_rollout_ref.rollout.data_parallel_size actor_rollout_ref.rollout.pipeline_model_parallel_size
    actor_rollout_ref.rollout.gpu_memory_utilization actor_rollout_ref.rollout.temperature
    actor_rollout_ref.rollout.top_k actor_rollout_ref.rollout.agent
    actor_rollout_ref.actor.ppo_mini_batch_size actor_rollout_ref.actor.fsdp_config.fsdp_size
    actor_rollout_ref.actor.optim.override_optimizer_config.eps actor_rollout_ref.actor.policy_loss
    actor_rollout_ref.ref.fsdp_config.fsdp_size critic.ppo_mini_batch_size critic.fsdp.fsdp_size
""".split()
# Numbers whose default is null, which says nothing of their type.
NUMBERS_OR_NULL = ("trainer.total_training_steps", "trainer.max_actor_ckpt_to_keep", "data.gen_batch_size")
# Whole numbers, at least 1: verl fails without one, once Ray is up or everything is loaded.
COUNTS = """
    trainer.nnodes trainer.n_gpus_per_node data.train_batch_size data.max_prompt_length data.max_response_length
    actor_rollout_ref.rollout.n actor_rollout_ref.actor.ppo_mini_batch_size actor_rollout_ref.actor.ppo_epochs
    actor_rollout_ref.rollout.tensor_model_parallel_size actor_rollout_ref.rollout.data_parallel_size
    actor_rollout_ref.rollout.agent.num_workers actor_rollout_ref.rollout.val_kwargs.n reward.num_workers
    actor_rollout_ref.rollout.max_num_seqs actor_rollout_ref.actor.ulysses_sequence_parallel_size
    actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes
    transfer_queue.backend.SimpleStorage.num_data_storage_units
""".split()


KL = "kl k1 abs mse k2 low_var_kl k3 kl+ k1+ abs+ mse+ k2+ low_var_kl+ k3+"
REJECTIONS = " ".join(f"token_k{n} seq_sum_k{n} seq_mean_k{n}" for n in "123") + " seq_max_k2 seq_max_k3"
# `ModelDType` of vllm/config/model.py (compared by tests/check/rules/test_planted_edits.py).
VLLM_DTYPES = "auto half float16 bfloat16 float float32"
# Names that verl or vLLM looks up in a worker: those that there are, and the setting, with its value, that has it read.
NAMES = {
    f"{ROLLOUT}.dtype": (VLLM_DTYPES, f"{ROLLOUT}.name", "vllm"),
    f"{ACTOR}.kl_loss_type": (KL, f"{ACTOR}.use_kl_loss", True),
    "algorithm.kl_penalty": (KL, "algorithm.use_kl_in_reward", True),
    f"{ACTOR}.checkpoint.save_contents": ("model optimizer extra hf_model", "", None),
    f"{CORRECTION}.rollout_is": (" ".join(("token", "sequence", *WEIGHT_KINDS)), "", None),
    f"{CORRECTION}.rollout_rs": (REJECTIONS, "", None),
}


class Ignored(NamedTuple):
    """A setting that nothing reads where another one has one of these values."""

    setting: str
    default: object  # verl's
    decider: str
    values: tuple[object, ...]
    instead: str = ""  # what counts


DYNAMIC, DISTILLED = f"{ACTOR}.use_dynamic_bsz", "distillation.distillation_loss"
ONE_CLIP = ("clip_cov", "cispo", "dro", "geo_mean", "gpg", "gspo", "kl_cov", "sapo")  # verl's without a dual clip
IGNORED = (
    Ignored(CLIP_C, 3.0, LOSS, (*POLICY_LOSSES, *ONE_CLIP)),
    Ignored(f"{ACTOR}.use_kl_loss", False, f"{ACTOR}.kl_loss_coef", (0,)),  # the reference is asked all the same
    Ignored(f"{ACTOR}.use_prefix_grouper", False, V1, (True,)),
    Ignored(f"{ACTOR}.grad_clip", 1.0, V1, (True,), "actor.optim.clip_grad"),
    Ignored(f"{DISTILLED}.topk", 32, f"{DISTILLED}.loss_mode", tuple(KL.split())),
    Ignored(f"{ROLLOUT}.repetition_penalty", 1.0, V1, (True,), "1.0"),
    Ignored(f"{ROLLOUT}.do_sample", True, V1, (True,), "rollout.temperature"),
    Ignored("data.reward_fn_key", "data_source", V1, (True,), "the column data_source"),
    Ignored(f"{ACTOR}.fsdp_config.mixed_precision.buffer_dtype", "fp32", STRATEGY, ("fsdp2",), "the buffers' own"),
    Ignored(f"{ACTOR}.fsdp_config.offload_policy", False, STRATEGY, ("fsdp",), "param_offload"),
    Ignored("trainer.resume_from_path", None, "trainer.resume_mode", ("auto", "disable"), "the newest checkpoint"),
)


def null_number(config: DictConfig) -> str | None:
    """Return the first setting that is null where verl, rules and resolvers compute with it; asked before them."""
    asked = [*COMPUTED_WITH]
    if OmegaConf.select(config, DYNAMIC):
        asked.append(f"{ACTOR}.ppo_max_token_len_per_gpu")
    if OmegaConf.select(config, "reward.reward_model.enable"):
        asked.append("reward.reward_model.model_path")
    return next((setting for setting in asked if OmegaConf.select(config, setting, default=0) is None), None)


@rule("value-out-of-range")
def counts_below_one(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Numbers without which verl fails once everything is loaded."""
    for setting in COUNTS:
        value = OmegaConf.select(config, setting, default=1)  # absent: of another engine
        if setting == "data.train_batch_size" and "async_training" in config:  # that trainer has no batches of prompts
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield Fault(setting, "verl needs at least one", "a whole number >= 1", f"Set {setting} to such a number.")


@rule("name-unknown")
def unknown_names(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Names that are looked up in a worker only."""
    for setting, (known, when, value) in NAMES.items():
        given = ",".join(str(name) for name in names_in(config, setting) if name).replace(" ", "").split(",")
        wrong = ", ".join(name for name in given if name not in ("", *known.split()))
        if wrong and (not when or OmegaConf.select(config, when) == value):
            problem = f"there is no {wrong}: a worker fails, or ignores it without a message"
            yield Fault(setting, problem, ", ".join(known.split()), "Correct the name.")


@rule("setting-ignored", "warning")
def ignored_settings(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Settings that were changed from verl's default where nothing reads them."""
    for row in IGNORED:
        value, decides = OmegaConf.select(config, row.setting), OmegaConf.select(config, row.decider)
        if value not in (None, row.default) and decides in row.values:
            problem = f"with {row.decider}={decides}"
            problem += f"; {row.instead} counts" if row.instead else ""
            yield Fault(row.setting, problem, str(row.default), "Remove it, or change what keeps it from being read.")


@rule("not-repeatable")
def not_repeatable(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """A run that seeds each request is meant to repeat: everything else that chance decides must be fixed too."""
    if not is_repeatable(config):
        return
    sampler = "trainer.v1.sampler.custom_sampler.name"
    needed: list[tuple[str, object, str]] = [
        (f"{ROLLOUT}.max_num_seqs", 1, "the logits of a sequence are rounded differently in another batch"),
        (f"{ROLLOUT}.enable_prefix_caching", False, "a prompt may be computed in parts"),
        ("mismatch.enabled", True, "verl's own trainer gives prompts random names"),
        (sampler, "SortedReplayBuffer", "a batch has the order in which responses arrive"),
    ]
    if OmegaConf.select(config, "trainer.v1.trainer_mode") != "sync":
        needed.append(("trainer.v1.trainer_mode", "vp_sync", "a response's weights depend on the machine's speed"))
    if config.data.shuffle and config.data.seed is None:
        needed.append(("data.seed", 0, "prompts are shuffled at random"))
    for setting, value, differs in needed:
        if OmegaConf.select(config, setting) != value:
            problem = f"{SEEDED}=True asks for a run that repeats bit for bit, but {differs}"
            yield Fault(setting, problem, str(value), f"Set {setting}={value}, as +repeatable=bitwise does.")
