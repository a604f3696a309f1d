"""Rules that are rows: numbers, names, settings that nothing reads. Of verl 0.9.1 and vLLM 0.28.0."""

from collections.abc import Iterator
from math import inf, nan
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.verl_config import ROLLOUT, SEEDED, is_repeatable
from verl_precision.check.rules.files import names_in
from verl_precision.check.rules.rule import Environment, Fault, Severity, rule
from verl_precision.check.who_decides import USERS, preset_of, speaker_of
from verl_precision.losses.rollout_weights import WEIGHT_KINDS

MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
OPTIM = f"{ACTOR}.optim"
CORRECTION = "algorithm.rollout_correction"
CLIP_LOW, CLIP_C = f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_c"
LOOP = f"{ROLLOUT}.agent.default_agent_loop"
STRATEGY, V1 = f"{ACTOR}.strategy", "trainer.use_v1"
MANY_TIMES = 10  # a normaliser that is further from the longest response is a slip
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
NUMBERS_OR_NULL = """
    trainer.total_training_steps trainer.max_actor_ckpt_to_keep trainer.max_critic_ckpt_to_keep
    data.gen_batch_size data.val_batch_size
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu
    actor_rollout_ref.actor.optim.override_optimizer_config.eps
    actor_rollout_ref.actor.optim.override_optimizer_config.lr
""".split()
# Whole numbers, at least 1: verl fails without one, once Ray is up or everything is loaded.
COUNTS = """
    trainer.nnodes trainer.n_gpus_per_node data.train_batch_size data.max_prompt_length data.max_response_length
    actor_rollout_ref.rollout.n actor_rollout_ref.actor.ppo_mini_batch_size actor_rollout_ref.actor.ppo_epochs
    actor_rollout_ref.rollout.tensor_model_parallel_size actor_rollout_ref.rollout.data_parallel_size
    actor_rollout_ref.rollout.agent.num_workers reward.num_workers
    transfer_queue.backend.SimpleStorage.num_data_storage_units
""".split()


class Range(NamedTuple):
    """Between which bounds a number lies."""

    setting: str
    low: float
    high: float
    source: str = ""  # who says so
    above: bool = False  # whether it lies above the lower bound, not on it


