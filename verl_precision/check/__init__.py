"""What can be known to fail, said before Ray or a model starts: in a run that has a preset, and by `check`.

preflight      asks the rules in the driver of a run, and ends it at an error
who_decides    who says a setting: verl, a recipe, a preset, or a word of the command that wins; presets=win
keys           what Hydra takes without a word and verl cannot use; keys of older verls, and of one main alone
probe          what rules know beyond the config, and what could not be found out; `loss_trial`: the loss, tried
models         what is known of a model without loading it; those that are served beside the policy
verl_refusals  what verl's own validators, typed configs and registries refuse
rules/         what can be wrong with a config: every rule, once
"""
