"""Offline analysis of the training-inference mismatch (arXiv 2510.26788, section 3.5), without training.

    settings   what is measured: model, dtypes, responses; what cannot work is refused before a model loads
    prompts    prompts from a file or built in, as token ids
    store      the folder: settings, samples, scores; a file that exists is complete, so that a killed run goes on
    plan       which samples and scores are missing, and who computes them
    sample     one process: vLLM in one dtype samples and keeps its log-probs
    score      one process: verl's FSDP engine in one dtype gives the trainer's log-probs of the same tokens
    work       runs those processes one after the other, or over the GPUs of a Ray cluster
    table      statistics of each pair of dtypes: console, Markdown, JSON
    figures    tokens, sequences, grid
    command    `verl-precision mismatch`
"""
