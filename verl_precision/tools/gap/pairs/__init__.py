"""The training-inference mismatch without training (`verl-precision mismatch`; arXiv 2510.26788, section 3.5).

    settings   what is measured; what cannot work is refused before a model loads
    prompts    prompts from a file or built in
    store      samples and scores in the job's journal
    measure    statistics of each pair of dtypes
    table      the same as text: Markdown, JSON
    figures    tokens, sequences, grid
    session    a job from end to end
    command    the command line

`sampling` draws with vLLM in each rollout dtype and scores with verl's engine in each train dtype.
"""
