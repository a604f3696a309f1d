"""Rules of a GPU's memory: the arithmetic of docs/scales.md, on the settings at hand and before they cost an hour.

The arithmetic is good to a few GiB. A peak above nine tenths of a GPU is therefore a warning, and one above eleven
tenths an error. It knows FSDP without a critic; of anything else the verdict says that memory was not looked at.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.verl_config import FSDP, Engine, engine_kwargs, engines, lora_rank, rollout_dtype
from verl_precision.check.rules import gpu_memory as gpu
from verl_precision.check.rules.rule import Environment, Fault, Severity, rule

FILLED, FAR_OVER = 0.9, 1.1  # Shares of a GPU: the arithmetic is good to some GiB either way.
GPU_RULES = ("memory-training", "memory-rollout")  # the rules of a GPU below
ROUTING_GIB = 64  # GiB that router replay may take of a host: an eighth of those that recipes/README.md asks for.
FSDP_CONFIG = "actor_rollout_ref.actor.fsdp_config"
BUDGET = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
MICRO_BATCH = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
ROLLOUT = "actor_rollout_ref.rollout"
SHARE = f"{ROLLOUT}.gpu_memory_utilization"
NO_SYNC = f"{FSDP_CONFIG}.use_no_sync_for_gradient_accumulation"
OFFLOAD = f"{FSDP_CONFIG}.offload_policy=True"
SENT = f"{ROLLOUT}.enable_rollout_routing_replay"


@dataclass(frozen=True)
class Layout:
    """What the settings make of a model on one GPU."""

    config: DictConfig
    model: gpu.ModelShape
    memory: int  # bytes of the GPU
    gpus: int  # number of GPUs over which the state is sharded
    tokens: int  # tokens of the largest micro-batch on one GPU
    longest: int  # tokens of the longest sequence on one GPU
    width: int  # bytes of a number of the actor's forward
    state: int  # bytes of the trainer's and the reference's state on a GPU while the trainer works; 0: on the host
    kept: int  # bytes a parameter of the trainer's state on a GPU while vLLM works
    unreduced: int  # bytes of whole gradients that wait for the last micro-batch of a mini-batch
    share: float  # of the GPU, for vLLM

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

    @property
    def awake(self) -> int:
        """Bytes of a vLLM that gives nothing back while the trainer works."""
        sleeps = self.config.actor_rollout_ref.rollout.get("free_cache_engine", True)
        return 0 if sleeps else int(self.share * self.memory)

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
        checkpointing = "actor_rollout_ref.model.enable_gradient_checkpointing"
        possible = {
            f"{checkpointing}=True": not OmegaConf.select(self.config, checkpointing),
            OFFLOAD: self.state,
            f"{NO_SYNC}=False": self.unreduced,
            f"{ROLLOUT}.free_cache_engine=True": self.awake,
            "a precision of 16 bits": self.width == gpu.SINGLE,
        }
        return [saving for saving, helps in possible.items() if helps]

    def largest_budget(self) -> int:
        """Return the most tokens of a micro-batch that leave a tenth of the GPU free."""
        free = FILLED * self.memory - sum(self.training.values()) + self.training["activations"]
        return bisect.bisect_right(range(1, self.tokens + 1), free, key=self.activations)


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
    if beyond_arithmetic(config) or config.trainer.device == "cpu":
        return None
    model, memory = environment.shape, gpu_bytes(config, environment)
    if model is None or memory is None:
        return None
    engine, *others = engines(config)
    all_gpus, size = config.trainer.nnodes * config.trainer.n_gpus_per_node, engine.node.get("fsdp_size", -1)
    gpus = max(size if 0 < size < all_gpus else all_gpus, 1)
    tokens, of_mini_batch, longest = _tokens(config, engine, all_gpus)
    width = gpu.SINGLE if engine.compute == "fp32" else gpu.HALF
    state, kept = _state(engine, bool(lora_rank(config)), bool(others))
    waits = engine.node.get("use_no_sync_for_gradient_accumulation", True) and tokens < of_mini_batch
    # FSDP2 adds them up in the dtype of the reduction (`to_accumulated_grad_if_needed` of torch's `_fsdp_param.py`)
    summed = gpu.SINGLE if engine.strategy == "fsdp2" and engine.reduce == "fp32" else width
    unreduced = summed * model.parameters if waits and not lora_rank(config) else 0
    share = engine_kwargs(config).get("gpu_memory_utilization", OmegaConf.select(config, SHARE))
    return Layout(
        config, model, memory, gpus, tokens, longest, width, gpu.state_bytes(model, gpus, state), kept, unreduced,
        min(float(share), 1.0),
    )  # fmt: skip


def _tokens(config: DictConfig, engine: Engine, gpus: int) -> tuple[int, int, int]:
    """Return tokens on one GPU of the largest micro-batch, of a mini-batch, and of the longest sequence."""
    actor, (_, parallel) = config.actor_rollout_ref.actor, engine.ulysses
    longest = config.data.max_prompt_length + config.data.max_response_length
    sequences = actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n // max(gpus // parallel, 1)
    of_mini_batch = -(-sequences * longest // parallel)
    if actor.use_dynamic_bsz:
        tokens = min(actor.ppo_max_token_len_per_gpu, of_mini_batch)
    else:
        micro_batch = actor.ppo_micro_batch_size_per_gpu or actor.ppo_micro_batch_size
        tokens = (micro_batch or sequences) * longest // parallel
    return tokens, of_mini_batch, -(-longest // parallel)


def _state(engine: Engine, adapter: bool, reference: bool) -> tuple[int, int]:
    """Return bytes a parameter of the trainer's state on a GPU while the trainer works, and while vLLM does."""
    if engine.strategy == "fsdp2" and engine.node.get("offload_policy"):
        return 0, 0
    weights = 0 if engine.node.get("param_offload") else gpu.SINGLE
    if adapter:  # of frozen weights there are neither gradients nor moments, and no reference of its own
        return gpu.SINGLE, weights
    moments = 0 if engine.node.get("optimizer_offload") else 2 * gpu.SINGLE
    return gpu.STATE + (gpu.SINGLE if reference else 0), weights + moments


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


