"""The page: curves of every run, alarms marked, what is missing said, nothing fetched from anywhere."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from verl_precision.cli import app
from verl_precision.errors import ConfigurationError
from verl_precision.report.figures import number_text
from verl_precision.report.page import MARK, page
from verl_precision.report.panels import PANELS
from verl_precision.report.read import Run, read_runs

runner = CliRunner()
VOID = {"meta", "br", "input"}


def run_of(tmp_path, name="made", k3=lambda step: 1e-5, steps=80, **more) -> Run:
    rows = [
        {"step": step, "critic/score/mean": 0.01 * step, "mismatch/k3_kl": k3(step), **more}
        for step in range(1, steps + 1)
    ]
    return Run(name, tmp_path / name, rows)


def growing(step: int) -> float:
    return 1e-5 * 2 ** (max(0, step - 40) / 5)


def data_of(html: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S).group(1))


def svg_of(html: str, panel: str) -> ElementTree.Element:
    return ElementTree.fromstring(re.search(rf'<figure id="{panel}">.*?(<svg.*?</svg>)', html, re.S).group(1))


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
    runs = read_runs([root / "tests" / "data" / "quickstart"])
    html = page(runs)
    data = data_of(html)
    assert data["runs"] == ["bf16", "fp16"]
    assert [curve["run"] for curve in data["panels"]["k3"]["curves"]] == [0, 1]
    assert [curve["run"] for curve in data["panels"]["scale"]["curves"]] == [1]  # BF16 has none
    svg = ElementTree.tostring(svg_of(html, "k3"), encoding="unicode")
    assert "var(--run-0)" in svg and "var(--run-1)" in svg
    assert html.count("no alarm") == 2 and html.count("the baseline takes 30") == 2
    assert "Loss scale (precision/loss_scale): not bf16" in html
    assert "Phantom-clipped tokens (phantom/fraction): no run" in html and 'id="phantom"' not in html


def test_numbers_of_the_table(tmp_path):
    html = page([run_of(tmp_path, steps=3, k3=lambda step: (4e-5, math.nan, 2e-5)[step - 1])])
    row = re.search(r"k3 KL\(μ‖π\)<small>nats per token</small></th>(.*?)</tr>", html, re.S).group(1)
    assert re.findall(r"<td>([^<]*)</td>", row) == ["4·10⁻⁵", "2·10⁻⁵", "2·10⁻⁵", "4·10⁻⁵", "3"]


def test_alarms_are_found_offline_and_marked(tmp_path):
    html = page([run_of(tmp_path, "calm"), run_of(tmp_path, "sick", growing)])
    assert re.search(r"sick</b> <span class=\"alarm\">k3_growth</span> at step (\d+)", html)
    assert "precision=fp16" in html and html.count("no alarm") == 1
    for panel, lines in (("k3", "full"), ("reward", "dotted")):
        found = [e for e in svg_of(html, panel).iter("path") if "stroke-opacity: 0." in e.get("style", "")]
        assert len(found) == 1 and "var(--run-1)" in found[0].get("style")
        assert ("stroke-dasharray" in found[0].get("style")) == (lines == "dotted")


def test_nothing_is_fetched_and_the_page_is_whole(tmp_path):
    html = page([run_of(tmp_path, "a <b> & 'c'", growing), run_of(tmp_path, "</script><b>")])
    assert not re.search(r"(src|href)\s*=\s*[\"']?\s*(https?:)?//", html, re.I)
    assert "http://" not in html and "https://" not in html and "@import" not in html and "url(//" not in html
    assert not re.search(r"<(script|link|img|iframe)[^>]*\s(src|href)=", html, re.I)
    parser = Balanced()
    parser.feed(html)
    assert parser.open == [] and len(parser.ids) == len(set(parser.ids))
    referenced = set(re.findall(r'(?:href="|url\()#([^")]+)', html))
    assert referenced and referenced <= set(parser.ids)
    assert data_of(html)["runs"] == ["a <b> & 'c'", "</script><b>"] and "a &lt;b&gt; &amp;" in html


def test_a_mismatch_of_zero_has_a_linear_axis(tmp_path):
    texts = ["".join(e.itertext()) for e in svg_of(page([run_of(tmp_path, k3=lambda step: 0.0)]), "k3").iter("text")]
    assert {"0.0", "0.2", "1.0"} <= set(texts)


def test_prefixed_and_plain_keys_are_one(tmp_path):
    runs = [
        run_of(tmp_path, "a", **{"actor/phantom/fraction": 0.1}),
        run_of(tmp_path, "b", **{"phantom/fraction": 0.2}),
    ]
    curves = data_of(page(runs))["panels"]["phantom"]["curves"]
    assert [curve["points"][0] for curve in curves] == [[1, "0.1"], [1, "0.2"]]


def test_the_cursor_knows_where_the_axes_are(tmp_path):
    """The grid's outermost vertical lines lie within the box, at the x that its formula gives for their steps."""
    html = page([run_of(tmp_path, steps=10)])
    panel, svg = data_of(html)["panels"]["reward"], svg_of(html, "reward")
    (left, right, top, bottom), (first, last) = panel["box"], panel["range"]
    expected = [left + (step - first) / (last - first) * (right - left) for step in (2, 10)]
    drawn = [re.match(r"M ([\d.]+) ([\d.]+)\s+L \1 ([\d.]+)", e.get("d", "")) for e in svg.iter("path")]
    vertical = sorted({round(float(m.group(1)), 3) for m in drawn if m})
    assert [vertical[0], vertical[-1]] == pytest.approx(expected, abs=0.01)
    assert {round(float(y), 2) for m in drawn if m for y in m.groups()[1:]} == {round(top, 2), round(bottom, 2)}


def test_runs_without_any_metric_of_the_report_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="none of the metrics of the report"):
        page([Run("x", tmp_path / "x", [{"step": 1, "loss": 1.0}])])
    with pytest.raises(ConfigurationError, match="9 runs: allowed are up to 8"):
        page([run_of(tmp_path, str(number), steps=2) for number in range(9)])


def test_panels_have_names_of_their_own():
    assert len({panel.name for panel in PANELS}) == len(PANELS)
    assert len({curve.keys for panel in PANELS for curve in panel.curves}) == sum(len(p.curves) for p in PANELS)


@pytest.mark.parametrize(
    ("value", "base", "text"),
    [
        (6.3e-7, 10, "6.3·10⁻⁷"),
        (1e-8, 10, "10⁻⁸"),
        (65536, 2, "2¹⁶"),
        (0.5, 2, "2⁻¹"),
        (65536.0, 10, "65536"),
        (0, 10, "0"),
        (-42.345678, 10, "-42.35"),
        (-2.5e-4, 10, "-2.5·10⁻⁴"),
        (math.nan, 10, "NaN"),
        (-math.inf, 10, "-∞"),
    ],
)
def test_numbers_as_people_read_them(value, base, text):
    assert number_text(value, base) == text


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
