"""The dtypes of a composed config, and the setting that decides each dtype.

In verl 0.9.1, FSDP computes in `mixed_precision.param_dtype` (BF16 if it is not set) and never reads `dtype`. Megatron
reads `dtype`, and its optimizer keeps FP32 weights. VeOmni and TorchTitan always compute in BF16, and VeOmni's weights
are FP32 only with `mixed_precision=True`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.dtypes import DTYPES, HALF, short
from verl_precision.base.errors import ConfigurationError

FSDP = ("fsdp", "fsdp2")
ULYSSES = "ulysses_sequence_parallel_size"
ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
BYPASS, LOSS = f"{CORRECTION}.bypass_mode", f"{ACTOR}.policy_loss.loss_mode"
# Rollouts whose server, as verl uses it, returns the log-probs of a prompt and ends a response at given stop texts.
PROMPT_LOG_PROBS = ("vllm", "sglang")
# verl's V1 trainers, and the name prefix of their variants that measure the mismatch.
MODES, PREFIX = ("sync", "colocate_async", "separate_async"), "vp_"
# Our agent loop, and the keys that it reads in `rollout.custom`.
AGENT_LOOP, OF_LOOP = "vp_single_turn", ("stop", "min_p", "sampling_masks", "seeded", "mark_truncated")
SEEDED = f"{ROLLOUT}.custom.seeded"
BUFFER = "trainer.v1.sampler.custom_sampler.name"
BACKEND = f"{ROLLOUT}.checkpoint_engine.backend"
# verl's checkpoint engines that cast weights to BF16 on their way (delta_sharded in verl's FSDP engine). The others
# send weights unchanged: nccl and nixl store `rollout_dtype`, but never read it.
CASTING = ("kimi_ckpt_engine", "mooncake", "delta_sharded")
GLOO = "vp_gloo"  # ours: integration/cpu/gloo_checkpoint_engine.py
# Checkpoint engines that carry any named tensor unchanged to a `rollout.update_weights`, and so the manifest.
CARRYING = ("naive", "nccl", "nixl", GLOO)


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of each setting of a config; only an empty block counts as a setting."""
    if not isinstance(node, Mapping) or not node:
        yield path, node
        return
    for key, value in node.items():
        yield from leaves(value, f"{path}.{key}" if path else str(key))


def content_of(value: Any, resolve: bool = True) -> Any:
    """Return a block of a config as a dictionary or list, and any other value as it is."""
    return OmegaConf.to_container(value, resolve=resolve) if OmegaConf.is_config(value) else value


@dataclass(frozen=True)
class Engine:
    """One of verl's training-side engines as configured."""

    role: str  # actor, ref or critic
    setting: str  # path of its config node
    node: DictConfig  # that node
    optim: DictConfig | None  # settings of its optimizer, or None for the reference
    strategy: str  # verl's strategy
    compute: str  # dtype of forward and backward
    reduce: str  # dtype of the gradient reduction
    master: str  # dtype of the parameters the optimizer updates
    source: str  # the setting that `compute` comes from
    sources: tuple[str, str]  # the settings that `master` and `reduce` come from
    ours: bool  # whether it is this package's engine, which has its own settings and guards
    ulysses: tuple[str, int]  # setting that splits sequences over ranks, and the number of ranks

    @property
    def trains(self) -> bool:
        """Whether an optimizer updates the engine's weights."""
        return self.optim is not None

    @property
    def our_fsdp(self) -> bool:
        """Whether it is this package's FSDP engine, with FP32 log-probs, a shadow, router replay and exact weights."""
        return self.strategy in FSDP and self.ours

    @property
    def verls_fsdp(self) -> bool:
        """Whether it is verl's own FSDP engine."""
        return self.strategy in FSDP and not self.ours

    @property
    def half_master(self) -> bool:
        """Whether one of torch's optimizers updates 16-bit weights; our engine has its own error for that."""
        optimizer = (self.optim or {}).get("optimizer_impl", "torch.optim")  # torchao's support it
        return self.verls_fsdp and self.master in HALF and self.trains and optimizer.startswith("torch.optim")


