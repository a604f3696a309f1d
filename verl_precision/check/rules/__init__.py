"""What can be wrong with a config: every rule once, by subject. How to add one: the docstring of `check/rules/rule.py`.

    rule            Rule, Fault, Environment, Machine; the decorator `rule`
    registry        all rules, and `find_faults`, which asks them

    run             the plugin, verl's refusals, the model, counts, a run that is to repeat
    presets         what of a preset is not in force; one finding for one cause
    dtypes          settings that are ignored, contradict each other, or lose precision
    features        what the installed hosts cannot give, because a symbol that it needs is not as tested
    loss            aggregation, bypass mode, thresholds, weights
    tried_loss      what trying the loss has shown; losses that are not their paper's (papers.yaml)
    engine          the trainer's FSDP engine: its settings, the shadow, offloading, router replay
    attention       flash attention in FP32 or not installed, Ulysses without it
    rollout         log-probs, truncated sampling and its masks, the agent loop, what the installed vLLM does
    layout          what is divided over GPUs and into micro-batches
    memory          what a GPU has to hold; `gpu_memory` has the arithmetic
    checkpoints     how many are kept, the disk that holds them, resuming
    files           data, the reward function, folders, packages
    tables          numbers, names, settings that nothing reads, lengths, what has to repeat
    v1_trainer      what the V1 trainer does not do, though a setting asks for it
    adapters        adapters that are not wrapped, sent or served
    dependencies    LoRA's modules, the overlong buffer, dynamic sampling's metric
    schedule        nothing is trained, nothing is saved, or it is not read again
    mains           verl's mains with a trainer of their own, and settings that another main reads
    cpu             a run on a CPU: its vLLM, memory, Ray's resources

`verl-precision check` shows the faults, and the preflight refuses the errors among them. A rule is a pure function of
the composed config and of what was found on the machine; nothing here imports verl or vLLM. Where a loss or an engine
must refuse a value by itself, the bound stands beside it (`losses/settings.py`, `engine/settings.py`), and the rule
asks there.
"""
