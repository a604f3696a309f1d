"""`verl-precision data`: the paper's data sets and reasoning_gym's tasks in verl's format, and a small model.

catalog.yaml says where each data set is and how many problems it has, and has the prompts of each family of models.
"""
