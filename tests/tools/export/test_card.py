"""The model card: the gap of the step it is of, no folder of this machine, and nothing that is not known."""

import json

import pytest
import yaml
from composer import compose_recipe
from rubbish import FOREIGN

from verl_precision.base.errors import CheckpointStateError
from verl_precision.integration.trainer.run_identity import RUN_FILE
from verl_precision.integration.trainer.run_monitor import STEP_METRICS
from verl_precision.integration.trainer.run_settings import RunSettings
from verl_precision.tools.export.session import model_card


@pytest.fixture
def checkpoint(tmp_path):
    step = tmp_path / "fp16_grpo-1a2b3c4d" / "global_step_40"
    step.mkdir(parents=True)
    return step


def parts(card: str) -> tuple[dict, str]:
    """Return the front matter and the text."""
    _, front, text = card.split("---\n", 2)
    return yaml.safe_load(front), text


def test_it_has_dtypes_loss_k3_versions_and_command(checkpoint, tmp_path):
    config = compose_recipe("recipes/quickstart/quickstart.yaml", "precision=fp16")
    (checkpoint.parent / RUN_FILE).write_text(yaml.safe_dump(RunSettings.from_config(config).as_record()))
    (checkpoint / STEP_METRICS).write_text(json.dumps({"mismatch/k3_kl": 2.345e-5, "critic/score/mean": 0.5}))
    front, text = parts(model_card(checkpoint, "fp16", "every weight fits FP16"))
    assert front["library_name"] == "transformers" and "base_model" not in front, "a folder has no name on the hub"
    assert "| k3 between trainer and rollout at step 40 | 2.35e-05 nats per token |" in text
    assert "| dtype of the weights | float16, each rounded once; every weight fits FP16 |" in text
    assert "| trained in | fp16 |" in text and "| sampled from in | float16 |" in text and "torch 2" in text
    assert "| loss | vp_grpo |" in text and "| mean reward at that step | 0.5 |" in text
    assert "verl-precision export fp16_grpo-1a2b3c4d/global_step_40 --dtype fp16" in text
    assert str(tmp_path) not in text, "it is published"


def test_a_model_of_the_hub_is_named(checkpoint):
    config = compose_recipe("recipes/moe/moe.yaml")
    record = RunSettings.from_config(config).as_record()
    (checkpoint.parent / RUN_FILE).write_text(yaml.safe_dump(record))
    name = record["settings"]["actor_rollout_ref.model.path"]
    assert parts(model_card(checkpoint, "bf16", ""))[0]["base_model"] == name and name.count("/") == 1


def test_what_is_not_known_is_not_claimed(checkpoint):
    text = parts(model_card(checkpoint, "fp32", "every weight fits FP16"))[1]
    assert "| not recorded |" in text and "trained in" not in text


@pytest.mark.parametrize("content", [*FOREIGN.values(), *(
    f'{{"mismatch/k3_kl": {value}}}'.encode() for value in ("NaN", "Infinity", "1e400", '"x"', "null", "true", 10**400)
)], ids=lambda content: repr(content[:24]))  # fmt: skip
def test_metrics_that_cannot_be_read_are_refused_by_name(checkpoint, content):
    (checkpoint / STEP_METRICS).write_bytes(content)
    with pytest.raises(CheckpointStateError, match=r"step_metrics\.json cannot be read .*Remove it"):
        model_card(checkpoint, "fp16", "")
