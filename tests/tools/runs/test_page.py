"""The page: curves of every run, alarms marked, what is missing said, nothing fetched from anywhere."""

import base64
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from verl_precision.base.errors import ConfigurationError
from verl_precision.engine.router_replay import AGREEMENT
from verl_precision.mismatch.alarm import Alarm, MismatchAlarm
from verl_precision.mismatch.metric_names import ALPHA, BETA, PHANTOM_CLIPPED
from verl_precision.mismatch.remedies import ADVICE
from verl_precision.mismatch.settings import AlarmSettings
from verl_precision.tools.runs.figures import PANELS, draw
from verl_precision.tools.runs.page import page
from verl_precision.tools.runs.read import Run, read_runs
from verl_precision.tools.show.figures import COLOURS
from verl_precision.tools.show.tables import number_text, percent_text

PANEL = {panel.name: panel for panel in PANELS}


def run_of(name="made", k3=lambda step: 1e-5, steps=80, **more) -> Run:
    """Return a run of rising reward."""
    scores = {step: {"critic/score/mean": 0.01 * step, "mismatch/k3_kl": k3(step)} for step in range(1, steps + 1)}
    return Run(name, Path(name), [{"step": step, **row, **more} for step, row in scores.items()])


def growing(step: int) -> float:
    return 1e-5 * 2 ** (max(0, step - 40) / 5)


def parsed(html: str) -> ElementTree.Element:
    """Read the page as XML: an error unless every tag is closed, but for the three that HTML leaves open."""
    return ElementTree.fromstring(re.sub(r"<((meta|br|img)\b[^>]*)>", r"<\1/>", html.removeprefix("<!doctype html>")))


def figure_of(html: str, panel: str) -> ElementTree.Element:
    return parsed(html).find(f".//figure[@id='{panel}']")


def rows_of(part: ElementTree.Element) -> list[list[str]]:
    """Return the text of each cell of each row."""
    return [["".join(cell.itertext()) for cell in row] for row in part.iter("tr")]


def texts_of(html: str, panel: str) -> set[str]:
    """Return the texts in a panel's image."""
    svg = ElementTree.fromstring(base64.b64decode(figure_of(html, panel).find("img").get("src").partition(",")[2]))
    return {"".join(element.itertext()) for element in svg.iter("{http://www.w3.org/2000/svg}text")}


def test_two_real_runs_overlaid(root):
    runs = read_runs([root / "tests" / "data" / "quickstart"])
    html = page(runs)
    head, first, *_, last = rows_of(figure_of(html, "k3"))
    assert head == ["step", "bf16", "fp16"] and first[0] == "1" and last[0] == "10" and "" not in first + last
    assert rows_of(figure_of(html, "scale"))[:2] == [["step", "fp16"], ["1", "65536"]]  # BF16 has none
    assert {"bf16", "fp16", "step", "nats per token"} <= texts_of(html, "k3")
    assert {"A > 0", "A < 0"} <= texts_of(html, "clip")
    assert html.count("no alarm") == 2 and html.count("the baseline takes 30") == 2
    assert "Loss scale (precision/loss_scale): not bf16" in html
    assert f"Phantom-clipped tokens ({PHANTOM_CLIPPED}): no run" in html and 'id="phantom"' not in html
    assert page(runs) == html, "the same runs give the same page"


def test_numbers_of_the_table():
    html = page([run_of(steps=3, k3=lambda step: (4e-5, math.nan, 2e-5)[step - 1])])
    tables = [*parsed(html).iter("table")]
    scrolled = [*parsed(html).iterfind(".//div[@class='wide']/table")]
    assert len(tables) == len(scrolled), "on a phone a table scrolls in its own box"
    rows = rows_of(tables[0])
    assert rows[0] == ["run", "mean", "ratio", "first", "last", "min", "max", "steps"]
    k3 = [["Mismatch: k3 KL(μ‖π) nats per token"], ["made", "NaN", "", "4·10⁻⁵", "2·10⁻⁵", "2·10⁻⁵", "4·10⁻⁵", "3"]]
    assert rows[3:5] == k3, "a step without a number is not hidden in the mean"
    assert rows_of(figure_of(html, "k3"))[1:] == [["1", "4·10⁻⁵"], ["2", "NaN"], ["3", "2·10⁻⁵"]]


def test_the_summary_comes_first_with_means_and_ratios_to_the_first_run():
    k3 = {"bf16": lambda step: 4e-5, "fp16": lambda step: 1e-6 * step, "fp32": lambda step: 0.0}
    norms = iter((-1.0, 1.0, 1.0))  # means of two signs have no ratio
    html = page([run_of(name, of_step, 2, **{"actor/grad_norm": next(norms)}) for name, of_step in k3.items()])
    assert [head.text for head in parsed(html).iter("h2")] == ["Summary", "Alarms", "Curves", "Not measured"]
    found = [row[1:3] for row in rows_of(next(parsed(html).iter("table")))[6:] if len(row) > 1]
    assert found == [["4·10⁻⁵", ""], ["1.5·10⁻⁶", "26.67"], ["0", ""], ["-1", ""], ["1", ""], ["1", ""]]


