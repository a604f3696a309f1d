"""One engine that draws responses with vLLM and scores them, for the verbs `evaluate`, `sanity-set` and `mismatch`.

problems        a data set in verl's format, read and checked
model           is there such a model, and can it do what is asked? its tokenizer; prompts as tokens
engine          requests, responses, and what every engine can do
engine_process  an engine in a process of its own on this machine
ray_engines     one engine on each GPU of a Ray cluster
journal         every response is on disk before it counts; a job that was killed continues from it
work            the loop of every job: ask, wait, write down, show progress; a job whose responses are known beforehand
"""
