"""The paper's perfectible data set, for any model and any data set in verl's format (`verl-precision sanity-set`).

Draw n responses to each problem, keep the problems with an initial accuracy in [20%, 80%]: what is left is neither
trivial nor out of reach, so a correct trainer must come close to 100% on it (section 4 of arXiv:2510.26788).
"""
