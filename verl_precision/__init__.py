"""verl-precision: close the floating-point gap between the engine that trains and the engine that samples.

Map of the package (dependencies point downwards):

    cli            `verl-precision <verb>`
    check          is everything installed, loaded and as tested?
    plugin         what verl loads: the table of everything that is registered, and where
    presets/       Hydra groups precision=..., estimator=..., scale=..., one small YAML each
    preflight      what can be known to fail before Ray or a model starts
    rules/         what can be wrong with a config: every rule once, as data
    compare/       run one recipe in several precisions, follow it, compare the results
    losses/        the paper's estimators (pure torch), and their adapters to verl
    aggregation    from token values to a loss that does not change with the cut of the mini-batch (pure torch)
    mismatch/      the statistics (pure torch), and verl's trainers that report them
    platforms/     verl and vLLM on a CPU
    weight_sync/   are the rollout's weights the trainer's? (`digest` and `verify` are pure torch)
    data/          the paper's data sets in verl's format
    sanity_set/    the problems a model solves sometimes (`sanity-set`)
    offline_mismatch/  the mismatch without training (`mismatch`)
    sampling/      one engine that draws responses and scores them, for both verbs
    arithmetic/    the sanity test on a CPU: sums, and a small model that forgets the carry
    settings       pydantic dataclasses whose errors are ours; files: complete or not at all
    tiny_model     tiny models with tokenizer, built in seconds, for CPU runs

Importing this module, or `verl_precision.plugin`, imports neither vLLM nor transformers nor Ray.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
