"""The paper's data sets and reasoning_gym's tasks in verl's format, and a small model (`verl-precision data NAME`).

catalog.yaml   where each data set is and how many problems it has; the prompts of each family of models
catalog        the same as Python values, and the layouts: from the columns of each to question and answer
prepare        read, check, convert, write
reasoning_gym  questions from a seed, at a level of a curriculum
smollm2        SmolLM2-135M-Instruct from a package index, in FP32
"""
