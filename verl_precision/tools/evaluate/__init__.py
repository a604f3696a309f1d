"""How often does a model solve the problems of a data set (`evaluate`), and which only sometimes (`sanity-set`)?

`evaluate` draws with vLLM in the longest context. The responses serve the shorter ones too: a response in a context of
8,192 tokens is the beginning of one in 32,768. `sanity-set` makes the paper's perfectible data set: it draws n
responses to each problem, and keeps the problems with an initial accuracy in [20%, 80%]. What is left is neither
trivial nor out of reach, so a correct trainer must come close to 100% on it (section 4 of arXiv:2510.26788).
"""
