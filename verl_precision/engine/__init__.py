"""FP16 that is really FP16, inside verl's FSDP engines.

    settings       the loss scale's settings, with bounds (pure Python)
    loss_scaling   torch's sharded gradient scaler with settings, bounds, diagnosis and exact state (pure torch)
    log_probs      FP32 log-probs and entropy from 16-bit logits, bounded by chunks (pure torch)
    checkpoint     the scaler's state beside verl's shards
    report         metrics of a training step; why a run had to stop (pure Python)
    config         verl's FSDP engine config with our typed settings: what switches all of this on
    config_check   the same settings, checked in the driver
    fsdp_engine    the mixins that fit the above to verl's engines

An engine whose config is not `config.PrecisionFSDPConfig` runs verl's code unchanged.
"""
