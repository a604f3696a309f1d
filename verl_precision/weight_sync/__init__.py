"""After a weight sync, are the rollout's weights the trainer's?

    manifest  the trainer closes its weight stream with a digest of every tensor; the rollout compares (pure torch)
    verify    every layer of the rollout must compute what a layer freshly built from the received weights computes
    worker    both, inside verl's vLLM worker extension: `VerifiedWeightSyncExtension`

Chosen by the presets through `actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls`.
"""
