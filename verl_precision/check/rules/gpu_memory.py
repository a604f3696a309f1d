"""Estimates the GPU memory of a run from the model's shape: the numbers of docs/scales.md.

The estimate is accurate to some GiB: allocators fragment, kernels keep workspaces. A peak above nine tenths of a GPU is
therefore a warning, and a peak above eleven tenths an error. Only the logits were measured on a GPU. For a run beyond
the arithmetic (a critic, other engines than FSDP) the verdict lists memory as not looked at.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.verl_config import ACTOR, FSDP, Engine, engine_kwargs, engines, lora_rank
from verl_precision.check.rules.rule import Environment, Fault, Severity, rule

FILLED, FAR_OVER = 0.9, 1.1  # shares of a GPU: the estimate is accurate to some GiB
OF_GPU = "memory-training"  # name of the rule below
OFFLOAD = f"{ACTOR}.fsdp_config.offload_policy=True"
GIB = 1 << 30
HALF, SINGLE = 2, 4  # bytes
STATE = 4 * SINGLE  # FP32 master weight, gradient, Adam's two moments
# One transformer layer being recomputed: 34 bytes a token and hidden element in 16 bits (Korthikanti et al. 2022,
# arXiv:2205.05198, section 4.1, without the attention matrix, which flash-attn does not keep).
LAYER_ACTIVATIONS = 34
# FP32 arrays of one chunk's logits that exist at once, measured on an H100; `log_prob_chunk_tokens` of the presets
CHUNK_TOKENS, CHUNK_COPIES = 512, 5
REST = 6 * GIB  # CUDA context, NCCL, fragmentation, and what vLLM keeps while it sleeps
# Of sdpa's mask for packed sequences: a byte an element, and 4 more in FP32 while a layer attends (docs/precision.md).
MASK, MASK_FP32 = 1, 5
# Memory in GiB of GPUs whose name does not contain it, by a word of the name (makers' data sheets).
GPU_GIB = {
    **{"B200": 180, "GB200": 186},
    **{"A100": 80, "A800": 80, "H100": 80, "H800": 80, "H20": 96, "H200": 141},
    **{"A40": 48, "L40": 48, "L40S": 48, "A10": 24, "A10G": 24, "A30": 24, "L4": 24, "T4": 16},
}


@dataclass(frozen=True)
class ModelShape:
    """A transformer, as its `config.json` says."""

    layers: int
    hidden: int
    vocabulary: int  # size of the vocabulary
    heads: int  # heads of queries
    kv_heads: int  # heads of keys and values
    head_dim: int  # size of a head
    intermediate: int  # inner size of one (expert's) MLP
    experts: int = 1  # number of experts; 1 for a dense model
    experts_per_token: int = 1  # experts that each token uses
    tied: bool = False  # whether the output head is the embedding

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer; norms and biases are left out (below 0.1%)."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        router = self.hidden * self.experts if self.experts > 1 else 0
        return attention + router + 3 * self.experts * self.hidden * self.intermediate

    @property
    def ends_parameters(self) -> int:
        """Parameters of embedding and output head."""
        return (1 if self.tied else 2) * self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.layers * self.layer_parameters + self.ends_parameters


def shape_of(described: Mapping[str, Any]) -> ModelShape | None:
    """Return the shape of a decoder from the content of its `config.json`; None if too little is there."""
    keys = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "intermediate_size")
    if any(not isinstance(described.get(key), int) for key in keys) or "kv_lora_rank" in described:
        return None  # latent attention has other weights
    layers, hidden, vocabulary, heads, intermediate = (described[key] for key in keys)
    experts = described.get("num_experts") or described.get("num_local_experts") or 1
    sizes = (layers, hidden, vocabulary, heads)
    return ModelShape(
        *sizes,
        described.get("num_key_value_heads") or heads,
        described.get("head_dim") or hidden // heads,
        (described.get("moe_intermediate_size") or intermediate) if experts > 1 else intermediate,
        experts,
        described.get("num_experts_per_tok") or 1,
        bool(described.get("tie_word_embeddings")),
    )


def gpu_memory(name: str) -> int | None:
    """Return the bytes of memory of a GPU by the driver's name or a part of it; None for an unknown GPU."""
    if said := re.search(r"(\d+) ?GB", name):
        return int(said[1]) * GIB
    known = [GPU_GIB[word] for word in re.findall(r"\w+", name.upper()) if word in GPU_GIB]
    return known[0] * GIB if known else None


def require_known_gpu(name: str) -> str:
    """Return the name of a GPU that a user chose; refuse it if its memory is neither in the table nor in the name."""
    if gpu_memory(name) is None:
        allowed = f"{', '.join(sorted(GPU_GIB))}, or a name with its memory, such as 'RTX 6000 48GB'"
        raise ConfigurationError("this GPU is not in the table", setting="--gpu", value=name, allowed=allowed)
    return name


def state_bytes(model: ModelShape, gpus: int, width: int = STATE) -> int:
    """Return the bytes on each GPU of a state that is sharded over GPUs, with `width` bytes a parameter."""
    return width * model.parameters // gpus


def gathered_bytes(model: ModelShape, width: int = HALF) -> int:
    """Return the bytes on each GPU of the numbers that FSDP2 gathers, with `width` bytes a number.

    Embedding and head stay, with their gradient and its FP32 copy for the reduction: 2 + 2 + 4 in 16 bits.
    Of the layers, two are there at a time (one in use, one on its way), and one gradient: 2 x 2 + 2 + 4.
    """
    copy = SINGLE if width == HALF else 0
    return (2 * width + copy) * model.ends_parameters + (3 * width + copy) * model.layer_parameters


