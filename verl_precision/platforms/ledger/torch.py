"""The ledger of torch: what is private there, and what our loss scaler overrides."""

from verl_precision.platforms.ledger.entry import LedgerEntry, family

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
)
