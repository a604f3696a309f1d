"""The model card: the gap of the step it is of, no folder of this machine, and nothing that is not known."""

import json

import pytest
import yaml
from composer import compose_recipe

from verl_precision.base.errors import CheckpointStateError
from verl_precision.integration.trainer.run_identity import RUN_FILE
from verl_precision.integration.trainer.run_monitor import STEP_METRICS
from verl_precision.integration.trainer.run_settings import RunSettings
from verl_precision.tools.export.session import model_card


def card_of(checkpoint, dtype):
    """Return the front matter and the text."""
    _, front, text = model_card(checkpoint, dtype).split("---\n", 2)
    return yaml.safe_load(front), text


def test_it_has_what_is_known_and_claims_nothing_else(tmp_path):
    step = tmp_path / "fp16_grpo-1a2b3c4d" / "global_step_40"
    step.mkdir(parents=True)
    front, text = card_of(step, "fp32")
    assert "| not recorded |" in text and "trained in" not in text and "base_model" not in front
    record = RunSettings.from_config(compose_recipe("recipes/moe/moe.yaml", "precision=fp16")).as_record()
    (step.parent / RUN_FILE).write_text(yaml.safe_dump(record))
    (step / STEP_METRICS).write_text(json.dumps({"mismatch/k3_kl": 2.345e-5, "critic/score/mean": 0.5}))
    front, text = card_of(step, "fp16")
    assert front["base_model"] == record["settings"]["actor_rollout_ref.model.path"] and "/" in front["base_model"]
    for row in (
        *("| k3 between trainer and rollout at step 40 | 2.35e-05 nats per token |", "| trained in | fp16 |"),
        *("| dtype of the weights | float16, each rounded once |", "| loss | vp_"),
        *("| sampled from in | float16 |", "| mean reward at that step | 0.5 |", "torch 2"),
        "verl-precision export fp16_grpo-1a2b3c4d/global_step_40 --dtype fp16",
    ):
        assert row in text
    assert str(tmp_path) not in text, "it is published"
    (step / STEP_METRICS).write_text('{"mismatch/k3_kl": NaN}')
    with pytest.raises(CheckpointStateError, match=r"step_metrics\.json cannot be read .*Remove it"):
        card_of(step, "fp16")