def engines(config: DictConfig) -> list[Engine]:
    """Return the engines that verl will start, the actor first."""
    model = config.actor_rollout_ref
    found = [_engine("actor", "actor_rollout_ref.actor", model.actor)]
    asked = config.algorithm.get("use_kl_in_reward") or model.actor.use_kl_loss  # verl's need_reference_policy
    if asked and not lora_rank(config) and not model.model.get("lora_adapter_path"):  # LoRA: actor without adapter
        found.append(_engine("ref", "actor_rollout_ref.ref", model.ref))
    # as in verl's need_critic, which also warns
    enabled = config.critic.get("enable")
    if enabled or (enabled is None and config.algorithm.adv_estimator == "gae"):
        found.append(_engine("critic", "critic", config.critic))
    return found


def _engine(role: str, path: str, owner: DictConfig) -> Engine:
    strategy = str(owner.strategy)
    key = strategy
    if strategy in FSDP:
        key = "fsdp" if role == "critic" else "fsdp_config"
    node = owner.get(key) or DictConfig({})
    setting, optim = f"{path}.{key}", owner.get("optim") if role != "ref" else None
    compute, reduce, master = "bf16", "fp32", "fp32"
    source, sources = f"{path}.strategy={strategy} (BF16 is hard-wired)", (f"{path}.strategy={strategy}",) * 2
    if strategy in FSDP:
        mixed = node.get("mixed_precision") or {}
        compute, reduce = short(mixed.get("param_dtype", "bf16")), short(mixed.get("reduce_dtype", "fp32"))
        master = short(node.get("model_dtype") or ("bf16" if role == "ref" else "fp32"))
        source = f"{setting}.mixed_precision.param_dtype" + ("" if "param_dtype" in mixed else " (not set: BF16)")
        sources = f"{setting}.model_dtype", f"{setting}.mixed_precision.reduce_dtype"
    elif strategy == "megatron":
        compute, source = short(node.get("dtype", "bf16")), f"{setting}.dtype"
        aware = optim is not None and bool(optim.get("use_precision_aware_optimizer"))
        low = short((optim or {}).get("main_grads_dtype", "fp32")) if aware else "fp32"
        in_fp32 = (node.get("override_ddp_config") or {}).get("grad_reduce_in_fp32", low == "fp32")
        reduce, master = "fp32" if in_fp32 else low, "fp32" if optim is not None else compute
        whose = "Megatron's optimizer" if optim is not None else f"{setting}.dtype"
        sources = whose, f"{setting}.override_ddp_config.grad_reduce_in_fp32"
    elif strategy == "veomni":
        master = "fp32" if node.get("mixed_precision") else "bf16"
        sources = f"{setting}.mixed_precision", f"{path}.strategy={strategy}"
    ours = str(node.get("_target_", "")).startswith("verl_precision.")
    # verl uses the first setting, which it calls deprecated, if its value is above 1
    own = {"veomni": "ulysses_parallel_size", "megatron": "context_parallel_size"}.get(strategy, ULYSSES)
    sizes = {f"{path}.{ULYSSES}": int(owner.get(ULYSSES) or 1), f"{setting}.{own}": int(node.get(own) or 1)}
    ulysses = max(sizes.items(), key=lambda each: each[1])
    return Engine(role, setting, node, optim, strategy, compute, reduce, master, source, sources, ours, ulysses)


def engine_kwargs(config: DictConfig) -> DictConfig:
    """Return the arguments that verl passes unchanged to the rollout engine; they override verl's own."""
    rollout = config.actor_rollout_ref.rollout
    return (rollout.get("engine_kwargs") or {}).get(rollout.name) or DictConfig({})


def rollout_dtype(config: DictConfig) -> str:
    """Return the rollout's dtype; `auto` where vLLM takes it from the model."""
    return short(engine_kwargs(config).get("dtype", config.actor_rollout_ref.rollout.dtype))


