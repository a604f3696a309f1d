"""The page: curves of every run, alarms marked, what is missing said, nothing fetched from anywhere."""

import base64
import csv
import hashlib
import json
import math
import re
from pathlib import Path

import pytest

from verl_precision.base.errors import ConfigurationError
from verl_precision.engine.router_replay import AGREEMENT
from verl_precision.mismatch.metric_names import ALPHA, BETA, PHANTOM_CLIPPED, PROBS_PEARSON
from verl_precision.tools.runs.contents import points_of
from verl_precision.tools.runs.page import page
from verl_precision.tools.runs.panels import PANELS
from verl_precision.tools.runs.read import Run, read_runs
from verl_precision.tools.show.tables import number_text, percent_text

PANEL = {panel.name: panel for panel in PANELS}


def run_of(name="made", k3=lambda step: 1e-5, steps=80, **more) -> Run:
    """Return a run of rising reward."""
    scores = {step: {"critic/score/mean": 0.01 * step, "mismatch/k3_kl": k3(step)} for step in range(1, steps + 1)}
    return Run(name, Path(name), [{"step": step, **row, **more} for step, row in scores.items()])


def growing(step: int) -> float:
    return 1e-5 * 2 ** (max(0, step - 40) / 5)


def data_of(html: str) -> dict:
    """Return what the script of the page reads."""
    (text,) = re.findall(r'<script type="application/json" id="data">([^<>]*)</script>', html)
    return json.loads(text)


def table_of(html: str, panel: str) -> list[list[str]]:
    """Return the rows of a panel's CSV."""
    return list(csv.reader(data_of(html)["csv"][panel].splitlines()))


def summaries_of(html: str, curve: str) -> list[list]:
    return [run["summary"][curve] for run in data_of(html)["state"]["runs"] if curve in run["summary"]]


def test_two_real_runs_overlaid(root):
    runs = read_runs([root / "tests" / "data" / "quickstart"])
    html = page(runs)
    head, first, *_, last = table_of(html, "k3")
    assert head == ["step", "bf16", "fp16"] and first[0] == "1" and last[0] == "10" and "" not in first + last
    assert table_of(html, "scale")[:2] == [["step", "fp16"], ["1", "65536.0"]]  # BF16 has none
    state = data_of(html)["state"]
    assert table_of(html, "clip")[0][1:] == ["bf16 · A > 0", "bf16 · A < 0", "fp16 · A > 0", "fp16 · A < 0"]
    assert [run["alarms"] for run in state["runs"]] == [[], []]
    assert [run["baselineMissing"] for run in state["runs"]] == [20, 20]
    assert [state["curves"][name]["k3/k3"][0] for name in ("bf16", "fp16")] == [list(range(1, 11))] * 2
    assert "Loss scale (precision/loss_scale): not bf16" in state["missing"]
    assert f"Phantom-clipped tokens ({PHANTOM_CLIPPED}): no run" in state["missing"]
    assert page(runs) == html, "the same runs give the same page"


def test_numbers_of_the_table():
    html = page([run_of(steps=3, k3=lambda step: (4e-5, math.nan, 2e-5)[step - 1])])
    assert summaries_of(html, "k3/k3") == [["NaN", 4e-5, 2e-5, 2e-5, 4e-5, 3]], "no number is hidden in the mean"
    assert table_of(html, "k3")[1:] == [["1", "4e-05"], ["2", "nan"], ["3", "2e-05"]]
    assert data_of(html)["state"]["curves"]["made"]["k3/k3"] == [[1, 2, 3], [4e-5, "NaN", 2e-5]]


def test_the_parts_and_what_a_panel_says():
    html = page([run_of(steps=2, **{ALPHA: 0.1, BETA: 0.01})])
    assert re.findall("<h2>(.*?)</h2>", html) == ["Alarms", "Curves", "Tokens", "Summary", "Not measured"]
    (panel,) = (each for each in data_of(html)["panels"] if each["name"] == "alpha_beta")
    assert "how far the updates have moved the policy" in panel["hint"]
    assert "the gap that the precision adds" in panel["hint"]


def test_alarms_are_found_offline_and_said():
    calm, sick = data_of(page([run_of("calm"), run_of("sick", growing)]))["state"]["runs"]
    assert calm["alarms"] == [] and [alarm["name"] for alarm in sick["alarms"]] == ["k3_growth"]
    assert sick["alarms"][0]["shown"] and "precision=fp16" in sick["alarms"][0]["advice"]["try_first"][0]


