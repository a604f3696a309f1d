"""The page: curves of every run, alarms marked, what is missing said, nothing fetched from anywhere."""

import base64
import hashlib
import json
import math
import re
from pathlib import Path

import pytest

from verl_precision.engine.router_replay import AGREEMENT
from verl_precision.mismatch import alarm
from verl_precision.mismatch.metric_names import K3_KL, LOG_PROB_GAP, PHANTOM_CLIPPED, PROBS_PEARSON, SKIPPED_STEPS
from verl_precision.tools.runs.content import recorded_content
from verl_precision.tools.runs.curves import LIMITS, PANELS, points_of
from verl_precision.tools.runs.page import page
from verl_precision.tools.runs.read import Run, read_runs
from verl_precision.tools.show.tables import number_text, percent_text


def run_of(name="made", k3=lambda step: 1e-5, steps=80, **more) -> Run:
    """Return a run of rising reward."""
    scores = {step: {"critic/score/mean": 0.01 * step, "mismatch/k3_kl": k3(step)} for step in range(1, steps + 1)}
    return Run(name, Path(name), [{"step": step, **row, **more} for step, row in scores.items()])


def growing(step: int) -> float:
    return 1e-5 * 2 ** (max(0, step - 40) / 5)


def test_two_real_runs_overlaid(root):
    state = recorded_content(read_runs([root / "tests" / "data" / "quickstart"]))
    curves = state["curves"]
    assert [curves[name]["k3/k3"][0] for name in ("bf16", "fp16")] == [list(range(1, 11))] * 2
    assert curves["fp16"]["scale/scale"][1][0] == 65536 and "scale/scale" not in curves["bf16"]
    assert curves["bf16"].keys() >= {"clip/A > 0", "clip/A < 0"}
    assert [run["alarms"] for run in state["runs"]] == [[], []]
    assert [run["baselineMissing"] for run in state["runs"]] == [20, 20]
    assert "Phantom-clipped tokens" in state["missing"] and "Loss scale" not in state["missing"]


def test_no_number_is_hidden_in_a_mean():
    state = recorded_content([run_of(steps=3, k3=lambda step: (4e-5, math.nan, 2e-5)[step - 1])])
    assert [run["summary"].get("k3/k3") for run in state["runs"]] == [["NaN", 4e-5, 2e-5, 2e-5, 4e-5, 3]]
    assert state["curves"]["made"]["k3/k3"] == [[1, 2, 3], [4e-5, "NaN", 2e-5]]


def test_alarms_are_found_offline_and_said():
    calm, sick = recorded_content([run_of("calm"), run_of("sick", growing)])["runs"]
    assert calm["alarms"] == [] and [alarm["name"] for alarm in sick["alarms"]] == ["k3_growth"]
    assert "precision=fp16" in sick["alarms"][0]["advice"]["try_first"][0]


def test_the_page_loads_nothing_and_no_text_of_a_run_is_html():
    names = ["a <b> & 'c'", "</script><b>", "<!--", "\u2028"]
    html = page(recorded_content([run_of(name, growing, steps=2) for name in names]))
    assert not re.search(r"https?://(?!www.w3.org/2000/svg)|(src|href)\s*=\s*[\"']?\s*//|@import|\burl\(", html)
    assert not re.search(r"(?i)<(link|iframe|img|script src)|innerHTML|insertAdjacentHTML|document\.write|eval\(", html)
    assert html.count("<script") == html.count("</script>") == 2 and "<b>" not in html
    (data,) = re.findall(r'<script type="application/json" id="data">([^<>]*)</script>', html)
    assert [run["name"] for run in json.loads(data)["state"]["runs"]] == names
    ids = re.findall(r'\bid="([\w-]+)"', html.partition("<script")[0])
    assert ids and len(ids) == len(set(ids))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)[1].replace("&#39;", "'")
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; script-src 'sha256-{digest}'; ") and "connect-src" not in policy


def test_a_metric_of_layers_is_shown_over_layers():
    """The mean over all steps of each layer."""
    run = run_of(steps=2, **{f"{AGREEMENT}/layer_{layer:02d}": 1 - layer / 10 for layer in (0, 3, 12)})
    assert points_of(run.rows)["routing_by_layer/equal"] == {0: 1.0, 3: 0.7, 12: pytest.approx(-0.2)}


def test_of_two_names_of_a_metric_the_one_without_verls_prefix_and_the_first_of_a_panel_count():
    more = {f"actor/{PHANTOM_CLIPPED}": 0.5, PHANTOM_CLIPPED: 0.1, "critic/rewards/mean": 9.0, PROBS_PEARSON: 0.75}
    found = points_of(run_of(steps=1, **more).rows)
    expected = {"phantom/phantom": 0.1, "reward/reward": 0.01, "k3/k3": 1e-5, "pearson/1 - r": 0.25}
    assert found == {name: {1: value} for name, value in expected.items()}
    assert points_of([{"step": 1, "critic/rewards/mean": 1.0}]) == {"reward/reward": {1: 1.0}}


def test_the_bars_on_the_page_are_the_bounds_of_the_alarms():
    """A hair beyond a bar the alarm's bound is passed, and a hair within it is not."""
    sides = {"above": (1, -1), "below": (-1, 1), "down to": (0, 1)}
    bounds = {limit.metric: limit for limits in alarm.LIMITS.values() for limit in limits}
    shown = {metric for panel in PANELS for each in panel.metrics.values() for metric in each.split(" or ")}
    assert shown & bounds.keys() - {SKIPPED_STEPS, LOG_PROB_GAP} <= LIMITS.keys(), "every number has its bar"
    for metric in LIMITS.keys() & bounds.keys():
        (bar,) = LIMITS[metric]
        (side,) = bar.keys() & sides.keys()
        out, within = (bar[side] + 1e-9 * sign for sign in sides[side])
        found = [bounds[metric].beyond(1 - at if metric == PROBS_PEARSON else at) for at in (out, within)]
        assert found == [True, False], metric
    calm, short = recorded_content([run_of("calm"), run_of("short", steps=9)])["runs"]
    assert calm["allowed"] == {K3_KL: pytest.approx(3e-5)} and short["allowed"] == {}


def test_panels_have_names_and_metrics_of_their_own():
    metrics = [metric for panel in PANELS for metric in panel.metrics.values()]
    assert len({panel.name for panel in PANELS}) == len(PANELS) and len(set(metrics)) == len(metrics)


@pytest.mark.parametrize(("value", "text"), [
    *((6.3e-7, "6.3e-07"), (1e-8, "1e-08"), (65536.0, "65536"), (0.25, "0.25"), (0, "0"), (-42.345678, "-42.3")),
    *((-2.5e-6, "-2.5e-06"), (3e12, "3e+12"), (999.9, "1000"), (math.nan, "NaN"), (-math.inf, "-∞")),
])  # fmt: skip
def test_numbers_as_people_read_them(value, text):
    assert number_text(value) == text


@pytest.mark.parametrize(("share", "digits", "text"), [
    (-0.004, 0, "0%"), (-0.0004, 1, "0.0%"), (-0.006, 0, "-1%"), (0.463, 1, "46.3%"), (1.0, 0, "100%"),
    (math.nan, 0, "nan%"),
])  # fmt: skip
def test_a_share_that_rounds_to_zero_has_no_sign(share, digits, text):
    assert percent_text(share, digits) == text
