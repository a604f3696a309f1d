"""The checks of part A, on a healthy machine and on broken ones: what is broken is named."""

import json

import forked
import pytest
import torch

from verl_precision.weight_sync.manifest import digest

# Trains in one process, each time with one thing broken, and prints what the check says. Six of 50 updates are done:
# 3 and 4 overflow, and there is a checkpoint before 5.
ENGINE = """
import json, tempfile
from pathlib import Path
import pytest
import torch
from verl_precision.engine.loss_scaling import LossScaler
from verl_precision.tools.selftest import engine_checks

engine_checks._UPDATES, engine_checks._SAVED_AFTER = 6, 5
unscale, linear = LossScaler._unscale_grads_, torch.nn.functional.linear

def found_inf(value):
    def unscale_and_say(self, *arguments, **named):
        return {device: flag.fill_(value) for device, flag in unscale(self, *arguments, **named).items()}
    return LossScaler, "_unscale_grads_", unscale_and_say

def in_bf16(hidden, weight, bias=None):
    # The right dtype comes out, of a product in another.
    rounded = [None if one is None else one.bfloat16() for one in (hidden, weight, bias)]
    return linear(*rounded).to(hidden.dtype)

def twice_too_large(self, optimizer, inverse, *arguments, **named):
    return unscale(self, optimizer, 2 * inverse, *arguments, **named)

BROKEN = {
    "nothing": (),
    "overflows are ignored": found_inf(0.0),
    "every update is skipped": found_inf(1.0),
    "the scale is never lowered": (LossScaler, "_within_bounds", lambda self, scale: 1024.0),
    "gradients are twice too large": (LossScaler, "_unscale_grads_", twice_too_large),
    "a restart forgets the scale": (LossScaler, "load_state_dict", lambda self, state: None),
    "products are taken in BF16": (torch.nn.functional, "linear", in_bf16),
}
for what, attribute in BROKEN.items():
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        if attribute:
            patch.setattr(*attribute)
        try:
            said = engine_checks.fp16_updates("cpu", Path(folder))
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    print(json.dumps([what, said]))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict[str, str | dict]:
    """What the check said of each broken machine."""
    done = forked.run(ENGINE, tmp_path_factory.mktemp("engine"), VERL_PLATFORM="cpu")  # as the session has it
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))


def test_updates_pass_on_a_healthy_machine(said):
    figures = said["nothing"]
    assert figures["last_scale"] == 256 and 0 < figures["gradient_error"] < 4e-3 and figures["resumed_apart"] == 0


@pytest.mark.parametrize(("broken", "words"), [
    ("overflows are ignored", "update 3 overflowed"),
    ("every update is skipped", "update 0 was healthy"),
    ("the scale is never lowered", "after update 3 the engine's loss scale is 1024, not 512"),
    ("gradients are twice too large", "off by 1.0e+00"),
    ("products are taken in BF16", "gradients in FP16 are off by"),
    ("a restart forgets the scale", "the resumed engine's loss scale is 1024, not 256"),
])  # fmt: skip
def test_broken_engine_is_named(said, broken, words):
    assert said[broken].startswith("CheckFailedError: ") and words in said[broken], said[broken]


def test_planted_faults_damage_one_tensor():
    from verl_precision.tools.selftest.selftest_faults import FlippedBit, LostTensor

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        sent = torch.randn(3, 5).to(dtype)
        before = sent.clone()
        ((name, arrived),) = FlippedBit._damaged(None, "weight", sent)
        assert name == "weight" and (arrived.dtype, arrived.shape) == (sent.dtype, sent.shape)
        assert int((arrived != sent).sum()) == 1 and digest(arrived) != digest(sent)
        assert torch.equal(sent, before), "the trainer's tensor is as it was"
    assert LostTensor._damaged(None, "weight", sent) == []
