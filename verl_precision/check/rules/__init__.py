"""What can be wrong with a config: every rule once. How to add one: the docstring of `check/rules/rule.py`.

    rule            Rule, Fault, Environment, Machine; the decorator `rule`
    registry        all rules, and `find_faults`, which asks them
    dtypes          settings that are ignored, contradict each other, or lose precision
    attention       flash attention in FP32, Ulysses without it
    loss            aggregation, bypass mode, thresholds, weights
    rollout         log-probs, truncated sampling, vLLM
    checkpoints     how many checkpoints are kept, and the disk that holds them
    engine          this package's engine: loss scale, shadow
    layout          what is divided over GPUs, micro-batches, what vLLM refuses
    memory          what a GPU has to hold; `gpu_memory` has the arithmetic
    values          single values: out of range, without effect
    named_files     data, folders, loggers, the reward function
    run             the plugin, the model, files, memory, Ray's resources

`verl-precision check` shows the faults, and the preflight refuses the errors among them. A rule is a pure function of
the composed config and of what was found on the machine; nothing here imports verl or vLLM. Where a loss or an engine
must refuse a value by itself, the bound stands beside it (`losses/settings.py`, `engine/settings.py`), and the rule
asks there.
"""