def activation_bytes(model: ModelShape, tokens: int, width: int = HALF, checkpointing: bool = True) -> int:
    """Return the bytes of activations of a micro-batch.

    The input of each layer; one layer recomputed, or all layers without checkpointing; with experts also each token's
    copies into and inside its experts; logits and their gradient; one FP32 chunk.
    """
    inputs = width * model.layers * model.hidden * tokens
    layer = LAYER_ACTIVATIONS * width // HALF * model.hidden * tokens
    if model.experts > 1:
        layer += width * model.experts_per_token * (2 * model.hidden + 3 * model.intermediate) * tokens
    logits = 2 * width * model.vocabulary * tokens
    kept = 1 if checkpointing else model.layers
    return inputs + kept * layer + logits + CHUNK_COPIES * SINGLE * CHUNK_TOKENS * model.vocabulary


def beyond_arithmetic(config: DictConfig) -> str:
    """Return the setting because of which the arithmetic does not hold for a run on GPUs; empty if it does."""
    engine, *others = engines(config)
    if engine.strategy not in FSDP:
        return f"{ACTOR}.strategy"
    if any(other.role == "critic" for other in others):
        return "critic.enable"
    if "rollout" in config:  # a main whose rollout has GPUs of its own
        return "rollout.nnodes"
    if str(OmegaConf.select(config, "trainer.v1.trainer_mode")).endswith("separate_async"):
        return "trainer.v1.trainer_mode"
    return "" if config.trainer.device in ("cuda", "cpu") else "trainer.device"


def gpu_bytes(config: DictConfig, environment: Environment) -> int | None:
    """Return the memory of the GPU that a run is meant for: by its name, or by the scale that was chosen."""
    if environment.gpus:
        known = [gpu_memory(name) for name in environment.gpus]
        return None if None in known else min(known)  # type: ignore[type-var]
    return gpu_memory(chosen_scale(config).replace("_", " "))


def chosen_scale(config: DictConfig) -> str:
    """Return the name of the scale that was chosen; empty for none."""
    return str(OmegaConf.select(config, "hydra.runtime.choices.scale") or "")


@rule(OF_GPU)
def memory_training(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """State, gathered layers and activations of the trainer fit into a GPU."""
    model, memory = shape_of(environment.model), gpu_bytes(config, environment)
    if beyond_arithmetic(config) or config.trainer.device == "cpu" or model is None or memory is None:
        return
    actor, engine = config.actor_rollout_ref.actor, engines(config)[0]
    parallel, dynamic = max(engine.ulysses[1], 1), actor.use_dynamic_bsz
    gpus, size = max(config.trainer.nnodes * config.trainer.n_gpus_per_node, 1), engine.node.get("fsdp_size", -1)
    shards = size if 0 < size < gpus else gpus
    longest = max((config.data.max_prompt_length + config.data.max_response_length) // parallel, 1)
    sequences = max(actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n * parallel // gpus, 1)
    micro_batch = actor.ppo_micro_batch_size_per_gpu or actor.ppo_micro_batch_size or sequences
    tokens = min(actor.ppo_max_token_len_per_gpu, sequences * longest) if dynamic else micro_batch * longest
    width = SINGLE if engine.compute == "fp32" else HALF
    share = engine_kwargs(config).get("gpu_memory_utilization", config.actor_rollout_ref.rollout.gpu_memory_utilization)
    awake = 0 if config.actor_rollout_ref.rollout.get("free_cache_engine", True) else int(share * memory)
    of_model = config.actor_rollout_ref.model
    activations = activation_bytes(model, tokens, width, bool(of_model.get("enable_gradient_checkpointing", True)))
    if OmegaConf.select(of_model, "override_config.attn_implementation") == "sdpa" and of_model.use_remove_padding:
        activations += (MASK if width == HALF else MASK_FP32) * tokens * tokens
    parts = {
        "weights, gradients and Adam's moments": state_bytes(model, shards, _state(config, engine)),
        "gathered layers": gathered_bytes(model, width),
        "activations": activations,
        "CUDA, NCCL and a sleeping vLLM": REST,
        "a vLLM that keeps its memory": awake,
    }
    if (peak := sum(parts.values())) <= FILLED * memory:
        return
    terms = " + ".join(f"{size / GIB:.0f} ({name})" for name, size in parts.items() if size)
    problem = f"a micro-batch of {tokens} tokens needs {terms} = {peak / GIB:.0f} GiB of the GPU's "
    problem += f"{memory / GIB:.0f}, by arithmetic"
    severity: Severity = "error" if peak > FAR_OVER * memory else "warning"
    setting = f"{ACTOR}.{'ppo_max_token_len_per_gpu' if dynamic else 'ppo_micro_batch_size_per_gpu'}"
    allowed = f"what fits; one sequence has up to {longest} tokens a GPU"
    remedy = f"Lower it, or use more GPUs, {OFFLOAD}, 16 bits, gradient checkpointing or shorter responses."
    yield Fault(setting, problem, allowed, remedy, severity=severity)


def _state(config: DictConfig, engine: Engine) -> int:
    """Return the bytes a parameter of the state of trainer and reference in an update."""
    if engine.strategy == "fsdp2" and engine.node.get("offload_policy"):
        return 0
    if lora_rank(config):  # frozen weights: no gradients, no moments, no second copy for the reference
        return SINGLE
    return STATE + (SINGLE if len(engines(config)) > 1 else 0)
