"""The ledger of verl: registries, what is wrapped, the driver, and names that verl neither documents nor hides."""

from verl_precision.integration.ledger.entry import LedgerEntry, family

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

METRIC_FROM_DICT = LedgerEntry(
    module="verl.utils.metric.utils",
    name="Metric.from_dict",
    parameters=("data", "aggregation"),
    kind="patched",
    why="a policy loss's metrics are averaged over micro-batches: a maximum becomes a mean of maxima",
    how="wrapped: metrics of type MergedMetric, which only we report, are kept as they are",
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
    parameters=("log_ratio", "response_mask", "rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize"),
    kind="patched",
    why="verl holds log-ratios at +-20, so its weights are not equations (9) and (10) of the paper",
    how="wrapped: levels vp_token_tis and vp_seq_mis are ours; verl's own levels pass through unchanged",
    upstream="none found",
    until="verl has a registry of rollout weights",
)

_TRAINER = {
    "kind": "overridden",
    "why": "verl's trainer has no public hook between the advantages, the update, the metrics and the checkpoint",
    "how": "the trainers of `integration/trainers.py` measure after verl's method, or ask the worker before it",
    "upstream": "none: private methods",
    "until": "verl's trainer calls hooks with batch and metrics",
}

ENTRIES: tuple[LedgerEntry, ...] = (
    PROCESS_GROUP,
    METRIC_FROM_DICT,
    METRIC_AGGREGATE_DP,
    ROLLOUT_WEIGHTS,
    *family(
        "verl.utils.metric.utils",
        {
            "Metric.__init__": "self, aggregation, value",
            "Metric.append": "self, value",
            "Metric.aggregate": "self",
            "Metric.init_list": "self",
        },
        kind="overridden",
        why="verl's metric holds numbers; sums and statistics must be merged before anything is computed from them",
        how="`MergedMetric` holds what is merged",
        upstream="none found",
        until="verl lets a policy loss choose how its metrics are reduced",
    ),
    *family(
        "verl.trainer.ppo.v1.trainer_base",
        {
            "PPOTrainer.__init__": "self, config",
            "PPOTrainer._compute_advantage": "self, batch, metrics",
            "PPOTrainer._update_actor": "self, batch, metrics",
            "PPOTrainer._compute_metrics": "self, batch, metrics, timing_raw, global_steps, epoch",
            "PPOTrainer._save_checkpoint": "self",
            "PPOTrainer._load_checkpoint": "self",
        },
        **_TRAINER,
    ),
    *(
        entry
        for module, trainer, methods in (
            ("trainer_sync", "PPOTrainerSync", ("on_init_end", "on_sample_end", "on_step_end")),
            ("trainer_colocate_async", "PPOTrainerColocateAsync", ("on_init_end", "on_sample_end", "on_step_end")),
            ("trainer_separate_async", "PPOTrainerSeparateAsync", ("on_init_end", "on_sample_end", "on_step_end")),
        )
        for entry in family(
            f"verl.trainer.ppo.v1.{module}",
            {f"{trainer}.{method}": "self" for method in methods},
            kind="overridden",
            why="a weight sync has no hook of its own: verl sends the weights at the end of these methods",
            how="after verl's method the canary is asked; it is judged when the step has been sampled",
            upstream="none found",
            until="verl calls a hook after a weight sync",
        )
    ),
    *family(
        "verl.trainer.ppo.v1.trainer_separate_async", {"PPOTrainerSeparateAsync.__init__": "self, config"}, **_TRAINER
    ),
    *family(
        "verl.workers.rollout.replica",
        {"RolloutReplica.server_handle": property, "RolloutReplica.replica_rank": None},
        kind="relied on",
        why="verl's client balances requests over replicas; the canary has to ask each one",
        how="the replica's server is asked to `generate`, as verl's client asks it",
        upstream="none: undocumented",
        until="verl's client takes a replica's rank",
    ),
    LedgerEntry(
        module="verl.trainer.ppo.v1.trainer_base",
        name="TRAINER_REGISTRY",
        parameters=dict,
        kind="used",
        why="our trainers subclass those that verl has registered",
        how="read; ours are registered with verl's `register_trainer`",
        upstream="none: undocumented",
        until="verl's `get_trainer_cls` says which modes there are",
    ),
    *family(
        "verl.trainer.ppo.core_algos",
        {"POLICY_LOSS_REGISTRY": dict, "register_policy_loss": "name"},
        kind="used",
        why="`register_policy_loss` overwrites a loss of the same name without a word",
        how="the registry is read before each registration",
        upstream="none: undocumented",
        until="verl refuses a name that is taken",
    ),
    LedgerEntry(
        module="verl.plugin.platform.platform_base",
        name="PlatformBase.is_platform_available",
        parameters=("self", "use_smi_check"),
        kind="overridden",
        why="verl would choose the CPU wherever it sees no accelerator, also where the user expects one",
        how="`PlatformCPU` says no: it is used where it is asked for by name",
        upstream="none found: verl has no CPU platform",
        until="verl has a CPU platform",
    ),
    *family(
        "verl.utils.device",
        {"get_device_name": "", "get_device_id": ""},
        kind="used",
        why="device code has to ask verl's platform which device the process runs on",
        how="called",
        upstream="none: undocumented",
        until="verl documents it",
    ),
    *family(
        "verl.utils.tensordict_utils",
        {
            "get": "tensordict, key, default",
            "get_non_tensor_data": "data, key, default",
            "get_tensordict": "tensor_dict, non_tensor_dict",
            "assign_non_tensor": "tensor_dict, kwargs",
        },
        kind="used",
        why="a batch carries its settings in a form that only these functions read and write",
        how="called by the engines, the measurement and the canary",
        upstream="none: undocumented",
        until="verl documents it",
    ),
    *family(
        "verl.utils.reward_score.math_reward",
        {"is_equiv": "str1, str2, verbose", "last_boxed_only_string": "string", "remove_boxed": "s"},
        kind="used",
        why="answers in <answer> tags are graded as verl grades boxed ones",
        how="called",
        upstream="none: undocumented",
        until="verl documents it",
    ),
    *family(
        "verl.utils.tokenizer.continuous_token_wiring",
        {
            "get_continuous_token_builder_class": "model_family",
            "resolve_continuous_token_model_family": "model_family, hf_model_type, has_multimodal_processor",
        },
        kind="used",
        why="verl builds prompts from single tokens; a tokenizer without them fails every prompt, minutes in",
        how="verl's own builder is built from a local tokenizer before a run starts",
        upstream="none: undocumented",
        until="verl checks the tokenizer at its start",
    ),
)