def other_trainer(config: DictConfig) -> str | None:
    """Return the program, or the setting, with which verl does not start a V1 trainer; None if it starts one."""
    if "async_training" in config:
        return "verl.experimental.fully_async_policy.fully_async_main"
    if OmegaConf.select(config, "rollout.nnodes") is not None:  # the rollout has GPUs of its own
        return "verl.experimental.one_step_off_policy.main_ppo"
    return None if config.trainer.get("use_v1", True) else "trainer.use_v1=False"


def trainer_to_start(config: DictConfig) -> str:
    """Return the name of the V1 trainer that a run starts: the measuring variant if `mismatch.enabled` is True."""
    mode = str(OmegaConf.select(config, "trainer.v1.trainer_mode"))
    measured = OmegaConf.select(config, "mismatch.enabled") is True and not other_trainer(config)
    return PREFIX + mode if measured and mode in MODES else mode


def teaches(config: DictConfig) -> bool:
    """Return whether the run distils a teacher's log-probs into the policy."""
    return bool(OmegaConf.select(config, "distillation.enabled"))


def sync_backend(config: DictConfig) -> str:
    """Return the checkpoint engine that sends weights to the rollout; `naive` for V1 trainers on the rollout's GPUs."""
    beside = not other_trainer(config) and not str(config.trainer.v1.trainer_mode).endswith("separate_async")
    return "naive" if beside else str(OmegaConf.select(config, BACKEND) or "naive")


def quantisations(config: DictConfig) -> dict[str, str]:
    """Return setting -> vLLM's name of the format, for weights or cache that the rollout keeps in under 16 bits."""
    kwargs = engine_kwargs(config)
    weights = kwargs.get("quantization") or config.actor_rollout_ref.rollout.get("quantization")
    place = "engine_kwargs.vllm.quantization" if kwargs.get("quantization") else "quantization"
    named = {place: weights, "engine_kwargs.vllm.kv_cache_dtype": kwargs.get("kv_cache_dtype")}
    return {f"{ROLLOUT}.{k}": str(v) for k, v in named.items() if v is not None and short(v) not in (*DTYPES, "auto")}


def lora_is_merged(config: DictConfig) -> bool:
    """Return whether LoRA weights are merged into the base before they are sent to the rollout."""
    return lora_rank(config) > 0 and bool((config.actor_rollout_ref.model.get("lora") or {}).get("merge"))


def uses_adapter(config: DictConfig) -> bool:
    """Return whether the rollout serves a LoRA adapter beside its base weights."""
    return lora_rank(config) > 0 and not lora_is_merged(config)


def lora_rank(config: DictConfig) -> int:
    """Return the rank of the LoRA adapters; 0 without them."""
    model = config.actor_rollout_ref.model
    return int(model.get("lora_rank") or (model.get("lora") or {}).get("rank") or 0)


def transport_dtype(config: DictConfig) -> tuple[str, str]:
    """Return the dtype of weights on their way to the rollout, and the setting that decides it."""
    actor = engines(config)[0]
    backend = sync_backend(config)
    if backend in CASTING:
        return "bf16", f"{BACKEND}={backend} (verl casts weights to BF16 there)"
    if lora_is_merged(config) and actor.verls_fsdp:
        return "bf16", "actor_rollout_ref.model.lora.merge=True (verl casts merged weights to BF16)"
    if actor.our_fsdp and OmegaConf.select(config, "weight_sync.rounding") == "stochastic":
        return rollout_dtype(config), "weight_sync.rounding=stochastic (before they leave)"
    if actor.strategy == "megatron":
        return actor.compute, f"{actor.source} (Megatron sends the weights it computes with)"
    return actor.master, "the master weights' own; the rollout casts on arrival"


def missing_log_probs(problem: str) -> ConfigurationError:
    """Return the error for a rollout that does not return its log-probs."""
    setting = f"{ROLLOUT}.calculate_log_probs"
    return ConfigurationError(problem, setting=setting, value=False, allowed="True", remedy=f"Set {setting}=True.")


def is_repeatable(config: DictConfig) -> bool:
    """Return whether a run must repeat bit for bit."""
    return OmegaConf.select(config, SEEDED) is True
