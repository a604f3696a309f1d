"""FP16 that is really FP16, inside verl's FSDP engines.

    settings       settings of engine, loss scale and shadow, with bounds (pure Python)
    loss_scaling   torch's sharded gradient scaler with settings, bounds, diagnosis and exact state (pure torch)
    log_probs      FP32 log-probs and entropy from 16-bit logits, bounded by chunks (pure torch)
    checkpoint     the scaler's state beside verl's shards
    report         metrics of a training step; why a run had to stop (pure Python)
    forward_dtypes which dtype a forward really computed in (pure torch)
    output_head    logits in FP32 (pure torch)
    shadow         the actor's weights a second time, in the rollout's dtype (pure torch)
    weights        what is sent to the rollout and exported, as exact as it is
    measurement    the mismatch of a micro-batch, where the trainer asks for it
    config         verl's FSDP engine config with our typed settings: what switches all of this on
    fsdp_engine    the mixins that fit the above to verl's engines
    shadow_engine  the one of them for shadow and measurement

An engine whose config is not `config.PrecisionFSDPConfig` runs verl's code unchanged.
"""
