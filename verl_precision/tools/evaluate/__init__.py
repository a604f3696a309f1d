"""Measures how often a model solves a data set's problems, and keeps those that it solves only sometimes.

`evaluate` draws with vLLM in the longest context. The responses serve the shorter contexts too: a response in a context
of 8,192 tokens is the beginning of one in 32,768. `sanity-set` makes the paper's perfectible data set: it draws n
responses to each problem, and keeps the problems with an initial accuracy in [20%, 80%]. Its problems are neither
trivial nor out of reach, so a correct trainer must come close to 100% on them (section 4 of arXiv:2510.26788).
"""
