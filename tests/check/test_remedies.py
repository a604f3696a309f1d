"""A remedy does not ask for a preset that is chosen."""

import pytest
from omegaconf import OmegaConf

from verl_precision.check.rules.presets import without_chosen
from verl_precision.check.rules.rule import Fault

CHOSEN = OmegaConf.create({"hydra": {"runtime": {"choices": {"estimator": "pg_seq_is", "precision": "fp16"}}}})
REPLACED = "is chosen: leave out the words that replace what it sets."


@pytest.mark.parametrize(("remedy", "left"), [
    ("Set it to False, or choose estimator=pg_seq_is.", "Set it to False."),
    ("Choose precision=fp16, or set a.dtype=fp16.", "Set a.dtype=fp16."),
    ("Choose estimator=pg_seq_is, pg_seq_tis or pg_seq_mis.", f"estimator=pg_seq_is {REPLACED}"),
    ("Choose estimator=pg_seq_tis or pg_seq_is, which do it.", f"estimator=pg_seq_is {REPLACED}"),
    ("Choose a precision preset, whose engine does.", f"precision=fp16 {REPLACED}"),
    ("Choose a preset (precision=fp16) instead of setting dtype.", f"precision=fp16 {REPLACED}"),
    ("Set a.rescue_precision=fp16.", "Set a.rescue_precision=fp16."),
    ("Choose precision=bf16, or choose a pair.", "Choose precision=bf16, or choose a pair."),
])  # fmt: skip
def test_what_is_chosen_is_not_asked_for(remedy, left):
    assert without_chosen(Fault(remedy=remedy), CHOSEN).remedy == left
    assert without_chosen(Fault(remedy=remedy), OmegaConf.create()).remedy == remedy


def test_a_word_of_the_command_that_is_at_fault_is_named():
    config = OmegaConf.merge(CHOSEN, {"hydra": {"overrides": {"task": ["+precision=fp16", "a.dtype=bfloat16"]}}})
    fault = Fault(setting="a.dtype", remedy="Choose precision=fp16, or choose a pair.")
    left = "Leave out a.dtype, which replaces a part of precision=fp16, or choose a pair."
    assert without_chosen(fault, config).remedy == left
