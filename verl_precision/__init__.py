"""verl-precision: close the floating-point gap between the engine that trains and the engine that samples.

Map of the package, from the top down. A package imports only what stands below it (tests/test_layers.py):

    tools          beside the plugin: the verbs (a folder for each), and features that most runs do not use

    cli            the command line; its verbs are entry points
    plugin         the module that verl loads
    check          finds the dtypes of a run and the faults in its config, before Ray starts
    integration    all modules that run inside verl or vLLM
    mismatch       statistics of the gap, phantom clipping, the alarm
    engine         loss scaling, FP32 log-probs, dtypes of the forward pass, the shadow
    weight_sync    compares the rollout's weights with the trainer's: digests, layers, canary
    losses         the paper's estimators, and their aggregation
    presets        Hydra groups precision=..., estimator=..., scale=..., one small YAML each
    base           errors, files, settings, versions, statistics that merge

Importing this module, or `verl_precision.plugin`, imports neither vLLM nor transformers nor Ray.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
