"""One-word edits of the recipes that break a run, or that verl changes without a word; and edits that it survives.

Each row of planted_edits.txt is an edit that was tried. It shows both sides: `check`'s rule on the config alone, and
what verl, or vLLM, would have done, by their own code in this process. Where only a GPU could show it, the row names a
line. Paths are of site-packages: verl 0.9.1 and vLLM 0.28.0.
"""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy
import pytest
import torch
from composer import compose_recipe
from omegaconf import OmegaConf
from planted import in_full
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_kl_controller, kl_penalty
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.base import get_rollout_class
from verl_says import objection

from verl_precision.base.verl_config import engines, leaves
from verl_precision.check.models import model_config
from verl_precision.check.probe import probe_environment
from verl_precision.check.rules.registry import find_faults
from verl_precision.check.rules.rule import RULES, Environment
from verl_precision.check.rules.tables import VLLM_DTYPES, null_number
from verl_precision.check.verl_refusals import refusals
from verl_precision.tools.tiny_model import cached_tiny_model

# Rule, how serious, recipe, scale, edit, and who shows that it is right:
#   verl: MESSAGE     `verl_says.objection` raises it
#   vllm: MESSAGE     vLLM's `EngineArgs` refuses it
#   by reading: LINE  only a run could show it
#   NAME              `witness_NAME`, or an entry of `WITNESSES`, below
#   nobody            needs to be asked
EDITS = Path(__file__).with_name("planted_edits.txt").read_text().splitlines()
HALVES = [line.rpartition("|") for line in EDITS]
ROWS = [(*head.split(maxsplit=4), witness.strip()) for head, _, witness in HALVES]
# Edits that verl survives, each tried alone on the recipe and scale of its line: no error may be raised.
SURVIVED = Path(__file__).with_name("survived_edits.txt").read_text().splitlines()
ids = {"ids": lambda row: "-".join([row[0], row[2], row[4].split()[0]])}
pytestmark = pytest.mark.usefixtures("at_root")


def composed(recipe: str, scale: str, edit: str):
    """Compose a recipe with an edit in a short form."""
    return compose_recipe(f"recipes/{recipe}/{recipe}.yaml", f"scale={scale}", *in_full(edit), return_hydra_config=True)


def environment(name: str, config) -> Environment:
    """Look only where the rule asks: the whole takes longer."""
    if any(rule.name == name and rule.of_machine for rule in RULES):
        return probe_environment(config)
    return Environment(model=model_config(config), refusals=refusals(config) if name == "verl-refuses" else ())


@pytest.mark.parametrize("row", ROWS, **ids)
def test_check_finds_the_edit(row):
    name, severity, recipe, scale, edit, _ = row
    config = composed(recipe, scale, edit)
    faults = [fault for fault in find_faults(config, environment(name, config)) if fault.name == name]
    assert faults, "no fault"
    assert {fault.severity[0].upper() for fault in faults} == {severity}
    changed = edit.split()[-1].partition("=")[0].lstrip("+").replace("fsdp.", "fsdp_config.")
    for fault in faults:
        assert fault.allowed and fault.remedy and fault.problem.endswith(".")
    exact = {"verl-refuses", "token-budget-too-small", "name-unknown", "setting-ignored"}
    if name in exact:
        assert any(fault.setting.endswith(changed) for fault in faults) or " " in edit or "batch" in str(faults), faults


@pytest.mark.parametrize(("recipe", "scale", "edit"), [
    (recipe, scale, edit) for recipe, scale, *edits in map(str.split, SURVIVED) for edit in edits
])  # fmt: skip
def test_what_verl_survives_raises_no_error(recipe, scale, edit):
    config = composed(recipe, scale, edit)
    found = find_faults(config, probe_environment(config), this_machine=False)
    assert [str(fault) for fault in found if fault.severity == "error"] == [] and objection(config) == ""


def test_each_row_has_a_witness():
    words = {row[-1] for row in ROWS if not row[-1].startswith(("verl: ", "vllm: ", "by reading: ", "nobody"))}
    assert words == set(WITNESSES)
    assert len(ROWS) >= 28


@pytest.mark.parametrize("row", [r for r in ROWS if not r[-1].startswith(("vllm: ", "by reading: ", "nobody"))], **ids)
def test_verl_would_have_refused_it_or_the_witness_agrees(row):
    *_, recipe, scale, edit, witness = row
    config = composed(recipe, scale, edit)
    if witness.startswith("verl: "):
        assert re.search(witness.removeprefix("verl: "), objection(config))
    else:
        WITNESSES[witness](config)


def witness_arithmetic(config) -> None:
    """By arithmetic only: tests/check/test_models.py has the functions, by hand."""
    assert config.trainer.device == "cuda"


