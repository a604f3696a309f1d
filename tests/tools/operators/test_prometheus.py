"""Names, help texts, rules and dashboard of the exported metrics belong together, and promtool accepts the rules."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from monitored import trainer_of

from verl_precision.mismatch.alarm import ADVICE
from verl_precision.tools.operators import prometheus
from verl_precision.tools.operators.prometheus import ALARM, Exporter, gauge_name, help_of, readings
from verl_precision.tools.runs.read import read_metrics

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "docs"))
from write_operator_files import help_table, rules, written

ROOT, FOLDER = Path(__file__).resolve().parents[3], Path(prometheus.__file__).parent
RECORDED = ROOT / "tests" / "mismatch" / "recorded" / "seeded_collapse.jsonl"
PROMTOOL = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus")


def exported() -> set[str]:
    """Return the names at Ray's port: of the metrics on the pages, and of a recorded run's."""
    recorded = {key for row in read_metrics(RECORDED) for key, _ in readings(1, row, ())}
    return {f"ray_{name}" for name in (ALARM, *map(gauge_name, {*help_table(), *recorded}))}


def test_files_are_of_the_present_sources():
    for name, content in (("help.yaml", help_table()), ("alerts.yaml", rules())):
        assert (FOLDER / name).read_text() == written(content), "write it anew: python docs/write_operator_files.py"
    assert "".join(help_table().values()).isascii()


def test_rules_and_dashboard_read_metrics_that_are_exported():
    dashboard = json.loads((FOLDER / "grafana.json").read_text())
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    read = {name for text in [*panels, str(rules())] for name in re.findall(r"\bray_\w+", text)}
    assert len(panels) > 10 and read <= exported(), read - exported()
    assert {rule["labels"].get("alarm") for rule in rules()["groups"][0]["rules"]} >= set(ADVICE)


def test_a_metric_has_a_valid_name_and_its_help_and_only_finite_numbers_are_read():
    for key in ("actor/precision/loss_scale", "mismatch/prob_1e-1_1/token_fraction", "val-core/gsm8k/acc/mean@1"):
        assert re.fullmatch(r"[a-zA-Z_]\w*", gauge_name(key), re.ASCII)
    assert help_of("mismatch/behind_2/k3_kl") == help_of("mismatch/behind_{k}/k3_kl") != help_of("mismatch/k3_kl")
    assert help_of("critic/score/mean") == "critic/score/mean in verl's log"
    found = readings(7, {"a": 1, "b": math.nan, "c": "text", "d": math.inf}, ["k3_growth"])
    assert found == {("a", ""): 1.0, ("step", ""): 7.0, **{(ALARM, name): name == "k3_growth" for name in ADVICE}}


def test_latest_values_are_repeated_until_the_run_ends(monkeypatch):
    """With nothing new from a step, as in a long one."""
    said, repeated = [], []
    trainer = trainer_of({"trainer": {"experiment_name": "π"}})
    exporter = Exporter(trainer)

    class Gauge:
        def __init__(self, name, words, tags):
            assert words.isascii() and "run" in tags
            self.name = name

        def set(self, value, tags):
            said.append((self.name, value, tags))
            if len(repeated) < 3 and self.name == "verl_precision_step":
                repeated.append(value)
                if len(repeated) == 3:
                    exporter._queue.put(None)

    monkeypatch.setattr("ray.util.metrics.Gauge", Gauge)
    monkeypatch.setattr(prometheus, "REPEAT_SECONDS", 0.001)
    exporter._compute_metrics(lambda *args, **more: None, None, {"mismatch/k3_kl": 0.5}, global_steps=4)
    exporter.work()
    assert repeated == [4.0] * 3
    assert ("verl_precision_mismatch_k3_kl", 0.5, {"run": "\\u03c0"}) in said
    assert (ALARM, 0.0, {"run": "\\u03c0", "alarm": "k3_growth"}) in said


@PROMTOOL
def test_promtool_accepts_the_rules_and_an_active_alarm_fires(tmp_path):
    done = subprocess.run(["promtool", "check", "rules", FOLDER / "alerts.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cases = []
    for rule in rules()["groups"][0]["rules"][:-1]:
        said = {key: text.replace("{{ $labels.run }}", "r") for key, text in rule["annotations"].items()}
        fires = {"exp_labels": {**rule["labels"], "run": "r"}, "exp_annotations": said}
        times = [{"eval_time": "1m", "exp_alerts": []}, {"eval_time": "4m", "exp_alerts": [fires]}]
        series = {"series": f'ray_{ALARM}{{alarm="{rule["labels"]["alarm"]}", run="r"}}', "values": "0 0 0 1 1"}
        alerts = [{"alertname": rule["alert"], **time} for time in times]
        cases.append({"interval": "1m", "input_series": [series], "alert_rule_test": alerts})
    content = {"rule_files": [str(FOLDER / "alerts.yaml")], "tests": cases}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(content, allow_unicode=True))
    done = subprocess.run(["promtool", "test", "rules", tmp_path / "test.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
