"""The rule of a GPU's memory: the arithmetic of docs/scales.md, on the settings at hand and before they cost an hour.

The arithmetic is good to a few GiB. A peak above nine tenths of a GPU is therefore a warning, and one above eleven
tenths an error. It knows FSDP without a critic; of anything else the verdict says that memory was not looked at.
"""

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.verl_config import FSDP, Engine, engine_kwargs, engines, lora_rank
from verl_precision.check.rules import gpu_memory as gpu
from verl_precision.check.rules.rule import Environment, Fault, Severity, rule

FILLED, FAR_OVER = 0.9, 1.1  # Shares of a GPU: the arithmetic is good to some GiB either way.
OF_GPU = "memory-training"  # the rule of a GPU below
ACTOR = "actor_rollout_ref.actor"
OFFLOAD = f"{ACTOR}.fsdp_config.offload_policy=True"


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
        known = [gpu.gpu_memory(name) for name in environment.gpus]
        return None if None in known else min(known)  # type: ignore[type-var]
    return gpu.gpu_memory(chosen_scale(config).replace("_", " "))


def chosen_scale(config: DictConfig) -> str:
    """Return the name of the scale that was chosen; empty for none."""
    choices = OmegaConf.select(config, "hydra.runtime.choices") or {}
    return next((str(choice) for group, choice in choices.items() if group.partition("@")[0] == "scale"), "")


@rule(OF_GPU)
def memory_training(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """State, gathered layers and activations of the trainer fit into a GPU."""
    model, memory = environment.shape, gpu_bytes(config, environment)
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
    width = gpu.SINGLE if engine.compute == "fp32" else gpu.HALF
    share = engine_kwargs(config).get("gpu_memory_utilization", config.actor_rollout_ref.rollout.gpu_memory_utilization)
    awake = 0 if config.actor_rollout_ref.rollout.get("free_cache_engine", True) else int(share * memory)
    parts = {
        "weights, gradients and Adam's moments": gpu.state_bytes(model, shards, _state(config, engine)),
        "gathered layers": gpu.gathered_bytes(model, width),
        "activations": _activations(config, model, tokens, width),
        "CUDA, NCCL and a sleeping vLLM": gpu.REST,
        "a vLLM that keeps its memory": awake,
    }
    if (peak := sum(parts.values())) <= FILLED * memory:
        return
    terms = " + ".join(f"{size / gpu.GIB:.0f} ({name})" for name, size in parts.items() if size)
    problem = f"a micro-batch of {tokens} tokens needs {terms} = {peak / gpu.GIB:.0f} GiB of the GPU's "
    problem += f"{memory / gpu.GIB:.0f}, by arithmetic"
    severity: Severity = "error" if peak > FAR_OVER * memory else "warning"
    a_token = _activations(config, model, 2 * tokens, width) - parts["activations"]
    most = tokens - int((peak - FILLED * memory) / a_token * tokens) - 1
    setting = f"{ACTOR}.{'ppo_max_token_len_per_gpu' if dynamic else 'ppo_micro_batch_size_per_gpu'}"
    allowed = f"at most {most if dynamic else most // longest}"
    remedy = f"Set {setting}={most if dynamic else most // longest}."
    if most < longest:
        allowed = f"what one sequence of {longest} tokens a GPU needs does not fit"
        remedy = f"Take more GPUs, {OFFLOAD}, 16 bits, enable_gradient_checkpointing=True or shorter responses."
    yield Fault(setting, problem, allowed, remedy, severity=severity)


def _state(config: DictConfig, engine: Engine) -> int:
    """Return bytes a parameter of the state of trainer and reference while they work."""
    if engine.strategy == "fsdp2" and engine.node.get("offload_policy"):
        return 0
    if lora_rank(config):  # of frozen weights there are neither gradients nor moments, and no reference of its own
        return gpu.SINGLE
    return gpu.STATE + (gpu.SINGLE if len(engines(config)) > 1 else 0)


def _activations(config: DictConfig, shape: gpu.ModelShape, tokens: int, width: int) -> int:
    model = config.actor_rollout_ref.model
    used = gpu.activation_bytes(shape, tokens, width, bool(model.get("enable_gradient_checkpointing", True)))
    if (model.get("override_config") or {}).get("attn_implementation") == "sdpa" and model.use_remove_padding:
        used += (gpu.MASK if width == gpu.HALF else gpu.MASK_FP32) * tokens * tokens
    return used
