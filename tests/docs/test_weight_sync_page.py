"""The page on weight syncs says which witness sees which of verl's checkpoint engines."""

import re
from pathlib import Path

import verl
from omegaconf import OmegaConf

from verl_precision.base.verl_config import CASTING
from verl_precision.integration.resolvers import sync_is_verified

PAGE = Path(__file__).parents[2] / "docs/weight_sync.md"
ROWS = [[cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"^\| `.*", PAGE.read_text(), re.M)]
ROADS = {road: row for row in ROWS if len(row) == 5 for road in re.findall(r"`(\w+)`", row[0])}


def test_every_checkpoint_engine_of_verl_has_a_row():
    sources = (Path(verl.__file__).parent / "checkpoint_engine").glob("*.py")
    names = {name for source in sources for name in re.findall(r"Registry\.register\(\"(\w+)\"\)", source.read_text())}
    assert ROADS.keys() == names


def test_digests_are_sent_where_the_page_says_so_and_casting_is_the_reason_elsewhere():
    for road, (_, digests, *_) in ROADS.items():
        kwargs = {"vllm": {"worker_extension_cls": "verl_precision."}}
        rollout = {"name": "vllm", "checkpoint_engine": {"backend": road}, "engine_kwargs": kwargs}
        assert sync_is_verified(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})) == (digests == "yes")
        assert ("BF16" in digests) == (road in CASTING)
