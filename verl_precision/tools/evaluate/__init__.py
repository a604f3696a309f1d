"""How often does a model solve the problems of a data set? (`verl-precision evaluate`)

Responses are drawn with vLLM in the longest context. They serve the shorter ones too: a response in a context of 8,192
tokens is the beginning of one in 32,768.
"""
