"""verl-precision: close the floating-point gap between the engine that trains and the engine that samples.

Map of the package; imports point downwards only (tests/test_layers.py):

    cli                `verl-precision <verb>`, all of them; plugin: what verl loads
    evaluation/        how often a model solves the problems of a data set (`evaluate`)
    sanity_set/        the problems a model solves sometimes (`sanity-set`)
    offline_mismatch/  the mismatch without training (`mismatch`)
    runs/              run a recipe in several precisions and show what it left (`compare`, `report`)
    check/             what will run in which dtype, and what is wrong (`check`)
    integration/       the rim: every module that imports verl or vLLM
    data/              the paper's data sets, and sets to evaluate on, in verl's format (`data`)
    sampling/          draws responses and scores them: engines, journal, progress
    rules/             what can be wrong with a config: every rule once, as data
    losses/            the paper's estimators, and aggregation (torch alone)
    mismatch/          statistics of the gap, phantom clipping, alarm (torch alone)
    engine/            loss scaling, FP32 log-probs, dtypes of the forward, the shadow (torch alone)
    weight_sync/       are the rollout's weights the trainer's? digests, comparison, canary (torch alone)
    patching/          the series of patches/, for a verl that cannot load the plugin (`patch`)
    presets/           Hydra groups precision=..., estimator=..., scale=..., one small YAML each
    tiny_model         tiny models with tokenizer, built in seconds, for CPU runs
    mergeable          statistics that merge: those of micro-batches and ranks give that of the whole
    settings           pydantic dataclasses whose errors are ours; files: complete or not at all; processes; errors

Importing this module, or `verl_precision.plugin`, imports neither vLLM nor transformers nor Ray.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
