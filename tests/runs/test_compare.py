"""A comparison writes what it promises after each run, and shows how far the runs are."""

import io
import json
import shutil

import pytest
from rich.console import Console

from verl_precision.errors import ConfigurationError, RunFailedError
from verl_precision.runs import compare
from verl_precision.runs.launch import Progress
from verl_precision.runs.results import PassBar

STARTED = "Ray has started"


@pytest.fixture
def run(root, tmp_path, monkeypatch):
    """Compare recorded runs in place of real ones; return what the user sees. With `fails`, that one fails."""

    def compare_recorded(*precisions: str, fails: str = "", terminal: bool = False) -> str:
        def recorded(config, overrides, folder, on_progress, python):
            assert config.name == "quickstart.yaml" and overrides == ["a=b", f"precision={folder.name}"]
            on_progress(Progress(STARTED, 0, None, 1.0))
            on_progress(Progress("training", 10, 10, 2.0))
            if folder.name == fails:
                raise RunFailedError("verl ended with exit code 1")
            shutil.copytree(root / "tests" / "data" / "quickstart" / folder.name, folder)
            return 60.0

        monkeypatch.setattr(compare, "run_verl", recorded)
        seen = io.StringIO()
        console = Console(file=seen, width=200, force_terminal=terminal)
        config = root / "recipes" / "quickstart" / "quickstart.yaml"
        compare.compare_precisions(config, precisions, ["a=b"], tmp_path / "out", console, PassBar(-20, 4))
        return seen.getvalue()

    return compare_recorded


@pytest.mark.parametrize("terminal", [False, True])
def test_two_runs_are_compared(run, tmp_path, terminal):
    seen = run("bf16", "fp16", terminal=terminal)
    assert "ratio bf16/fp16" in seen and "bar -20" in seen and "report.html" in seen
    lines = [
        f"[    {second} s] {run}: {text}"
        for run in ("bf16", "fp16")
        for second, text in ((1, STARTED), (2, "step 10/10"))
    ]
    if terminal:
        assert "10/10" in seen and lines[0] not in seen
    else:
        assert seen.splitlines()[:4] == lines
    content = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [(run["precision"], run["steps"], run["seconds_total"]) for run in content["runs"]] == [
        ("bf16", 10, 60.0),
        ("fp16", 10, 60.0),
    ]
    assert content["ratios"]["bf16/fp16"]["k3_kl"] > 10 and content["pass_bar"].keys() == {"bf16", "fp16"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("bf16", "fp16", "summary.json", "comparison.png", "report.html")
    }


def test_what_was_measured_stays_when_a_later_run_fails_and_is_not_overwritten(run, tmp_path):
    with pytest.raises(RunFailedError):
        run("bf16", "fp16", fails="fp16")
    before = (tmp_path / "out" / "summary.json").read_text()
    assert [run["precision"] for run in json.loads(before)["runs"]] == ["bf16"]
    with pytest.raises(ConfigurationError, match="exists, and nothing is overwritten"):
        run("bf16")
    assert (tmp_path / "out" / "summary.json").read_text() == before
