"""Rules of a GPU's memory: the arithmetic of docs/scales.md, on the settings at hand and before they cost an hour.

The arithmetic is good to a few GiB. A peak above nine tenths of a GPU is therefore a warning, and one above eleven
tenths an error. It knows FSDP without a critic; of anything else the verdict says that memory was not looked at.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.verl_config import FSDP, engine_kwargs, engines, lora_rank, rollout_dtype
from verl_precision.check.rules import gpu_memory as gpu
from verl_precision.check.rules.rule import Environment, Faults, Severity, rule, told

FILLED, FAR_OVER = 0.9, 1.1  # Shares of a GPU: the arithmetic is good to some GiB either way.
GPU_RULES = ("memory-training", "memory-rollout")  # the rules of a GPU below
ROUTING_GIB = 64  # GiB that router replay may take of a host: an eighth of those that recipes/README.md asks for.
BUDGET = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
MICRO_BATCH = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
SHARE = "actor_rollout_ref.rollout.gpu_memory_utilization"
NO_SYNC = "actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation"
SENT = "actor_rollout_ref.rollout.enable_rollout_routing_replay"


@dataclass(frozen=True)
class Layout:
    """What the settings make of a model on one GPU."""

    config: DictConfig
    model: gpu.ModelShape
    memory: int  # bytes of the GPU
    gpus: int  # number of GPUs over which the state is sharded
    longest: int  # tokens of the longest sequence
    tokens: int  # tokens of the largest micro-batch on one GPU
    width: int  # bytes of a number of the actor's forward
    on_host: bool  # whether the state lives on the host
    state: int  # bytes of the trainer's and the reference's state on a GPU while the trainer works
    kept: int  # bytes a parameter of the trainer's state on a GPU while vLLM works
    unreduced: int  # bytes of whole gradients that wait for the last micro-batch of a mini-batch
    awake: int  # bytes of a vLLM that gives nothing back while the trainer works

    @cached_property
    def training(self) -> dict[str, int]:
        """Bytes of each part of a GPU while the trainer works."""
        return {
            "weights, gradients and Adam's moments": self.state,
            "whole gradients until the last micro-batch": self.unreduced,
            "gathered layers": gpu.gathered_bytes(self.model, self.width),
            "activations": self.activations(self.tokens),
            "CUDA, NCCL and a sleeping vLLM": gpu.REST,
            "a vLLM that keeps its memory": self.awake,
        }

    def activations(self, tokens: int) -> int:
        """Return bytes of a micro-batch of some tokens."""
        model = self.config.actor_rollout_ref.model
        checkpointing = bool(model.get("enable_gradient_checkpointing", True))
        used = gpu.activation_bytes(self.model, tokens, self.width, checkpointing)
        if (model.get("override_config") or {}).get("attn_implementation") == "sdpa" and model.use_remove_padding:
            used += (gpu.MASK if self.width == gpu.HALF else gpu.MASK_FP32) * tokens * tokens
        return used

    def savings(self) -> list[str]:
        """Return the settings that would save memory of the trainer, and are not on."""
        model = "actor_rollout_ref.model.enable_gradient_checkpointing=True"
        checkpointing = OmegaConf.select(self.config, model.partition("=")[0])
        found = [] if checkpointing else [model]
        found += [] if self.on_host else ["actor_rollout_ref.actor.fsdp_config.offload_policy=True"]
        found += [f"{NO_SYNC}=False"] if self.unreduced else []
        found += ["actor_rollout_ref.rollout.free_cache_engine=True"] if self.awake else []
        return [*found, "a precision of 16 bits"] if self.width == gpu.SINGLE else found

    def largest_budget(self) -> int:
        """Return the most tokens of a micro-batch that leave a tenth of the GPU free."""
        fixed = sum(self.training.values()) - self.training["activations"]
        low, high = 0, self.tokens
        while low < high:
            middle = (low + high + 1) // 2
            fits = fixed + self.activations(middle) <= FILLED * self.memory
            low, high = (middle, high) if fits else (low, middle - 1)
        return low


def beyond_arithmetic(config: DictConfig) -> str:
    """Return the setting because of which the arithmetic does not hold for a run on GPUs; empty if it does."""
    engine, *others = engines(config)
    if engine.strategy not in FSDP:
        return "actor_rollout_ref.actor.strategy"
    if any(other.role == "critic" for other in others):
        return "critic.enable"
    if "rollout" in config:  # a main whose rollout has GPUs of its own
        return "rollout.nnodes"
    if str(OmegaConf.select(config, "trainer.v1.trainer_mode")).endswith("separate_async"):
        return "trainer.v1.trainer_mode"
    return "" if config.trainer.device in ("cuda", "cpu") else "trainer.device"


def layout_of(config: DictConfig, environment: Environment) -> Layout | None:
    """Return the layout of a run on GPUs, or None where the arithmetic does not hold or something is not known."""
    engine, *others = engines(config)
    if beyond_arithmetic(config) or config.trainer.device == "cpu":
        return None
    model, memory = environment.shape, gpu_bytes(config, environment)
    if model is None or memory is None:
        return None
    actor, trainer, fsdp, lora = config.actor_rollout_ref.actor, config.trainer, engine.node, lora_rank(config)
    all_gpus, size = trainer.nnodes * trainer.n_gpus_per_node, fsdp.get("fsdp_size", -1)
    gpus = max(size if 0 < size < all_gpus else all_gpus, 1)
    longest = config.data.max_prompt_length + config.data.max_response_length
    _, parallel = engine.ulysses
    sequences = actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n // max(all_gpus // parallel, 1)
    of_mini_batch = -(-sequences * longest // parallel)
    if actor.use_dynamic_bsz:
        tokens = min(actor.ppo_max_token_len_per_gpu, of_mini_batch)
    else:
        micro_batch = actor.ppo_micro_batch_size_per_gpu or actor.ppo_micro_batch_size
        tokens = (micro_batch or sequences) * longest // parallel
    state = kept = 0
    if not (on_host := engine.strategy == "fsdp2" and bool(fsdp.get("offload_policy"))):
        # of frozen weights there are neither gradients nor moments, and no reference of its own
        state = gpu.state_bytes(model, gpus, gpu.SINGLE if lora else gpu.STATE)
        state += gpu.state_bytes(model, gpus, gpu.SINGLE) if others and not lora else 0
        kept = 0 if fsdp.get("param_offload") else gpu.SINGLE
        kept += 0 if fsdp.get("optimizer_offload") or lora else 2 * gpu.SINGLE
    width = gpu.SINGLE if engine.compute == "fp32" else gpu.HALF
    unreduced = 0
    if fsdp.get("use_no_sync_for_gradient_accumulation", True) and tokens < of_mini_batch and not lora:
        # FSDP2 adds them up in the dtype of the reduction (`to_accumulated_grad_if_needed` of torch's `_fsdp_param.py`)
        unreduced = (gpu.SINGLE if engine.strategy == "fsdp2" and engine.reduce == "fp32" else width) * model.parameters
    awake = 0 if config.actor_rollout_ref.rollout.get("free_cache_engine", True) else int(_share(config) * memory)
    return Layout(config, model, memory, gpus, longest, tokens, width, on_host, state, kept, unreduced, awake)


def gpu_bytes(config: DictConfig, environment: Environment) -> int | None:
    """Return the memory of the GPU that a run is meant for: by its name, or by the scale that was chosen."""
    if environment.gpus:
        known = [gpu.gpu_memory(name) for name in environment.gpus]
        return None if None in known else min(known)  # type: ignore[type-var]
    return gpu.gpu_memory(chosen_scale(config).replace("_", " "))


def chosen_scale(config: DictConfig) -> str:
    """Return the name of the scale that was chosen; empty for none."""
    choices = OmegaConf.select(config, "hydra.runtime.choices") or {}
    return next((str(choice) for group, choice in choices.items() if group.partition("@")[0] == "scale"), "")


def _share(config: DictConfig) -> float:
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization
    return min(float(engine_kwargs(config).get("gpu_memory_utilization", share)), 1.0)  # vllm-refuses-setting


def _judged(peak: int, memory: int) -> Severity | Literal[""]:
    """Return how serious a peak is; empty if it is not."""
    if peak > FAR_OVER * memory:
        return "error"
    return "warning" if peak > FILLED * memory else ""


def _sum(parts: dict[str, int], memory: int) -> str:
    terms = " + ".join(f"{size / gpu.GIB:.0f} ({name})" for name, size in parts.items() if size)
    return f"{terms} = {sum(parts.values()) / gpu.GIB:.0f} GiB of the GPU's {memory / gpu.GIB:.0f}, by arithmetic"


@rule("memory-training", about="the trainer's memory")
def memory_training(config: DictConfig, environment: Environment) -> Faults:
    """State, gathered layers and activations of the trainer fit into a GPU."""
    layout = layout_of(config, environment)
    if layout is None or not (severity := _judged(peak := sum(layout.training.values()), layout.memory)):
        return
    said: dict[str, Any] = {"severity": severity, "layout": layout, "needs": _sum(layout.training, layout.memory)}
    if layout.unreduced and not _judged(peak - layout.unreduced, layout.memory):
        yield told("memory-training unreduced", **said)
        return
    dynamic, largest = config.actor_rollout_ref.actor.use_dynamic_bsz, layout.largest_budget()
    _, parallel = engines(config)[0].ulysses
    smallest = -(-layout.longest // parallel)
    setting, most = (BUDGET, largest) if dynamic else (MICRO_BATCH, largest // max(smallest, 1))
    if largest >= smallest:
        yield told("memory-training fits", setting=setting, most=most, **said)
        return
    savings = ", ".join([*layout.savings(), "or"])
    yield told("memory-training", setting=setting, savings=savings, **said)


@rule("memory-rollout", about="vLLM's memory")
def memory_rollout(config: DictConfig, environment: Environment) -> Faults:
    """vLLM's share fits beside the trainer's state, and a response of full length fits into it."""
    layout, rollout = layout_of(config, environment), config.actor_rollout_ref.rollout
    if layout is None:
        return
    model, memory, share = layout.model, layout.memory, _share(config)
    beside = gpu.rollout_bytes(model, layout.gpus, 0, memory, layout.kept)
    width = gpu.SINGLE if rollout_dtype(config) == "fp32" else gpu.HALF
    longest = rollout.max_model_len or layout.longest
    parallel = max(rollout.tensor_model_parallel_size, 1)  # value-out-of-range
    most = int(100 * (FILLED - beside / memory)) / 100
    if severity := _judged(beside + int(share * memory), memory):
        parts = {
            "vLLM's share": int(share * memory),
            "the trainer's state": beside - gpu.REST,
            "CUDA and NCCL": gpu.REST,
        }
        case = "share" if most > 0 else "no share"
        yield told(f"memory-rollout {case}", severity=severity, parts=_sum(parts, memory), most=most)
    elif gpu.kv_tokens(model, parallel, share, memory, width) < longest:
        weights = width * model.parameters / parallel / gpu.GIB
        yield told("memory-rollout sequence", weights=weights, longest=longest, most=most, parallel=parallel)


@rule("router-replay-memory", "warning", about="the memory of router replay")
def router_replay_memory(config: DictConfig, environment: Environment) -> Faults:
    """The experts that a step's tokens went through lie in the hosts' memory, in TransferQueue, until it ends."""
    data, model = config.data, environment.shape if OmegaConf.select(config, SENT) else None
    if model is None or model.experts == 1:
        return
    tokens = data.train_batch_size * config.actor_rollout_ref.rollout.n
    tokens *= data.max_prompt_length + data.max_response_length
    held = gpu.routing_bytes(model, tokens)
    if (of_host := held / gpu.GIB / max(config.trainer.nnodes, 1)) > ROUTING_GIB:
        yield told(
            "router-replay-memory", gigabytes=held / 1e9, each=gpu.routing_bytes(model, 1), of_host=of_host,
            routing_gib=ROUTING_GIB,
        )  # fmt: skip
