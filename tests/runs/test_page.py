"""The page: curves of every run, alarms marked, what is missing said, nothing fetched from anywhere."""

import base64
import math
import re
import xml.etree.ElementTree as ElementTree
from html import unescape
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from verl_precision.cli import app
from verl_precision.errors import ConfigurationError
from verl_precision.mismatch.alarm import MismatchAlarm
from verl_precision.mismatch.alarm_settings import AlarmSettings
from verl_precision.runs.figures import COLOURS, draw, write_comparison
from verl_precision.runs.page import MARK, number_text, page
from verl_precision.runs.panels import PANELS
from verl_precision.runs.read import Run, read_runs

runner = CliRunner()
VOID = {"meta", "br", "input", "img"}
PANEL = {panel.name: panel for panel in PANELS}


def run_of(tmp_path, name="made", k3=lambda step: 1e-5, steps=80, **more) -> Run:
    rows = [
        {"step": step, "critic/score/mean": 0.01 * step, "mismatch/k3_kl": k3(step), **more}
        for step in range(1, steps + 1)
    ]
    return Run(name, tmp_path / name, rows)


def growing(step: int) -> float:
    return 1e-5 * 2 ** (max(0, step - 40) / 5)


def figure_of(html: str, panel: str) -> str:
    return re.search(rf'<figure id="{panel}">.*?</figure>', html, re.S).group(0)


def rows_of(table: str) -> list[list[str]]:
    """The text of each cell of each row."""
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S) for row in re.findall(r"<tr>(.*?)</tr>", table, re.S)]
    return [[unescape(re.sub("<[^>]*>", "", cell)) for cell in row] for row in cells]


def svg_of(html: str, panel: str) -> ElementTree.Element:
    found = re.search(r'src="data:image/svg\+xml;base64,([^"]*)"', figure_of(html, panel)).group(1)
    return ElementTree.fromstring(base64.b64decode(unescape(found)))


def texts_of(svg: ElementTree.Element) -> set[str]:
    return {"".join(element.itertext()) for element in svg.iter("{http://www.w3.org/2000/svg}text")}


