"""One engine that draws responses from vLLM and scores them, for the verbs `sanity-set` and `mismatch`.

    problems        a data set in verl's format, read and checked
    model           is there such a model, and can it do what is asked? its tokenizer; prompts as tokens
    reward          is a response correct?
    engine          requests, responses, and what every engine can do
    vllm_engine     draws responses with vLLM
    trainer_engine  scores responses with verl's FSDP engine, as a trainer would
    engine_process  an engine in a process of its own on this machine
    ray_engines     one engine on each GPU of a Ray cluster
    journal         every response on disk before it counts; a killed job continues from it
    draw            the loop: ask, wait, write down, count
    progress        a live bar on a terminal, lines elsewhere

Only `vllm_engine` and `trainer_engine` load a model, each in a process of its own: its end gives all memory back.
"""