def _judged(peak: int, memory: int) -> Severity | Literal[""]:
    """Return how serious a peak is; empty if it is not."""
    if peak > FAR_OVER * memory:
        return "error"
    return "warning" if peak > FILLED * memory else ""


def _sum(parts: dict[str, int], memory: int) -> str:
    terms = " + ".join(f"{size / gpu.GIB:.0f} ({name})" for name, size in parts.items() if size)
    return f"{terms} = {sum(parts.values()) / gpu.GIB:.0f} GiB of the GPU's {memory / gpu.GIB:.0f}, by arithmetic"


@rule("memory-training", about="the trainer's memory")
def memory_training(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """State, gathered layers and activations of the trainer fit into a GPU."""
    layout = layout_of(config, environment)
    if layout is None or not (severity := _judged(peak := sum(layout.training.values()), layout.memory)):
        return
    problem = f"a micro-batch of {layout.tokens} tokens needs {_sum(layout.training, layout.memory)}"
    if layout.unreduced and not _judged(peak - layout.unreduced, layout.memory):
        yield Fault(NO_SYNC, problem, "False", severity=severity)
        return
    dynamic, largest = config.actor_rollout_ref.actor.use_dynamic_bsz, layout.largest_budget()
    setting, most = (BUDGET, largest) if dynamic else (MICRO_BATCH, largest // max(layout.longest, 1))
    allowed, remedy = f"at most {most}", f"Set {setting}={most}."
    if largest < layout.longest:
        allowed = f"what one sequence of {layout.longest} tokens a GPU needs does not fit"
        remedy = f"Take more GPUs, {', '.join([*layout.savings(), 'or'])} a shorter data.max_response_length."
    yield Fault(setting, problem, allowed, remedy, severity=severity)


@rule("memory-rollout", about="vLLM's memory")
def memory_rollout(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """vLLM's share fits beside the trainer's state, and a response of full length fits into it."""
    layout, rollout = layout_of(config, environment), config.actor_rollout_ref.rollout
    if layout is None:
        return
    model, memory, of_vllm = layout.model, layout.memory, int(layout.share * layout.memory)
    beside = gpu.rollout_bytes(model, layout.gpus, 0, memory, layout.kept)
    width = gpu.SINGLE if rollout_dtype(config) == "fp32" else gpu.HALF
    longest = rollout.max_model_len or config.data.max_prompt_length + config.data.max_response_length
    parallel = max(rollout.tensor_model_parallel_size, 1)  # value-out-of-range
    most = int(100 * (FILLED - beside / memory)) / 100
    if severity := _judged(beside + of_vllm, memory):
        parts = {"vLLM's share": of_vllm, "the trainer's state": beside - gpu.REST, "CUDA and NCCL": gpu.REST}
        allowed, first = f"at most {most:.2f}", f"Set {SHARE}={most:.2f}"
        if most <= 0:
            allowed, first = "no share: the trainer's state leaves no room", "Take more GPUs"
        problem = f"while vLLM works it takes {_sum(parts, memory)}"
        yield Fault(SHARE, problem, allowed, f"{first}, or offload the state: {OFFLOAD}.", severity=severity)
    elif gpu.kv_tokens(model, parallel, layout.share, memory, width) < longest:
        weights = f"{width * model.parameters / parallel / gpu.GIB:.0f} GiB of weights"
        problem = f"{weights} and a tenth for vLLM leave no room for a sequence of {longest} tokens"
        remedy = f"Raise it, or double {ROLLOUT}.tensor_model_parallel_size ({parallel})."
        yield Fault(SHARE, problem, f"up to {most:.2f}, or more GPUs a replica", remedy)


@rule("router-replay-memory", "warning", about="the memory of router replay")
def router_replay_memory(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """The experts that a step's tokens went through lie in the hosts' memory, in TransferQueue, until it ends."""
    data, model = config.data, environment.shape if OmegaConf.select(config, SENT) else None
    if model is None or model.experts == 1:
        return
    tokens = data.train_batch_size * config.actor_rollout_ref.rollout.n
    held = gpu.routing_bytes(model, tokens * (data.max_prompt_length + data.max_response_length))
    if (of_host := held / gpu.GIB / max(config.trainer.nnodes, 1)) > ROUTING_GIB:
        problem = f"if all responses have full length, TransferQueue holds {held / 1e9:.0f} GB of choices of experts "
        problem += f"({gpu.routing_bytes(model, 1)} bytes a token) until the step ends: {of_host:.0f} GiB a host"
        remedy = "Have that much free, take more hosts or a smaller data.train_batch_size, or no router_replay."
        yield Fault(SENT, problem, f"at most {ROUTING_GIB} GiB a host", remedy)
