"""docs/metrics.md names exactly the metrics that the code can emit."""

import re
from pathlib import Path

import torch

from verl_precision.engine.router_replay import Choice, routing_agreement
from verl_precision.integration.trainer.batch_checks import SelfGap
from verl_precision.losses.settings import ClipRange
from verl_precision.mismatch.distillation import DistillationStatistics
from verl_precision.mismatch.groups import MismatchByTurn, MismatchByVersion
from verl_precision.mismatch.metric_names import FAILED_MEASUREMENTS
from verl_precision.mismatch.packing import flattened
from verl_precision.mismatch.phantom import PhantomStatistics
from verl_precision.mismatch.signal import Signal
from verl_precision.mismatch.token_sums import PROBABILITY_BINS
from verl_precision.weight_sync.bf16_grid import CROSSINGS, OFF_GRID
from verl_precision.weight_sync.canary import CANARY_BOUND, CANARY_GAP
from verl_precision.weight_sync.report import SyncReport

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "metrics.md").read_text()
TABLES = TEXT.partition("\n## All metrics\n")[2]
ROWS = re.findall(r"^\| `(?:mismatch|phantom|signal|distillation|weight_sync|precision/bf16)[/_].*", TABLES, re.M)
ONE = torch.zeros(1, 1, dtype=torch.int64)  # the only expert of one token


def test_documented_are_the_emitted():
    """On a batch for which every metric is defined: all bins, both signs, two lengths."""
    generator = torch.Generator().manual_seed(0)
    probs = torch.tensor([0.5, 0.05, 5e-3, 5e-4, 5e-5]).repeat(4, 4)
    rollout, advantages = probs.log(), torch.tensor([1.0, -1.0, 1.0, -1.0])
    shadow, trainer = (rollout - torch.rand(probs.shape, generator=generator) for _ in range(2))
    mask = torch.arange(20) < torch.tensor([[20], [15], [10], [5]])
    mismatch = MismatchByVersion.of_batch(flattened(trainer, rollout, mask=mask, advantages=advantages), range(4))
    turns = (torch.arange(20) % 2 == 0).expand(4, 20)  # ten
    by_turn = MismatchByTurn.of_batch(flattened(trainer, rollout, mask=turns), mismatch.whole)
    found = {*mismatch.metrics(), *by_turn.metrics(), CANARY_GAP, CANARY_BOUND, FAILED_MEASUREMENTS}
    found |= set(SyncReport(draft_layers=1, drafted_tokens=1).metrics())
    routing = routing_agreement({3: Choice(ONE, ONE)}, ONE.expand(1, 4).unsqueeze(-1), torch.ones(1).bool())
    found |= {CROSSINGS, OFF_GRID, *routing, *SelfGap.of_tokens(*torch.zeros(3, 1), mask_N=ONE[0] + 1).metrics()}
    found |= set(Signal.of_batch("aa", torch.zeros(2), [ONE] * 2, [ONE] * 2, 1, "grpo").metrics())
    of_teacher = flattened(shadow, trainer, rollout, mask=mask)
    found |= set(DistillationStatistics.of_batch(of_teacher).metrics())
    found |= set(DistillationStatistics.of_truncated(rollout, mask).metrics())
    for beta_in_ratio in (True, False):
        clip = ClipRange(False, -0.2, 0.2)
        phantom = PhantomStatistics.measure(trainer, shadow, rollout, mask, advantages, clip, beta_in_ratio)
        found |= set(phantom.metrics())

    rows = re.findall(r"`([^`]+)`", " ".join(line.split("|")[1] for line in ROWS))
    fill = {"{bin}": PROBABILITY_BINS, "{k}": "0123", "{n}": "12345678", "{layer}": ("03",)}
    documented = []
    for row in rows:
        mark, names = next(((mark, names) for mark, names in fill.items() if mark in row), ("", ("",)))
        documented += [row.replace(mark, name) if mark else row for name in names]
    assert len(documented) == len(set(documented))
    assert set(documented) == found
    assert tuple(re.findall(r"^\| `(prob_[^`]+)` \|", TEXT, re.M)) == PROBABILITY_BINS


def test_every_row_is_complete():
    """Names, definition, and unit with direction."""
    for line in ROWS:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 3 and all(cells), line


def test_every_metric_named_elsewhere_is_on_the_page():
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("recipes/**/*.md")]
    ours = re.compile(r"`((?:mismatch|phantom|signal|weight_sync)/\w+)`")
    named = {key for page in pages for key in ours.findall(page.read_text())}
    assert len(named) > 20
    assert {key for key in named if f"`{key}`" not in TEXT} == set()
