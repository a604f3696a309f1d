"""Each check of part A, on a healthy machine and on broken ones: what is broken is named."""

import json
from dataclasses import replace

import forked
import pytest
import torch

from verl_precision.base.errors import CheckFailedError
from verl_precision.engine.log_probs import log_probs_and_entropy
from verl_precision.tools.checking.installation import Finding
from verl_precision.tools.selftest import engine_checks
from verl_precision.tools.selftest.checks import CHECKS
from verl_precision.weight_sync import manifest
from verl_precision.weight_sync.manifest import digest

# Runs the checks of verl's engine in one process, each with one thing broken, and prints what they say. Of the 50
# updates six are done: 3 and 4 overflow, and there is a checkpoint before 5.
ENGINE = """
import json, tempfile
from pathlib import Path
import pytest
import torch
from verl_precision.engine.loss_scaling import LossScaler
from verl_precision.engine.shadow import ShadowModel
from verl_precision.tools.selftest import selftest_engine

selftest_engine._UPDATES, selftest_engine._SAVED_AFTER = 6, 5
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

def ask(check, what, *attribute):
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        if attribute:
            patch.setattr(*attribute)
        try:
            said = selftest_engine.__dict__[check]("cpu", Path(folder))
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    print(json.dumps([check, what, said]))

for what, attribute in BROKEN.items():
    ask("fp16_updates", what, *attribute)
ask("shadow_offload", "nothing")
ask("shadow_offload", "the shadow is not refreshed", ShadowModel, "outdate", lambda self: None)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict[tuple[str, str], str | dict]:
    """What each check of verl's engine said of each broken machine."""
    done = forked.run(ENGINE, tmp_path_factory.mktemp("engine"), VERL_PLATFORM="cpu")  # as the session has it
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    return {(check, what): words for check, what, words in lines}


def test_engine_checks_pass_on_a_healthy_machine(said):
    figures = said["fp16_updates", "nothing"]
    assert figures["last_scale"] == 256 and 0 < figures["gradient_error"] < 4e-3 and figures["resumed_apart"] == 0
    figures = said["shadow_offload", "nothing"]
    assert figures["gap_nats"] < 0.25 * figures["one_update_nats"]


@pytest.mark.parametrize(("check", "broken", "words"), [
    ("fp16_updates", "overflows are ignored", "update 3 overflowed and changed weights"),
    ("fp16_updates", "every update is skipped", "update 0 was healthy and did nothing"),
    ("fp16_updates", "the scale is never lowered", "after update 3 the engine's loss scale is 1024, not 512"),
    ("fp16_updates", "gradients are twice too large", "gradients in FP16 are off by 1.0e+00"),
    ("fp16_updates", "products are taken in BF16", "gradients in FP16 are off by"),
    ("fp16_updates", "a restart forgets the scale", "the resumed engine's loss scale is 1024, not 256"),
    ("shadow_offload", "the shadow is not refreshed", "nats from the actor; one update moves"),
])  # fmt: skip
def test_broken_engine_is_named(said, check, broken, words):
    message = said[check, broken]
    assert isinstance(message, str) and message.startswith("CheckFailedError: ") and words in message, message


def test_log_probs_and_digests_pass_here(tmp_path):
    figures = engine_checks.log_probs("cpu", tmp_path)
    assert figures["tokens"] == 1024 and figures["error_nats"] < 2e-5
    figures = engine_checks.digest("cpu", tmp_path)
    assert figures["gigabytes"] == pytest.approx(0.268, abs=1e-3) and figures["times_a_copy"] > 0


def _rounded(*arguments, **named):
    return tuple(values.bfloat16().float() for values in log_probs_and_entropy(*arguments, **named))


def _of_half_the_logits(logits, *arguments, **named):
    """Right values whose gradient is twice too small."""
    return log_probs_and_entropy(logits / 2 + logits.detach() / 2, *arguments, **named)


@pytest.mark.parametrize(("check", "broken", "words"), [
    ("log_probs", _rounded, r"log-probs or entropy are off by \S+ nats"),
    ("log_probs", _of_half_the_logits, r"gradient .* is off by 5\.0e-01"),
    # A rounded mean sees a change, but not of one bit.
    ("digest", lambda sent: f"{float(sent[: 2**20].float().mean()):.2f}",
     "a flipped bit of a large tensor was not seen"),
    ("digest", lambda sent: replace(digest(sent[:8]), sums=torch.randint(2**60, (4,)).tolist()),
     "the same tensor has two digests"),
])  # fmt: skip
def test_what_is_wrong_is_named(tmp_path, monkeypatch, check, broken, words):
    used = {"log_probs": (engine_checks, "log_probs_and_entropy"), "digest": (manifest, "digest")}
    monkeypatch.setattr(*used[check], broken)
    with pytest.raises(CheckFailedError, match=words):
        getattr(engine_checks, check)("cpu", tmp_path)


def test_installation_names_what_is_wrong(tmp_path, monkeypatch):
    good, bad = Finding("torch", True, "2.11.0"), Finding("verl", False, "0.1 is not tested")
    monkeypatch.setattr(engine_checks, "findings", lambda: iter([good, bad]))
    with pytest.raises(CheckFailedError) as caught:
        engine_checks.installation("cpu", tmp_path)
    assert "verl: 0.1 is not tested" in str(caught.value) and "torch" not in str(caught.value)
    monkeypatch.setattr(engine_checks, "findings", lambda: iter([good]))
    assert engine_checks.installation("cpu", tmp_path) == {"findings": 1}


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


def test_every_check_can_be_loaded_and_has_a_name_of_its_own():
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names) and not set(names) & {"A", "B"}
    for check in CHECKS:
        assert callable(check.load()) and check.part in ("A", "B") and check.shows, check.name