# Beyond these verl or vLLM refuses it: a server, a request or the first update.
ALLOWED = (
    Range(f"{ROLLOUT}.temperature", 0, 2, above=True),
    Range(f"{ROLLOUT}.top_p", 0, 1, above=True),
    Range(f"{ROLLOUT}.top_k", -1, inf),
    Range(f"{ROLLOUT}.val_kwargs.temperature", 0, 2),
    Range(f"{ROLLOUT}.val_kwargs.top_p", 0, 1, above=True),
    Range(f"{ROLLOUT}.val_kwargs.top_k", -1, inf),
    Range(f"{ROLLOUT}.val_kwargs.n", 1, inf),
    Range(f"{ROLLOUT}.max_num_seqs", 1, inf),
    Range(f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", 0, inf, above=True),
    Range(f"{ACTOR}.ulysses_sequence_parallel_size", 1, inf),
)
# Outside a value is a slip of orders of magnitude. 0 switches a term off, and is nobody's slip.
USUAL = (
    Range(f"{OPTIM}.lr", 1e-9, 1e-2, "verl's examples and the recipes: 1e-6, 4e-5 with LoRA, 3e-3 for a tiny model"),
    Range(f"{OPTIM}.override_optimizer_config.lr", 1e-9, 1e-2, "it comes before optim.lr: 1e-6"),
    Range(f"{OPTIM}.override_optimizer_config.eps", 1e-20, 1e-3, "arXiv 2510.26788, Table 3: 1e-15 to 1e-8"),
    Range(f"{OPTIM}.betas[0]", 0, 0.99, "the moments' windows; verl's default: 0.9 and 0.999"),
    Range(f"{OPTIM}.betas[1]", 0.9, 1, "the moments' windows; verl's default: 0.9 and 0.999"),
    Range(f"{OPTIM}.weight_decay", 0, 1, "verl's default and arXiv 2510.26788, Table 3: 0 to 0.1"),
    Range(f"{OPTIM}.clip_grad", 1e-3, 1e3, "verl's default: 1"),
    Range(f"{ACTOR}.fsdp_config.loss_scale.initial", 16, 2**32, "the presets: 65536, which small gradients need"),
    Range(f"{ACTOR}.fsdp_config.loss_scale.growth_interval", 20, 1e5, "the presets: 400; a growth may cost an update"),
    Range(CLIP_LOW, 1e-5, 1, "the presets: 3e-4 (GSPO) to 1, no lower bound (CISPO)"),
    Range(f"{ACTOR}.clip_ratio_high", 1e-5, 10, "the presets: 4e-4 (GSPO) to 5 (CISPO)"),
    Range(CLIP_C, 1, 100, "verl's default and DAPO's: 3 to 10"),
    Range(f"{ACTOR}.entropy_coeff", 0, 0.1, "verl's default: 0"),
    Range(f"{ACTOR}.kl_loss_coef", 0, 1, "verl's default: 1e-3"),
    Range("algorithm.kl_ctrl.kl_coef", 0, 1, "verl's default: 1e-3"),
    Range(f"{ACTOR}.ppo_epochs", 1, 16, "verl's default: 1"),
    Range(f"{ROLLOUT}.temperature", 0.1, 2, "the recipes: 1"),
    Range("data.train_batch_size", 1, 65536, "the recipes and verl's default: 8 to 1024 prompts"),
    Range("trainer.max_actor_ckpt_to_keep", 1, 1e4, "the recipes: 2; below 1 all are kept, until the disk is full"),
    Range("reward.reward_kwargs.overlong_buffer_cfg.penalty_factor", 0, 10, "arXiv 2503.14476: 1"),
)


class Names(NamedTuple):
    """Names that verl, vLLM or transformers looks up in a worker."""

    setting: str
    known: str  # the names that there are
    when: str = ""  # a setting that has it read,
    value: object = None  # where it has this value


CONTENTS = "model optimizer extra hf_model"
KL = "kl k1 abs mse k2 low_var_kl k3 kl+ k1+ abs+ mse+ k2+ low_var_kl+ k3+"
REJECTIONS = " ".join(f"token_k{n} seq_sum_k{n} seq_mean_k{n}" for n in "123") + " seq_max_k2 seq_max_k3"
ATTENTIONS = "eager sdpa flex_attention flash_attention_2 flash_attention_3 flash_attention_4"
# `ModelDType` of vllm/config/model.py (compared by tests/check/rules/test_planted_edits.py).
VLLM_DTYPES = "auto half float16 bfloat16 float float32"
NAMES = (
    Names(f"{ROLLOUT}.dtype", VLLM_DTYPES, f"{ROLLOUT}.name", "vllm"),
    Names(f"{ACTOR}.kl_loss_type", KL, f"{ACTOR}.use_kl_loss", True),
    Names("algorithm.kl_penalty", KL, "algorithm.use_kl_in_reward", True),
    Names(f"{ACTOR}.checkpoint.save_contents", CONTENTS),
    Names(f"{ACTOR}.checkpoint.load_contents", CONTENTS),
    Names(f"{CORRECTION}.rollout_is", " ".join(("token", "sequence", *WEIGHT_KINDS))),
    Names(f"{CORRECTION}.rollout_rs", REJECTIONS),
    Names(f"{CORRECTION}.loss_type", "ppo_clip reinforce", f"{CORRECTION}.bypass_mode", True),
    Names(f"{MODEL}.override_config.attn_implementation", ATTENTIONS),
    Names(LOOP, "single_turn_agent tool_agent vp_single_turn", f"{ROLLOUT}.agent.agent_loop_config_path"),
)


class Ignored(NamedTuple):
    """A setting that nothing reads where another one has a value, or has another than this."""

    setting: str
    default: object  # verl's, or a list of values that change nothing
    decider: str
    value: object
    unless: bool = False  # whether this value alone has it read
    unsaid: bool = False  # whether nobody may have said so: who switches a thing off knows that its number is not read
    instead: str = ""  # what counts


NORMALISED, BUFFERS = "seq-mean-token-sum-norm", f"{ACTOR}.fsdp_config.mixed_precision.buffer_dtype"
REWARD, RESUME = "reward.custom_reward_function", "trainer.resume_from_path"
IGNORED = (
    Ignored(f"{ACTOR}.clip_ratio", 0.2, CLIP_LOW, None, unless=True, instead="clip_ratio_low and clip_ratio_high"),
    Ignored(f"{ACTOR}.loss_scale_factor", None, f"{ACTOR}.loss_agg_mode", NORMALISED, unless=True),
    Ignored(f"{ACTOR}.kl_loss_coef", [0.001, 0], f"{ACTOR}.use_kl_loss", True, unless=True, unsaid=True),
    Ignored(f"{ACTOR}.grad_clip", 1.0, V1, True, instead="actor.optim.clip_grad"),
    Ignored(f"{OPTIM}.min_lr_ratio", 0.0, f"{OPTIM}.lr_scheduler_type", "constant", unsaid=True),
    Ignored(BUFFERS, "fp32", STRATEGY, "fsdp2", instead="the buffers' own dtype"),
    Ignored(f"{ACTOR}.fsdp_config.offload_policy", False, STRATEGY, "fsdp", instead="param_offload"),
    Ignored(f"{MODEL}.lora_alpha", [16, 0], f"{MODEL}.lora_rank", 0, unsaid=True),
    Ignored(f"{MODEL}.target_modules", "all-linear", f"{MODEL}.lora_rank", 0, unsaid=True),
    Ignored(f"{MODEL}.lora.rank", 0, STRATEGY, "fsdp2", instead="model.lora_rank"),
    Ignored(f"{MODEL}.lora.alpha", 32, STRATEGY, "fsdp2", instead="model.lora_alpha"),
    Ignored(f"{ROLLOUT}.repetition_penalty", 1.0, V1, True, instead="1.0"),
    Ignored(f"{ROLLOUT}.do_sample", True, V1, True, instead="rollout.temperature"),
    Ignored(f"{REWARD}.reward_kwargs", {}, f"{REWARD}.path", None),
    Ignored("data.reward_fn_key", "data_source", V1, True, instead="the column data_source"),
    Ignored("algorithm.filter_groups.enable", False, "trainer.v1.sampler.custom_sampler.path", None, unless=True),
    Ignored("algorithm.lam", 1.0, "algorithm.adv_estimator", "gae", unless=True),
    Ignored(RESUME, None, "trainer.resume_mode", "resume_path", unless=True, instead="the newest checkpoint"),
)
DYNAMIC = f"{ACTOR}.use_dynamic_bsz"
OF_SEQUENCES = f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"
MICRO_BATCHES = (  # on GPUs
    Ignored(f"{ACTOR}.ppo_micro_batch_size_per_gpu", None, DYNAMIC, True, instead="ppo_max_token_len_per_gpu"),
    Ignored(OF_SEQUENCES, None, DYNAMIC, True, instead="log_prob_max_token_len_per_gpu"),
)
DISTILLED = "distillation.distillation_loss"
TOPK = Ignored(f"{DISTILLED}.topk", 32, f"{DISTILLED}.loss_mode", "forward_kl_topk", unless=True)
GREEDY = Ignored(f"{ROLLOUT}.val_kwargs.do_sample", True, f"{ROLLOUT}.val_kwargs.temperature", 0, unless=True)
SENT = Ignored(f"{ROLLOUT}.enable_rollout_routing_replay", False, f"{ACTOR}.fsdp_config.router_replay.mode", None)


def null_number(config: DictConfig) -> str | None:
    """Return the first setting that is null where verl, rules and resolvers compute with it; asked before them."""
    asked = [*COMPUTED_WITH]
    if OmegaConf.select(config, DYNAMIC):
        asked.append(f"{ACTOR}.ppo_max_token_len_per_gpu")
    if OmegaConf.select(config, "reward.reward_model.enable"):
        asked.append("reward.reward_model.model_path")
    return next((setting for setting in asked if OmegaConf.select(config, setting, default=0) is None), None)


@rule("value-out-of-range")
def refused_numbers(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Numbers that fail in a request, an assertion or a constructor, after everything is loaded."""
    for setting in COUNTS:
        value = OmegaConf.select(config, setting)
        if setting == "data.train_batch_size" and "async_training" in config:  # that trainer has no batches of prompts
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield Fault(setting, "verl needs at least one", "a whole number >= 1", f"Set {setting} to such a number.")
    vanilla = config.actor_rollout_ref.actor.policy_loss.get("loss_mode") == "vanilla"  # it asserts that
    for row in (*ALLOWED, Range(CLIP_C, 1, inf, above=True)) if vanilla else ALLOWED:
        value = OmegaConf.select(config, row.setting)
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else nan
        if value is not None and (not row.low <= number <= row.high or row.above and number == row.low):
            allowed = f"a number {'above' if row.above else 'from'} {row.low:g} to {row.high:g}"
            problem = "verl or vLLM refuses it: a request, the server or the first update fails"
            yield Fault(row.setting, problem, allowed, f"Set {row.setting} to such a number.")


@rule("value-unusual", "warning")
def unusual_numbers(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Numbers that are orders of magnitude from those in use."""
    actor, longest, usual = config.actor_rollout_ref.actor, config.data.max_response_length, [*USUAL]
    if actor.loss_agg_mode == NORMALISED:
        source = "arXiv 2503.20783: data.max_response_length"
        usual.append(Range(f"{ACTOR}.loss_scale_factor", longest / MANY_TIMES, longest * MANY_TIMES, source))
    for row in usual:
        value = OmegaConf.select(config, row.setting)
        if row.setting == CLIP_LOW and actor.policy_loss.get("loss_mode") == "cispo":  # any value is meant
            continue
        if isinstance(value, int | float) and value and not row.low <= value <= row.high:
            problem = f"it is orders of magnitude from the values in use ({row.source})"
            remedy = "Correct it if it is a slip; a run is not refused for it."
            yield Fault(row.setting, problem, f"usually {row.low:g} to {row.high:g}", remedy)


@rule("name-unknown")
def unknown_names(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Names that are looked up in a worker only."""
    for row in NAMES:
        known = row.known.split()
        given = ",".join(str(name) for name in names_in(config, row.setting) if name).replace(" ", "").split(",")
        # a name with a slash is a kernel of the Hugging Face hub
        wrong = ", ".join(name for name in given if name not in ("", *known) and "/" not in name)
        if wrong and (not row.when or OmegaConf.select(config, row.when) == row.value):
            severity: Severity = "warning" if row.setting == LOOP else "error"  # a module of a user's may add to these
            problem = f"there is no {wrong}: a worker raises at it, or leaves it out without a word"
            yield Fault(row.setting, problem, ", ".join(known), "Correct the name.", severity=severity)


@rule("setting-ignored", "warning")
def ignored_settings(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Settings that were changed from verl's default where nothing reads them; not where that changes nothing."""
    rows = [*IGNORED, *(MICRO_BATCHES if config.trainer.device == "cuda" else ())]
    if config.trainer.get("use_v1", True):  # its agent loop
        rows.append(GREEDY)
    if OmegaConf.select(config, "distillation.enabled"):
        rows.append(TOPK)
    watched = OmegaConf.select(config, f"{ACTOR}.fsdp_config.watch_routing")
    if config.actor_rollout_ref.actor.strategy == "fsdp2" and watched is None:
        rows.append(SENT)
    for row in rows:
        value, decides = OmegaConf.select(config, row.setting), OmegaConf.select(config, row.decider)
        same = row.default if isinstance(row.default, list) and not OmegaConf.is_list(value) else [row.default]
        alike = value == decides and not isinstance(decides, bool)  # a clip range and its two bounds; 1 is no True
        meets = (decides == row.value) is not row.unless
        if not meets or value is None or value in same or alike or not (speaker := speaker_of(config, row.setting)):
            continue
        if speaker not in USERS and preset_of(config, row.decider):  # preset-overruled says it
            continue
        if not row.unsaid or speaker != speaker_of(config, row.decider):
            problem = f"nothing reads it with {row.decider}={decides}"
            problem += f"; {row.instead} counts" if row.instead else ""
            yield Fault(row.setting, problem, str(same[0]), "Remove it, or change what keeps it from being read.")


@rule("lengths-differ")
def lengths_differ(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """The rollout's own lengths stand beside those of `data`, from which verl and the presets derive the rest."""
    effects = {
        "prompt_length": "prompts between the two lose their beginning",
        "response_length": "responses end at the rollout's, and normaliser and token budgets are made for the other",
    }
    for key, effect in effects.items():
        own, meant = config.actor_rollout_ref.rollout.get(key), config.data[f"max_{key}"]
        numbers = isinstance(own, int | float) and isinstance(meant, int | float)
        if numbers and (own < meant or own > meant and key == "response_length"):
            remedy = f"Set data.max_{key} instead: the rollout's follows."
            yield Fault(f"{ROLLOUT}.{key}", f"data.max_{key} is {meant}: {effect}", str(meant), remedy)


@rule("not-repeatable")
def not_repeatable(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """A run that seeds each request is meant to repeat: everything else that chance decides must be fixed too."""
    if not is_repeatable(config):
        return
    sampler = "trainer.v1.sampler.custom_sampler.name"
    needed: list[tuple[str, object, str]] = [
        (f"{ROLLOUT}.max_num_seqs", 1, "a batch of other sequences rounds a sequence's logits differently"),
        (f"{ROLLOUT}.enable_prefix_caching", False, "a prompt is computed in whole or in part, as requests come"),
        ("mismatch.enabled", True, "verl's own trainer names prompts at random"),
        (sampler, "SortedReplayBuffer", "a batch is in the order in which responses arrive"),
    ]
    if OmegaConf.select(config, "trainer.v1.trainer_mode") != "sync":
        needed.append(("trainer.v1.trainer_mode", "vp_sync", "a response's weights depend on the machine's speed"))
    if config.data.shuffle and config.data.seed is None:
        needed.append(("data.seed", 0, "prompts are shuffled at random"))
    for setting, value, differs in needed:
        if OmegaConf.select(config, setting) != value:
            problem = f"{SEEDED}=True asks for a run that repeats bit for bit, but {differs}"
            yield Fault(setting, problem, str(value), f"Set {setting}={value}, as +repeatable=bitwise does.")
