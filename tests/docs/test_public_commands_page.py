"""docs/public_commands.md: each row's overrides give its finding, and each line of verl is about what the row says."""

import importlib.util
import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl_precision.cli import app

PAGE = Path(__file__).resolve().parents[2] / "docs" / "public_commands.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.read_text().splitlines()
    if "verl-precision check " in line and line.startswith("| ")
]
# What stands on a line of the installed verl that proves a row.
PROOFS = {
    "trainer/ppo/v1/trainer_base.py:1768": "not bypass_recomputing_logprobs",
    "trainer/ppo/rollout_corr_helper.py:316": "per_token_stat >= lower_log",
    "trainer/ppo/core_algos.py:630": "if response_num > 1",
    "workers/engine/utils.py:125": "micro_batch_size_per_gpu) == 0",
    "trainer/ppo/core_algos.py:737": "reward_baselines",
    "trainer/ppo/core_algos.py:419": 'batch["prompts"]',
    "trainer/ppo/ray_trainer.py:267": '"sum_pi_squared" in data.batch',
    "trainer/ppo/core_algos.py:1654": "config.tau_pos",
    "workers/engine/fsdp/transformer_impl.py:162": "lora_rank > 0",
    "models/transformers/monkey_patch.py:300": "use_prefix_grouper: bool = False",
    "trainer/ppo/core_algos.py:2000": "torch.mean(pg_losses)",
    "trainer/config/actor/actor.yaml:86": "loss_agg_mode: token-mean",
    "trainer/ppo/core_algos.py:1596": "torch.clamp(seq_importance_ratio",
    "trainer/ppo/core_algos.py:1191": "loss_mask.shape[-1]",
    "experimental/fully_async_policy/fully_async_main.py:237": "migrate_legacy_reward_impl(config)",
    "workers/utils/losses.py:140": "config.kl_loss_coef",
    "experimental/teacher_loop/teacher_manager.py:51": "use_topk else 0",
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[4].split()[-1].strip("`"))
def test_the_overrides_give_the_finding(row):
    command, finding = row[4].strip("`"), row[5].strip("`")
    words = [*shlex.split(command)[1:], "actor_rollout_ref.rollout.name=vllm", "--json"]
    said = json.loads(CliRunner().invoke(app, words).stdout)
    assert finding in {each["name"] for each in said["findings"]}


def test_each_line_is_where_the_page_says():
    assert len(ROWS) >= 17 and {row[3].strip("`") for row in ROWS} == set(PROOFS)
    verl = Path(importlib.util.find_spec("verl").submodule_search_locations[0])
    for place, words in PROOFS.items():
        name, _, number = place.partition(":")
        assert words in (verl / name).read_text().splitlines()[int(number) - 1], place
