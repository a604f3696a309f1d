"""Offline analysis of the training-inference mismatch (arXiv 2510.26788, section 3.5), without training.

    settings   what is measured: model, dtypes, responses; what cannot work is refused before a model loads
    prompts    prompts from a file or built in, as token ids
    store      the folder: settings, samples, scores; a file that exists is complete, so that a killed run goes on
    plan       which samples and scores are missing, and who computes them
    sample     one process: vLLM in one dtype samples and keeps its log-probs
    score      one process: verl's FSDP engine in one dtype gives the trainer's log-probs of the same tokens
    entry      how those two processes begin and end
    work       runs those processes one after the other, or over the GPUs of a Ray cluster
    measure    statistics of each pair of dtypes
    table      the same as text: console, Markdown, JSON
    figures    tokens, sequences, grid
    session    an analysis from end to end
    command    `verl-precision mismatch`

Only `sample` and `score` load a model, each in a process of its own.
"""