def test_alpha_and_beta_are_explained():
    html = page([run_of(steps=2, **{ALPHA: 0.1, BETA: 0.01})])
    said = "".join(figure_of(html, "alpha_beta").find("figcaption").itertext())
    assert "how far the updates have moved the policy" in said and "the gap that the precision adds" in said


def test_alarms_are_found_offline_and_said():
    html = page([run_of("calm"), run_of("sick", growing)])
    assert re.search(r'sick</b> <b class="bad">k3_growth</b> at step (\d+)', html)
    assert "precision=fp16" in html and html.count("no alarm") == 1
    assert html.count('href="#alarms">alarms: 1<') == 1, "beside the run's name, above the summary"
    assert "verl-precision explain --run" in html


def test_alarms_are_marked_in_the_colour_of_their_run():
    """A full line with a mark where the panel shows the metric, a dotted one elsewhere."""
    runs = [run_of("calm"), run_of("sick", growing)]
    judge = MismatchAlarm(AlarmSettings())
    (alarm,) = [alarm for row in runs[1].rows for alarm in judge.update(int(row["step"]), row)]
    assert alarm.name == "k3_growth"
    for panel, style, marks in (("k3", "-", 1), ("reward", ":", 0)):
        lines = draw([PANEL[panel]], runs, {"sick": [alarm]}).axes[0].lines
        (upright,) = [line for line in lines if list(line.get_xdata()) == [alarm.step] * 2]
        assert (upright.get_color(), upright.get_linestyle()) == (COLOURS[1], style)
        assert sum(line.get_marker() == "v" for line in lines) == marks


def test_colour_tells_runs_apart_and_style_curves():
    more = {"mismatch/probs_diff_max": 0.1, "mismatch/probs_diff_min": -0.1}
    axes = draw([PANEL["extremes"]], [run_of(name, steps=2, **more) for name in ("a", "b")]).axes[0]
    found = [(line.get_color(), line.get_linestyle()) for line in axes.lines]
    assert found == [(COLOURS[0], "-"), (COLOURS[0], "--"), (COLOURS[1], "-"), (COLOURS[1], "--")]


def test_the_page_is_whole_fetches_nothing_and_says_in_words_what_each_figure_shows():
    html = page([run_of("a <b> & 'c'", growing), run_of("</script><b>")])
    assert not re.search(r"https?://|(src|href)\s*=\s*[\"']?\s*//|@import|url\(|<(script|link|iframe)", html, re.I)
    assert all(source.startswith("data:image/svg+xml;base64,") for source in re.findall(r'src="([^"]*)"', html))
    ids = [element.get("id") for element in parsed(html).iterfind(".//*[@id]")]
    assert ids and len(ids) == len(set(ids))
    assert "a &lt;b&gt; &amp;" in html and "&lt;/script&gt;&lt;b&gt;" in html
    assert {"a <b> & 'c'", "</script><b>"} <= texts_of(html, "k3")
    alternatives = re.findall(r'<img alt="([^"]*)"', html)
    assert len(alternatives) == html.count("<img") == html.count("<figure") and "Reward (mean score)" in alternatives[0]


def test_a_mismatch_of_zero_has_a_linear_axis():
    zero, small = run_of("zero", k3=lambda step: 0.0), run_of("small")
    axes = draw([PANEL["k3"]], [zero]).axes[0]
    assert axes.get_yscale() == "linear" and axes.get_ylim()[0] == 0
    assert draw([PANEL["k3"]], [zero, small]).axes[0].get_yscale() == "log"


def test_keys_with_verls_prefix_and_without_are_one_and_a_shorter_run_leaves_cells_empty():
    runs = [run_of("a", steps=1, **{f"actor/{PHANTOM_CLIPPED}": 0.1}), run_of("b", steps=2, **{PHANTOM_CLIPPED: 0.2})]
    rows = rows_of(figure_of(page(runs), "phantom"))
    assert rows == [["step", "a", "b"], ["1", "0.1", "0.2"], ["2", "", "0.2"]]


def test_a_metric_of_layers_is_shown_over_layers():
    """The mean over all steps of each layer, in a plot without alarms, whose lines stand at steps."""
    run = run_of(steps=2, **{f"{AGREEMENT}/layer_{layer:02d}": 1 - layer / 10 for layer in (0, 3, 12)})
    rows = rows_of(figure_of(page([run]), "routing_by_layer"))
    assert rows == [["layer", "made"], ["0", "1"], ["3", "0.7"], ["12", "-0.2"]]
    alarm = Alarm("k3_growth", "mismatch/k3_kl", 1.0, "", 2, 1, ADVICE["k3_growth"])
    (axes,) = draw([PANEL["routing_by_layer"]], [run], {"made": [alarm]}).axes
    assert axes.get_xlabel() == "layer" and len(axes.lines) == 1


def test_runs_without_any_metric_of_the_report_and_too_many_runs_are_refused():
    with pytest.raises(ConfigurationError, match="none of the metrics of the report"):
        page([Run("x", Path("x"), [{"step": 1, "loss": 1.0}])])
    with pytest.raises(ConfigurationError, match="9 runs: .* up to 8"):
        page([run_of(str(number), steps=2) for number in range(9)])


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
