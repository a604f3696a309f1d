"""The paper's data sets in verl's format (`verl-precision data NAME`).

catalog.yaml  where each data set is and how many problems it has; the prompts of each family of models
catalog       the same as Python values, and the layouts: from the columns of each to question and answer
prepare       read, check, convert, write
"""
