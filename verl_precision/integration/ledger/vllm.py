"""The ledger of vLLM: loading weights a second time. On CUDA only `default_weight_loader` is used."""

from verl_precision.integration.ledger.entry import LedgerEntry, family

_RELOAD = "vllm.model_executor.model_loader.reload"

ENTRIES: tuple[LedgerEntry, ...] = (
    *family(
        _RELOAD,
        {"initialize_layerwise_reload": "model", "finalize_layerwise_reload": "args, kwargs"},
        kind="used",
        why="vLLM's CPU kernels keep repacked copies of linear weights and drop the originals, so loading again fails",
        how="called before and after a base-weight sync on a CPU, unless verl does it",
        upstream="vLLM's own reload API; verl#7987 moves verl's sync into it",
        until="verl reloads through vLLM's API",
    ),
    *family(
        f"{_RELOAD}.layerwise",
        {"get_layerwise_info": "layer", "_get_original_loader": "tensor"},
        kind="used",
        why="what a layer was sent can be compared only if the calls of its loader are known",
        how="the buffered calls are held on to; whether a reload is under way is asked",
        upstream="none: vLLM's own bookkeeping",
        until="vLLM says what a layer was loaded with",
    ),
    *family(
        f"{_RELOAD}.types",
        {"LayerReloadingInfo.can_load": "self", "LayerReloadingInfo.loaded_weights": None},
        kind="relied on",
        why="see get_layerwise_info",
        how="see get_layerwise_info",
        upstream="none: vLLM's own bookkeeping",
        until="vLLM says what a layer was loaded with",
    ),
    LedgerEntry(
        module="vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method",
        name="UnquantizedFusedMoEMethod._setup_kernel",
        parameters=("self", "layer", "w13", "w2"),
        kind="relied on",
        why="it packs expert weights for the CPU kernel only while `moe_kernel` is None: loaded again they stay "
        "unpacked, and the experts compute with permuted weights",
        how="`moe_kernel` is set to None before a base-weight sync, on a CPU only",
        upstream="none found",
        until="vLLM packs expert weights on a CPU at every load",
    ),
    LedgerEntry(
        module="vllm.model_executor.model_loader.weight_utils",
        name="default_weight_loader",
        parameters=("param", "loaded_weight"),
        kind="used",
        why="a parameter without a loader of its own is loaded by this one",
        how="wrapped for the parameter while a sync is recorded",
        upstream="none: undocumented",
        until="vLLM says what a layer was loaded with",
    ),
    LedgerEntry(
        module="vllm.sampling_params",
        name="RequestOutputKind",
        parameters=type,
        kind="used",
        why="the sanity set wants finished responses only",
        how="`SamplingParams(output_kind=FINAL_ONLY)`",
        upstream="none: undocumented",
        until="vLLM offers it beside SamplingParams",
    ),
    LedgerEntry(
        module="vllm.model_executor.layers.utils",
        name="dispatch_cpu_unquantized_gemm",
        parameters=("layer", "remove_weight"),
        kind="used",
        why="which kernel a linear layer gets on a CPU, and whether it keeps a packed copy, depends on CPU and dtype",
        how="called by `verl-precision check` on layers of its own, to say which kernel they get",
        upstream="none: undocumented",
        until="vLLM says which kernels it chose",
    ),
)
