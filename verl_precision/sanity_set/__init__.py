"""The paper's perfectible data set, for any model and any data set in verl's format (`verl-precision sanity-set`).

Draw n responses to each problem, keep the problems with an initial accuracy in [20%, 80%]: what is left is neither
trivial nor out of reach, so a correct trainer must come close to 100% on it (section 4 of arXiv:2510.26788).

    verdict    when is a problem's verdict beyond change? (exact, pure)
    schedule   which responses to draw next (pure)
    journal    every response drawn, on disk; a killed run goes on from it
    problems   the data set, read and checked
    reward     is a response correct?
    source     where responses come from: the interface, and recorded ones
    vllm_source, ray_source   one vLLM engine; one a GPU, as Ray actors
    run        the loop
    results    kept.parquet, summary.json, accuracy.png
    command    the command line
"""
