"""The examples in the docstrings run as they stand."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("module", ["policy_gradient", "grpo", "registry"])
def test_example(module):
    result = doctest.testmod(importlib.import_module(f"verl_precision.losses.{module}"))
    assert result.attempted > 0 and result.failed == 0
