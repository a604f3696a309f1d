"""How often does a model solve the problems of a data set? (`verl-precision evaluate`)

    settings   what is evaluated; what cannot work is refused before a model loads
    drawing    the responses of one dtype: drawn, judged at each context, in the job's journal
    accuracy   avg@k, pass@k and paired differences, with standard errors over problems
    table      the same as text: Markdown, JSON
    session    a job from end to end

`sampling` draws the responses with vLLM, in the longest context. They serve the shorter ones too: a response in a
context of 8,192 tokens is the beginning of one in 32,768.
"""
