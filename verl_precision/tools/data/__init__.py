"""`verl-precision data`: the paper's data sets and reasoning_gym's tasks in verl's format, and a small model.

catalog.yaml has the source and the number of problems of each data set, and the prompts of each family of models.
"""
