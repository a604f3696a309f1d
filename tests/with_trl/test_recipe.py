"""The shortest form of recipes/phantom_clipping_trl: in eight steps the clip acts, and not in matched precision."""

import subprocess
import sys

import pytest
from composer import ROOT

from verl_precision.tools.runs.read import read_runs

pytestmark = pytest.mark.trl
SCRIPT = ROOT / "recipes/phantom_clipping_trl/run_length_qwen3_cpu.sh"


def test_eight_steps_and_a_finished_run_is_not_repeated(tmp_path):
    environment = {"PYTHON": sys.executable, "STEPS": "8", "OUTPUT": str(tmp_path / "out"), "ARMS": "clipped fp32"}
    command = ["env", *(f"{name}={value}" for name, value in environment.items()), "bash", str(SCRIPT)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
    runs = {run.path.parts[-3]: run.rows for run in read_runs([tmp_path / "out"])}
    clipped, fp32 = runs["clipped"], runs["fp32"]
    assert len(clipped) == len(fp32) == 8 and "| `clipped` | 0 |" in said
    late = [row["phantom/phantom_clipped_fraction"] for row in clipped[4:]]
    assert clipped[0]["phantom/phantom_clipped_fraction"] < 0.005 and min(late) > 0.005
    current = {name: [row["mismatch/behind_0/k3_kl"] for row in runs[name][1:]] for name in runs}
    assert max(current["fp32"]) < 1e-8 < 1e-4 < min(current["clipped"])
    assert all(row["phantom/phantom_clipped_fraction"] == 0 for row in fp32)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*/*/metrics.jsonl")}
    (tmp_path / "out" / "fp32" / "seed_0" / "metrics.jsonl").write_text("{}\n")  # as after an interruption
    subprocess.run([*command, "--arm", "fp32"], capture_output=True, check=True, timeout=600)
    again = {path: path.stat().st_mtime_ns for path in files}
    assert [path.parts[-3] for path in files if files[path] != again[path]] == ["fp32"]
    assert len(read_runs([tmp_path / "out" / "fp32"])[0].rows) == 8
