"""The monitor of any loop: cuts and ranks do not matter, an alarm acts, a state resumes, and torch alone is enough."""

import json
import pickle

import forked
import pytest
import torch
from batches import BY_TOKEN, assert_close, padded, random_responses

from verl_precision.base.errors import ConfigurationError, MismatchAlarmError
from verl_precision.mismatch import MismatchMonitor
from verl_precision.mismatch import metric_names as names
from verl_precision.mismatch.phantom import PhantomStatistics
from verl_precision.mismatch.settings import AlarmSettings
from verl_precision.mismatch.statistics import MismatchStatistics

TENSORS, MASK = padded(random_responses(24, 40, seed=3, gap=0.2, shortest=1))
ENDED = torch.arange(len(MASK)) % 3 > 0


def measure(monitor, rows, width=None, **more):
    tensors = {name: each[rows, :width] for name, each in TENSORS.items()}
    given = tensors["trainer"], tensors["rollout"], MASK[rows, :width], tensors["advantage"]
    monitor.measure(*given, shadow=tensors["shadow"], ended=ENDED[rows], **more)


def test_the_metrics_of_a_step_are_those_of_its_statistics():
    monitor = MismatchMonitor(clip=BY_TOKEN)
    measure(monitor, slice(None))
    found = monitor.end_of_step(1, {"critic/score/mean": 0.5}).metrics
    pi, shadow, mu, advantages = (TENSORS[name] for name in ("trainer", "shadow", "rollout", "advantage"))
    expected = MismatchStatistics.measure(pi, mu, MASK, advantages, ENDED).metrics()
    expected |= PhantomStatistics.measure(pi, shadow, mu, MASK, advantages, BY_TOKEN, ended=ENDED).metrics()
    assert found.items() >= {**expected, "critic/score/mean": 0.5}.items() and found["phantom/clipped_fraction"] > 0
    assert monitor.take_metrics() == {}, "the next step begins with nothing"


@pytest.mark.parametrize("ratio", ["training", "shadow"])
def test_cuts_of_a_batch_give_the_metrics_of_the_whole(ratio):
    whole, cut = MismatchMonitor(clip=BY_TOKEN), MismatchMonitor(clip=BY_TOKEN)
    measure(whole, slice(None), ratio=ratio)
    for rows in (slice(0, 1), slice(1, 9)):
        measure(cut, rows, int(MASK[rows].sum(dim=1).max()), ratio=ratio)
    elsewhere = MismatchMonitor(clip=BY_TOKEN)
    measure(elsewhere, slice(9, None), ratio=ratio)
    cut.merge(pickle.loads(pickle.dumps(elsewhere)))
    found, expected = cut.take_metrics(), whole.take_metrics()
    assert ("phantom/avoided_fraction" in found) == (ratio == "shadow")
    assert_close(found, expected, tolerance=1e-9)


RANK = """
import json, sys, torch, torch.distributed as dist
sys.path[:0] = {paths}
import test_monitor
from verl_precision.mismatch import MismatchMonitor
dist.init_process_group("gloo", init_method="file://{folder}/rendezvous", rank={rank}, world_size=2)
monitor = MismatchMonitor(clip=test_monitor.BY_TOKEN)
test_monitor.measure(monitor, slice(0, 5) if {rank} else slice(5, None))
report = monitor.end_of_step(1)
json.dump([report.metrics, str(report.verdict)], open("{folder}/{rank}.json", "w"))
"""


def test_two_ranks_report_the_whole_batch(tmp_path, request):
    paths = [str(request.path.parent), str(request.path.parents[1])]
    forked.ranks(2, lambda rank: RANK.format(paths=paths, folder=tmp_path, rank=rank), tmp_path)
    (first, verdict), second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    whole = MismatchMonitor(clip=BY_TOKEN)
    measure(whole, slice(None))
    report = whole.end_of_step(1)
    assert [first, verdict] == second and verdict == str(report.verdict)
    assert_close(first, report.metrics, tolerance=1e-9)


def broken(monitor, step):
    """End a step in which the trainer's log-prob of one token is not a number."""
    pi = TENSORS["trainer"].clone()
    pi[0, 0] = torch.nan
    monitor.measure(pi, TENSORS["rollout"], MASK)
    return monitor.end_of_step(step)


def test_an_alarm_is_reported_once_ends_the_run_if_it_should_and_survives_a_resume():
    monitor = MismatchMonitor()
    reports = [broken(monitor, step) for step in range(1, 5)]
    assert [[alarm.name for alarm in report.alarms] for report in reports] == [[], [], ["trainer_not_finite"], []]
    assert reports[-1].verdict.word == "act now" and reports[-1].verdict.alarm == "trainer_not_finite"
    stopping = MismatchMonitor(AlarmSettings(on_alarm="stop"))
    broken(stopping, 1), broken(stopping, 2)
    resumed = MismatchMonitor(AlarmSettings(on_alarm="stop"))
    resumed.load_state_dict(json.loads(json.dumps(stopping.state_dict())))
    with pytest.raises(MismatchAlarmError, match="trainer_not_finite"):
        broken(resumed, 3)


def test_old_weights_are_measured_apart_and_padding_is_no_tool_output():
    monitor = MismatchMonitor()
    measure(monitor, slice(None), versions_behind=[row % 2 for row in range(len(MASK))])
    found = monitor.take_metrics()
    tokens = MASK.sum(dim=1)
    assert found[names.STALE_FRACTION] == pytest.approx(float(tokens[1::2].sum() / tokens.sum()))
    turns = MASK.clone()
    turns[:, 2] = 0  # one token of tool output in each longer response
    monitor.measure(TENSORS["trainer"], TENSORS["rollout"], turns)
    inside, at_the_end = (tokens > 3).sum(), (tokens == 3).sum()  # what follows the last written token is padding
    share = float(inside / (tokens.sum() - at_the_end))
    assert monitor.take_metrics()[names.TOOL_FRACTION] == pytest.approx(share)


@pytest.mark.parametrize(("change", "named"), [
    ({"mask": MASK[:, :3]}, "response_mask"),
    ({"ratio": "trainer"}, "ratio"),
    ({"ratio": "shadow"}, "ratio"),
    ({"shadow": TENSORS["shadow"]}, "advantages"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(change, named):
    with pytest.raises(ConfigurationError, match=named):
        MismatchMonitor().measure(TENSORS["trainer"], TENSORS["rollout"], **({"mask": MASK} | change))


EXAMPLES = """
import sys
sys.modules |= dict.fromkeys(("verl", "vllm", "ray", "hydra", "omegaconf", "tensordict", "transformers"))
import doctest, importlib, torch
for name in ("mismatch.monitor", "mismatch.statistics", "losses.aggregation", "losses.grpo"):
    module = importlib.import_module(f"verl_precision.{name}")
    done = doctest.testmod(module, extraglobs={"torch": torch})
    assert done.attempted and not done.failed, (name, done)
"""


def test_the_examples_of_the_docstrings_run_with_torch_alone(run_python):
    done = run_python(EXAMPLES)
    assert done.returncode == 0, done.stdout + done.stderr
