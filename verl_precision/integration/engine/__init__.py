"""This package's FSDP engine under verl: dtypes, loss scaling, losses, shadow, router replay, export of weights."""
