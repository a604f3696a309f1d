"""Ledger of every host symbol that is patched or used though it is not public.

An entry says what is touched, why, how, where upstream discusses it, and when it can go. Each is checked when it is
used: a symbol that no longer looks as it did in the tested releases is an error that names the entry, never a patch
applied to something else.
"""

import inspect
from dataclasses import dataclass
from types import ModuleType

from verl_precision.errors import RegistrationError


@dataclass(frozen=True)
class LedgerEntry:
    """One host symbol we depend on.

    Attributes:
        module: module that holds it.
        name: dotted name inside the module.
        parameters: its parameter names in the tested releases.
        kind: `patched` (wrapped; `how` says for whom anything changes) or `used` (called or overridden though not
            public).
        why: what fails without it.
        how: what we do.
        upstream: issue or pull request, or why there is none.
        until: when the entry can go.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    kind: str
    why: str
    how: str
    upstream: str
    until: str


PROCESS_GROUP = LedgerEntry(
    module="verl.utils.distributed",
    name="initialize_global_process_group_ray",
    parameters=("timeout_second", "backend"),
    kind="patched",
    why="the default backend string names the CPU twice when the device is cpu: torch refuses the duplicate",
    how="wrapped: on device cpu, `backend` defaults to `cpu:gloo`; every other call passes through unchanged",
    upstream="none found: verl has no CPU platform",
    until="verl builds the backend string without a duplicate",
)

LAYERWISE_INITIALIZE = LedgerEntry(
    module="vllm.model_executor.model_loader.reload",
    name="initialize_layerwise_reload",
    parameters=("model",),
    kind="used",
    why="vLLM's CPU kernels keep repacked copies of linear weights and drop the originals, so loading again fails",
    how="called before a base-weight sync, on CPU only",
    upstream="vLLM's own reload API, used by its `reload_weights`",
    until="verl reloads through vLLM's API",
)

LAYERWISE_FINALIZE = LedgerEntry(
    module="vllm.model_executor.model_loader.reload",
    name="finalize_layerwise_reload",
    parameters=("args", "kwargs"),
    kind="used",
    why="see initialize_layerwise_reload",
    how="called after the last bucket, in place of `process_weights_after_loading`",
    upstream="vLLM's own reload API, used by its `reload_weights`",
    until="verl reloads through vLLM's API",
)

ITER_MODELS = LedgerEntry(
    module="verl.workers.rollout.vllm_rollout.utils",
    name="vLLMColocateWorkerExtension._iter_all_models_with_config",
    parameters=("self",),
    kind="used",
    why="verl post-processes every model after a sync; on CPU the layer-wise reload has done it already",
    how="overridden in our worker extension: yields nothing while a layer-wise reload is under way",
    upstream="none: private method",
    until="verl reloads through vLLM's API",
)

UPDATE_FROM_IPC = LedgerEntry(
    module="verl.workers.rollout.vllm_rollout.utils",
    name="vLLMColocateWorkerExtension.update_weights_from_ipc",
    parameters=("self", "peft_config", "base_sync_done", "use_shm"),
    kind="used",
    why="the only place where a whole weight sync begins and ends inside the vLLM worker",
    how="overridden in our worker extension: verify after the sync; on CPU, reload around it",
    upstream="none: private method",
    until="verl offers a hook after a weight sync",
)

UPDATE_WEIGHTS = LedgerEntry(
    module="verl.workers.rollout.vllm_rollout.utils",
    name="vLLMColocateWorkerExtension._update_weights",
    parameters=("self", "weights", "peft_config", "base_sync_done"),
    kind="used",
    why="receives each bucket; buckets are views of memory that is reused, and the layer-wise reload reads them later",
    how="overridden in our worker extension: take the manifest out, digest what arrived, clone on CPU",
    upstream="none: private method",
    until="verl offers a hook after a weight sync",
)

EXPERT_KERNEL = LedgerEntry(
    module="vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method",
    name="UnquantizedFusedMoEMethod._setup_kernel",
    parameters=("self", "layer", "w13", "w2"),
    kind="used",
    why="it packs expert weights for the CPU kernel only while `moe_kernel` is None: loaded again they stay unpacked, "
    "and the experts compute with permuted weights",
    how="`moe_kernel` is set to None before a base-weight sync, on CPU only",
    upstream="none found",
    until="vLLM packs expert weights on a CPU at every load",
)

METRIC_FROM_DICT = LedgerEntry(
    module="verl.utils.metric.utils",
    name="Metric.from_dict",
    parameters=("data", "aggregation"),
    kind="patched",
    why="a policy loss's metrics are averaged over micro-batches: a maximum becomes a mean of maxima",
    how="wrapped: metrics of type MergedMetric, which only our losses return, are kept as they are",
    upstream="none found",
    until="verl lets a policy loss choose how its metrics are reduced",
)

METRIC_AGGREGATE_DP = LedgerEntry(
    module="verl.utils.metric.utils",
    name="Metric.aggregate_dp",
    parameters=("metric_lists",),
    kind="patched",
    why="the reduction over ranks is a class method that a subclass of Metric cannot change",
    how="wrapped: metrics of type MergedMetric are merged over ranks and micro-batches at once",
    upstream="none found",
    until="verl asks the metric itself",
)

ROLLOUT_WEIGHTS = LedgerEntry(
    module="verl.trainer.ppo.rollout_corr_helper",
    name="compute_rollout_correction_weights",
    parameters=(
        "log_ratio",
        "response_mask",
        "rollout_is",
        "rollout_is_threshold",
        "rollout_is_batch_normalize",
    ),
    kind="patched",
    why="verl holds log-ratios at +-20, so its weights are not equations (9) and (10) of the paper",
    how="wrapped: levels vp_token_tis and vp_seq_mis are ours; verl's own levels pass through unchanged",
    upstream="none found",
    until="verl has a registry of rollout weights",
)

BUILD_FSDP_MODULE = LedgerEntry(
    module="verl.workers.engine.fsdp.transformer_impl",
    name="FSDPEngine._build_fsdp_module",
    parameters=("self", "module"),
    kind="used",
    why="it builds the gradient scaler, with nothing to set: device cuda, growth interval 400",
    how="overridden in our engines, for our config only: after verl's, the scaler is replaced by ours",
    upstream="https://github.com/verl-project/verl/pull/4036 brought the scaler; none found for its settings",
    until="verl's scaler has a device, settings, metrics and a place in checkpoints",
)

PREPARE_MODEL_OUTPUTS = LedgerEntry(
    module="verl.workers.engine.fsdp.transformer_impl",
    name="FSDPEngineWithLMHead.prepare_model_outputs",
    parameters=("self", "output", "output_args", "micro_batch", "logits_processor_func"),
    kind="used",
    why="temperature, log-probs and entropy are computed here in the logits' dtype, 16 bits on a CPU",
    how="overridden in our engines, for our config only: FP32, chunk by chunk",
    upstream="none found",
    until="verl computes them in FP32 on every device",
)

UNPAD_PACKED = LedgerEntry(
    module="verl.workers.engine.fsdp.transformer_impl",
    name="FSDPEngine._gather_and_unpad_packed",
    parameters=("self", "tensor", "pad_size"),
    kind="used",
    why="packed outputs are sharded over sequence-parallel ranks and padded",
    how="called on FP32 log-probs and entropy as verl calls it on its own",
    upstream="none: private method",
    until="see prepare_model_outputs",
)

FOUND_INF = LedgerEntry(
    module="torch.amp.grad_scaler",
    name="GradScaler._found_inf_per_device",
    parameters=("self", "optimizer"),
    kind="used",
    why="torch does not say publicly whether a step is being skipped",
    how="read after `unscale_`, when torch has all-reduced it",
    upstream="none: private method",
    until="torch's scaler reports skipped steps",
)

LEDGER: tuple[LedgerEntry, ...] = (
    PROCESS_GROUP,
    LAYERWISE_INITIALIZE,
    LAYERWISE_FINALIZE,
    EXPERT_KERNEL,
    ITER_MODELS,
    UPDATE_FROM_IPC,
    UPDATE_WEIGHTS,
    METRIC_FROM_DICT,
    METRIC_AGGREGATE_DP,
    ROLLOUT_WEIGHTS,
    BUILD_FSDP_MODULE,
    PREPARE_MODEL_OUTPUTS,
    UNPAD_PACKED,
    FOUND_INF,
)


def require_expected_signature(entry: LedgerEntry, module: ModuleType) -> None:
    """Raise unless the symbol exists and takes the parameters it took in the tested releases.

    Args:
        entry: the ledger entry.
        module: the imported host module.

    Raises:
        RegistrationError: naming the symbol, the signature found and the one expected.
    """
    symbol: object = module
    for part in entry.name.split("."):
        symbol = getattr(symbol, part, None)
    where = f"{entry.module}.{entry.name}"
    if symbol is None or not callable(symbol):
        raise RegistrationError(
            f"{where} does not exist in the installed version. It is needed because {entry.why}. "
            "Install a tested release (`verl-precision check` lists them)."
        )
    found = tuple(inspect.signature(symbol).parameters)
    if found != entry.parameters:
        raise RegistrationError(
            f"{where} takes {found}; the tested releases take {entry.parameters}. It is needed because {entry.why}. "
            "Install a tested release (`verl-precision check` lists them)."
        )
