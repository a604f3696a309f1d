"""Which cause makes a gap between rollout and trainer (`verl-precision explain`): one change at a time, each measured.

settings          what is explained; what cannot work is refused before a model loads
from_config       the same settings, of a recipe or of a run that is over
variants          the variants of the computation, from the rollout to the trainer: each changes one thing
weights           copies of weights that a variant loads
routing           in a mixture of experts, the effect of other chosen experts
operations        vLLM's operations beside transformers': `operation_error` finds the error of each on equal inputs,
                  `error_injection` adds such errors to transformers' forward
attribution       the gap of a token, shared among the changes
judge             which changes are faults, and which are the cost of a dtype; `causes.yaml` has the remedy of each
page              verdict and table on the terminal, JSON, and a page with the waterfall
session           an explanation from end to end
from_run          without computing anything: what a run that is over has recorded
"""
