"""The ledger of torch: what is private there, what our loss scaler overrides, and how a CPU's kernels are asked for."""

from verl_precision.integration.ledger.entry import LedgerEntry, family

_SCALER = {
    "kind": "overridden",
    "why": "torch's scaler has no bounds, no record of a step, and on a CPU it switches itself off",
    "how": "`engine.loss_scaling.LossScaler` adds them around each call of torch's method",
    "upstream": "none found",
    "until": "torch's scaler has bounds and says what a step did",
}

ENTRIES: tuple[LedgerEntry, ...] = (
    *family(
        "torch.distributed.fsdp.sharded_grad_scaler",
        {
            "ShardedGradScaler.__init__": "self, device, init_scale, backoff_factor, growth_factor, growth_interval, "
            "enabled, process_group",
            "ShardedGradScaler.scale": "self, outputs",
            "ShardedGradScaler.unscale_": "self, optimizer",
            "ShardedGradScaler.update": "self, new_scale",
        },
        **_SCALER,
    ),
    *family(
        "torch.amp.grad_scaler",
        {"GradScaler.state_dict": "self", "GradScaler.load_state_dict": "self, state_dict"},
        **_SCALER,
    ),
    *family(
        "torch.amp.grad_scaler",
        {"GradScaler._found_inf_per_device": "self, optimizer", "GradScaler._scale": None},
        kind="used",
        why="torch does not say publicly whether a step is being skipped, nor on which device the scale is",
        how="read after `unscale_`, when torch has all-reduced it",
        upstream="none: private names",
        until="torch's scaler reports skipped steps",
    ),
    LedgerEntry(
        module="torch.nn.modules.module",
        name="Module._parameters",
        parameters=None,
        kind="used",
        why="a shallow copy of a layer needs parameters of its own, and setting one by name would change the layer too",
        how="read, and given to the copy, while a layer of the rollout is built afresh from what it was sent",
        upstream="none: private name",
        until="torch copies a module without its parameters",
    ),
    LedgerEntry(
        module="torch.distributed.fsdp.fully_sharded_data_parallel",
        name="FullyShardedDataParallel._fsdp_wrapped_module",
        parameters=None,
        kind="used",
        why="the names of an export are those of the model inside FSDP1's wrapper",
        how="read, if it is there",
        upstream="none: verl reads it the same way",
        until="verl drops FSDP1",
    ),
    *family(
        "torch.cpu",
        {
            "_is_avx2_supported": "",
            "_is_avx512_supported": "",
            "_is_avx512_bf16_supported": "",
            "_is_amx_tile_supported": "",
        },
        kind="used",
        why="vLLM chooses its library of kernels by these answers; too old a CPU ends in SIGILL",
        how="asked before a run on a CPU starts, and by `verl-precision check`",
        upstream="none: private names, which vLLM uses as well",
        until="vLLM says which library it would load",
    ),
    LedgerEntry(
        module="torch",
        name="ops._C",
        parameters=object,
        kind="used",
        why="a model whose heads vLLM's CPU attention does not take fails at the first generation, minutes in",
        how="vLLM's own kernel is asked whether it takes a head size, before a run starts",
        upstream="none: vLLM's library of operators",
        until="vLLM says which head sizes it takes on a CPU",
    ),
    LedgerEntry(
        module="torch._ops",
        name="OpOverload._schema",
        parameters=None,
        kind="used",
        why="how many arguments that kernel has depends on vLLM's release",
        how="read, to leave to the kernel what has a default",
        upstream="none: private name",
        until="vLLM says which head sizes it takes on a CPU",
    ),
)
