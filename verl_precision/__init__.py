"""verl-precision: close the floating-point gap between the engine that trains and the engine that samples.

Map of the package, from the top down; imports point downwards only (tests/test_layers.py):

    tools          beside the plugin: what a person starts (a room for each verb), and what most runs never switch on

    cli            the command line's door: its verbs are entry points
    plugin         verl's door: the module that verl loads
    check          what will run in which dtype, and what is wrong, before Ray starts; every fault once, as data
    integration    the rim: every module that runs inside verl or vLLM
    mismatch       statistics of the gap, phantom clipping, the alarm
    engine         loss scaling, FP32 log-probs, dtypes of the forward, the shadow
    weight_sync    are the rollout's weights the trainer's? digests, comparison, canary
    losses         the paper's estimators, and their aggregation
    presets        Hydra groups precision=..., estimator=..., scale=..., one small YAML each
    base           errors, files, settings, versions, statistics that merge

Importing this module, or `verl_precision.plugin`, imports neither vLLM nor transformers nor Ray.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