def test_it_says_in_which_steps_the_alarm_acted():
    masked = run_of("masked", steps=6)
    for row, acts in zip(masked.rows, (0, 1, 1, 0, 1, 0), strict=True):
        row["alarm/mask"] = acts
    rescued, calm = run_of("rescued", steps=2, **{"alarm/rescue": 1}), run_of("calm", steps=2, **{"alarm/mask": 0})
    html = page([masked, rescued, calm])
    assert [run["actions"] for run in data_of(html)["state"]["runs"]] == [
        ["mask from step 2 to 3", "mask from step 5 to 5"], ["rescue from step 1 to 2"], [],
    ]  # fmt: skip
    assert table_of(html, "acting")[1] == ["1", "0", "1", "0"]


def test_the_page_loads_nothing_and_no_text_of_a_run_is_html():
    names = ["a <b> & 'c'", "</script><b>", "<!--", "\u2028"]
    html = page([run_of(name, growing, steps=2) for name in names])
    assert not re.search(r"https?://(?!www.w3.org/2000/svg)|(src|href)\s*=\s*[\"']?\s*//|@import|\burl\(", html)
    assert not re.search(
        r"<(link|iframe|img)|<script src|innerHTML|insertAdjacentHTML|document\.write|eval\(", html, re.I
    )
    assert html.count("<script") == html.count("</script>") == 2 and "<b>" not in html
    assert [run["name"] for run in data_of(html)["state"]["runs"]] == names
    ids = re.findall(r'\bid="([\w-]+)"', html.partition("<script")[0])
    assert ids and len(ids) == len(set(ids))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)[1].replace("&#39;", "'")
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; script-src 'sha256-{digest}'; ") and "connect-src" not in policy


def test_keys_with_verls_prefix_and_without_are_one_and_a_shorter_run_leaves_cells_empty():
    runs = [run_of("a", steps=1, **{f"actor/{PHANTOM_CLIPPED}": 0.1}), run_of("b", steps=2, **{PHANTOM_CLIPPED: 0.2})]
    assert table_of(page(runs), "phantom") == [["step", "a", "b"], ["1", "0.1", "0.2"], ["2", "", "0.2"]]


def test_a_metric_of_layers_is_shown_over_layers():
    """The mean over all steps of each layer."""
    run = run_of(steps=2, **{f"{AGREEMENT}/layer_{layer:02d}": 1 - layer / 10 for layer in (0, 3, 12)})
    html = page([run])
    found = [(int(layer), float(value)) for layer, value in table_of(html, "routing_by_layer")[1:]]
    assert (
        found == [(0, 1.0), (3, 0.7), (12, pytest.approx(-0.2))] and table_of(html, "routing_by_layer")[0][0] == "layer"
    )


def test_of_two_names_of_a_metric_the_one_without_verls_prefix_and_the_first_of_a_panel_count():
    more = {f"actor/{PHANTOM_CLIPPED}": 0.5, PHANTOM_CLIPPED: 0.1, "critic/rewards/mean": 9.0, PROBS_PEARSON: 0.75}
    found = points_of(run_of(steps=1, **more).rows)
    expected = {"phantom/phantom": 0.1, "reward/reward": 0.01, "k3/k3": 1e-5, "pearson/1 - r": 0.25}
    assert found == {name: {1: value} for name, value in expected.items()}
    assert points_of([{"step": 1, "critic/rewards/mean": 1.0}]) == {"reward/reward": {1: 1.0}}


def test_runs_without_any_metric_of_the_report_are_refused():
    with pytest.raises(ConfigurationError, match="none of the metrics of the report"):
        page([Run("x", Path("x"), [{"step": 1, "loss": 1.0}])])


def test_panels_have_names_and_metrics_of_their_own():
    metrics = [metric for panel in PANELS for metric in panel.metrics.values()]
    assert len(PANEL) == len(PANELS) and len(set(metrics)) == len(metrics)


@pytest.mark.parametrize(("value", "text"), [
    *((6.3e-7, "6.3·10⁻⁷"), (1e-8, "10⁻⁸"), (65536.0, "65536"), (0.25, "0.25"), (0, "0"), (-42.345678, "-42.35")),
    *((-2.5e-6, "-2.5·10⁻⁶"), (3e12, "3·10¹²"), (math.nan, "NaN"), (-math.inf, "-∞")),
])  # fmt: skip
def test_numbers_as_people_read_them(value, text):
    assert number_text(value) == text


@pytest.mark.parametrize(("share", "digits", "text"), [
    (-0.004, 0, "0%"), (-0.0004, 1, "0.0%"), (-0.006, 0, "-1%"), (0.463, 1, "46.3%"), (1.0, 0, "100%"),
    (math.nan, 0, "nan%"),
])  # fmt: skip
def test_a_share_that_rounds_to_zero_has_no_sign(share, digits, text):
    assert percent_text(share, digits) == text