class Balanced(HTMLParser):
    """Fails on a tag that is closed but not open; what is left open is in `open`."""

    def __init__(self):
        super().__init__()
        self.open, self.ids = [], []

    def handle_starttag(self, tag, attributes):
        self.ids += [value for name, value in attributes if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.ids += [value for name, value in attributes if name == "id"]


def test_two_real_runs_overlaid(root):
    html = page(read_runs([root / "tests" / "data" / "quickstart"]))
    head, first, *_, last = rows_of(figure_of(html, "k3"))
    assert head == ["step", "bf16", "fp16"] and first[0] == "1" and last[0] == "10" and "" not in first + last
    assert rows_of(figure_of(html, "scale"))[:2] == [["step", "fp16"], ["1", "65536"]]  # BF16 has none
    assert {"bf16", "fp16", "step", "nats per token"} <= texts_of(svg_of(html, "k3"))
    assert {"A > 0", "A < 0"} <= texts_of(svg_of(html, "clip"))
    assert html.count("no alarm") == 2 and html.count("the baseline takes 30") == 2
    assert "Loss scale (precision/loss_scale): not bf16" in html
    assert "Phantom-clipped tokens (phantom/fraction): no run" in html and 'id="phantom"' not in html


def test_the_same_runs_give_the_same_page(root):
    assert page(read_runs([root / "tests" / "data" / "quickstart"])) == page(
        read_runs([root / "tests" / "data" / "quickstart"])
    )


def test_numbers_of_the_table(tmp_path):
    html = page([run_of(tmp_path, steps=3, k3=lambda step: (4e-5, math.nan, 2e-5)[step - 1])])
    rows = rows_of(html[html.index("<h2>Summary") : html.index("<h2>Not")])
    assert rows[0] == ["metric", "run", "first", "last", "min", "max", "steps"]
    assert rows[2] == ["Mismatch: k3 KL(μ‖π)nats per token", "made", "4·10⁻⁵", "2·10⁻⁵", "2·10⁻⁵", "4·10⁻⁵", "3"]
    assert rows_of(figure_of(html, "k3"))[1:] == [["1", "4·10⁻⁵"], ["2", "NaN"], ["3", "2·10⁻⁵"]]


def test_alarms_are_found_offline_and_said(tmp_path):
    html = page([run_of(tmp_path, "calm"), run_of(tmp_path, "sick", growing)])
    assert re.search(r'sick</b> <b class="bad">k3_growth</b> at step (\d+)', html)
    assert "precision=fp16" in html and html.count("no alarm") == 1


def test_alarms_are_marked_in_the_colour_of_their_run(tmp_path):
    """A full line with a mark where the panel shows the metric, a dotted one elsewhere."""
    runs = [run_of(tmp_path, "calm"), run_of(tmp_path, "sick", growing)]
    judge = MismatchAlarm(AlarmSettings())
    alarms = {"sick": [alarm for row in runs[1].rows for alarm in judge.update(int(row["step"]), row)]}
    assert [alarm.name for alarm in alarms["sick"]] == ["k3_growth"]
    for panel, style, marks in (("k3", "-", 1), ("reward", ":", 0)):
        lines = draw([PANEL[panel]], runs, alarms).axes[0].lines
        (upright,) = [line for line in lines if list(line.get_xdata()) == [alarms["sick"][0].step] * 2]
        assert (upright.get_color(), upright.get_linestyle()) == (COLOURS[1], style)
        assert sum(line.get_marker() == "v" for line in lines) == marks


def test_colour_tells_runs_apart_and_style_curves(tmp_path):
    more = {"mismatch/probs_diff_max": 0.1, "mismatch/probs_diff_min": -0.1}
    axes = draw([PANEL["extremes"]], [run_of(tmp_path, name, steps=2, **more) for name in ("a", "b")]).axes[0]
    found = [(line.get_color(), line.get_linestyle()) for line in axes.lines]
    assert found == [(COLOURS[0], "-"), (COLOURS[0], "--"), (COLOURS[1], "-"), (COLOURS[1], "--")]


def test_nothing_is_fetched_and_the_page_is_whole(tmp_path):
    html = page([run_of(tmp_path, "a <b> & 'c'", growing), run_of(tmp_path, "</script><b>")])
    assert not re.search(r"(src|href)\s*=\s*[\"']?\s*(https?:)?//", html, re.I)
    assert "http://" not in html and "https://" not in html and "@import" not in html and "url(" not in html
    assert not re.search(r"<(script|link|iframe)", html, re.I)
    assert all(source.startswith("data:image/svg+xml;base64,") for source in re.findall(r'src="([^"]*)"', html))
    parser = Balanced()
    parser.feed(html)
    assert parser.open == [] and len(parser.ids) == len(set(parser.ids))
    assert "a &lt;b&gt; &amp;" in html and "&lt;/script&gt;&lt;b&gt;" in html
    assert {"a <b> & 'c'", "</script><b>"} <= texts_of(svg_of(html, "k3"))


def test_every_figure_says_what_it_shows_without_being_seen(tmp_path):
    html = page([run_of(tmp_path)])
    alternatives = re.findall(r'<img alt="([^"]*)"', html)
    assert len(alternatives) == html.count("<img") == html.count("<figure") and "Reward (mean score)" in alternatives[0]


def test_a_mismatch_of_zero_has_a_linear_axis(tmp_path):
    zero, small = run_of(tmp_path, "zero", k3=lambda step: 0.0), run_of(tmp_path, "small")
    assert draw([PANEL["k3"]], [zero]).axes[0].get_yscale() == "linear"
    assert draw([PANEL["k3"]], [zero]).axes[0].get_ylim()[0] == 0
    assert draw([PANEL["k3"]], [zero, small]).axes[0].get_yscale() == "log"


def test_prefixed_and_plain_keys_are_one(tmp_path):
    runs = [
        run_of(tmp_path, "a", **{"actor/phantom/fraction": 0.1}),
        run_of(tmp_path, "b", **{"phantom/fraction": 0.2}),
    ]
    assert rows_of(figure_of(page(runs), "phantom"))[:2] == [["step", "a", "b"], ["1", "0.1", "0.2"]]


def test_runs_of_different_lengths_leave_cells_empty(tmp_path):
    rows = rows_of(figure_of(page([run_of(tmp_path, "a", steps=1), run_of(tmp_path, "b", steps=2)]), "reward"))
    assert rows == [["step", "a", "b"], ["1", "0.01", "0.01"], ["2", "", "0.02"]]


def test_comparison_shows_reward_gap_and_k3(root, tmp_path):
    runs = read_runs([root / "tests" / "data" / "quickstart"])
    write_comparison(tmp_path / "f.png", runs, "test")
    assert (tmp_path / "f.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_runs_without_any_metric_of_the_report_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="none of the metrics of the report"):
        page([Run("x", tmp_path / "x", [{"step": 1, "loss": 1.0}])])
    with pytest.raises(ConfigurationError, match="9 runs: allowed are up to 8"):
        page([run_of(tmp_path, str(number), steps=2) for number in range(9)])


def test_panels_have_names_of_their_own():
    assert len({panel.name for panel in PANELS}) == len(PANELS)
    assert len({curve.keys for panel in PANELS for curve in panel.curves}) == sum(len(p.curves) for p in PANELS)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (6.3e-7, "6.3·10⁻⁷"),
        (1e-8, "10⁻⁸"),
        (65536.0, "65536"),
        (0.25, "0.25"),
        (0, "0"),
        (-42.345678, "-42.35"),
        (-2.5e-6, "-2.5·10⁻⁶"),
        (3e12, "3·10¹²"),
        (math.nan, "NaN"),
        (-math.inf, "-∞"),
    ],
)
def test_numbers_as_people_read_them(value, text):
    assert number_text(value) == text


def test_command_writes_and_refuses_to_overwrite_what_is_not_a_report(root, tmp_path):
    data, output = str(root / "tests" / "data" / "quickstart"), tmp_path / "report.html"
    arguments = ["report", data, "--output", str(output)]
    assert runner.invoke(app, arguments).exit_code == 0 and MARK in output.read_text()
    assert runner.invoke(app, arguments).exit_code == 0
    output.write_text("my thesis")
    refused = runner.invoke(app, arguments)
    assert refused.exit_code == 1 and "not an earlier report" in refused.output and "--force" in refused.output
    assert output.read_text() == "my thesis"
    assert runner.invoke(app, [*arguments, "--force"]).exit_code == 0 and MARK in output.read_text()


def test_command_refuses_bad_input_by_name(root, tmp_path):
    result = runner.invoke(app, ["report", str(tmp_path / "nowhere"), "--output", str(tmp_path / "x.html")])
    assert result.exit_code == 1 and "no such file or folder" in result.output and not (tmp_path / "x.html").exists()
    run, folder = str(root / "tests" / "data" / "quickstart" / "fp16"), tmp_path / "no"
    inside = runner.invoke(app, ["report", run, "--output", str(folder / "x.html")])
    assert inside.exit_code == 1 and "is not a folder" in inside.output and not folder.exists()


def test_what_is_not_installed_is_named(tmp_path, monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = runner.invoke(app, ["report", str(tmp_path), "--output", str(tmp_path / "x.html")])
    assert result.exit_code == 1 and "needs jinja2 and matplotlib" in result.output and "pip install" in result.output