def witness_monkey_patch(config) -> None:
    from verl.models.transformers.monkey_patch import apply_monkey_patch

    _, size = engines(config)[0].ulysses
    model = type("Model", (), {"config": SimpleNamespace(**model_config(config))})()
    with pytest.raises(AssertionError, match="num_attention_heads 12 must be divisible by ulysses_sp_size 8"):
        apply_monkey_patch(model, ulysses_sp_size=size)


def witness_context(config) -> None:
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    described = SimpleNamespace(hf_config=SimpleNamespace(**model_config(config)))
    server = SimpleNamespace(config=config.actor_rollout_ref.rollout, model_config=described)
    with pytest.raises(ValueError, match="less than or equal to max_position_embeddings"):
        vLLMHttpServer._validate_configs(server)


def witness_bare_reward(config) -> None:
    reward, mask = torch.tensor([[0.0, 0.7]]), torch.ones(1, 2)
    estimate = get_adv_estimator_fn(config.algorithm.adv_estimator)
    advantages, _ = estimate(token_level_rewards=reward, response_mask=mask, index=numpy.array(["a"]))
    assert torch.allclose(advantages, 0.7 * mask, atol=1e-5)


def witness_kl(config) -> None:
    zero = torch.zeros(1)
    with pytest.raises(NotImplementedError):
        get_kl_controller(config.algorithm.kl_ctrl)
        kl_penalty(zero, zero, config.algorithm.kl_penalty)
        kl_penalty(zero, zero, config.actor_rollout_ref.actor.kl_loss_type)


def witness_critic(config) -> None:
    OmegaConf.resolve(config.critic)
    with pytest.raises(Exception, match="no/such/folder/here"):
        omega_conf_to_dataclass(config.critic.model)


WITNESSES = {name.removeprefix("witness_"): value for name, value in globals().items() if name.startswith("witness_")}
WITNESSES |= {  # a call that raises
    "rollout_registry": lambda config: pytest.raises(
        AssertionError, get_rollout_class, config.actor_rollout_ref.rollout.name, config.actor_rollout_ref.rollout.mode
    ).match("Rollout vlm with mode async not found"),
}


def test_vllm_would_have_refused_it():
    """One test, since vLLM's import takes seconds."""
    from vllm.config.model import ModelDType
    from vllm.engine.arg_utils import EngineArgs

    same = ("dtype", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")
    keys = ("num_attention_heads", "num_key_value_heads")

    def asked(rollout, heads: dict):
        settings = {name: rollout[name] for name in same} | {"tensor_parallel_size": rollout.tensor_model_parallel_size}
        tiny = {"model": str(cached_tiny_model("qwen2")), "max_model_len": 256, "hf_overrides": heads}
        return EngineArgs(**tiny, **settings, distributed_executor_backend="mp").create_engine_config()

    for *_, recipe, scale, edit, witness in ROWS:
        if witness.startswith("vllm: "):
            config = composed(recipe, scale, edit)
            with pytest.raises(ValueError, match=witness.removeprefix("vllm: ")):
                asked(config.actor_rollout_ref.rollout, {key: model_config(config)[key] for key in keys})
    config = composed("sanity", "cpu", "rollout.dtype=half")
    assert asked(config.actor_rollout_ref.rollout, {})
    assert set(get_args(ModelDType)) == set(VLLM_DTYPES.split())


def test_a_number_that_is_null_is_named_or_ends_no_rule():
    config = composed("moe", "2x8_h100", "actor.use_kl_loss=True")
    known, named = Environment(model=model_config(config)), set()
    parts = ("actor_rollout_ref", "algorithm", "data", "trainer")
    written = OmegaConf.to_container(config, resolve=False)  # a block that is an interpolation cannot be updated
    for setting, _ in leaves({part: written[part] for part in parts}):
        value = OmegaConf.select(config, setting)
        if isinstance(value, int | float) and not isinstance(value, bool):
            OmegaConf.update(config, setting, None)
            if null_number(config) is None:
                find_faults(config, known)
            else:
                named.add(null_number(config))
            OmegaConf.update(config, setting, value)
    assert named >= {"data.train_batch_size", "trainer.save_freq", "actor_rollout_ref.actor.fsdp_config.fsdp_size"}


def test_a_named_gpu_counts_before_the_scales_own():
    """A larger GPU than the scale's takes a larger micro-batch."""
    config = composed("sanity", "1x8_h100", "actor.ppo_max_token_len_per_gpu=120000")
    known = Environment(model=model_config(config))
    assert [fault.name for fault in find_faults(config, known)] == ["memory-training"]
    larger = Environment(model=model_config(config), gpus=("NVIDIA H200",))
    assert not find_faults(config, larger)
