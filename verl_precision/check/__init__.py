"""Checks that run before Ray or a model starts: in a run that has a preset, and in `check`.

preflight      applies the rules in the driver of a run, and ends the run at an error
who_decides    the origin of a setting: verl, a recipe, a preset, or a word of the command that wins; presets=win
keys           settings that Hydra accepts silently and verl cannot use; keys of older verls, and of a single main
probe          facts for the rules beyond the config, and facts that are missing; `loss_trial`: tries the loss
models         facts about a model without loading it; models that are served beside the policy
verl_refusals  what verl's own validators, typed configs and registries refuse
rules/         the rules for a config
"""
