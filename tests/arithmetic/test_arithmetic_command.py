"""`verl-precision arithmetic`: a folder that is complete, or none."""

import pytest
from typer.testing import CliRunner

from verl_precision.arithmetic import model, task
from verl_precision.cli import app


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A model folder that is there already: what is tested is how it is written out."""
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr(model, "cached_arithmetic_model", lambda on_progress: folder)
    return folder


def test_writes_task_and_next_command(tmp_path, trained):
    folder = tmp_path / "new" / "task"
    done = CliRunner().invoke(app, ["arithmetic", str(folder)])
    assert done.exit_code == 0, done.output
    assert (folder / "model/config.json").read_text() == "{}"
    assert len((folder / "problems.jsonl").read_text().splitlines()) == 810
    assert [path.name for path in folder.parent.iterdir()] == ["task"]
    assert f"verl-precision sanity-set {folder}/problems.jsonl --model {folder}/model" in done.output


def test_interrupted_it_leaves_nothing_that_looks_complete(tmp_path, trained, monkeypatch):
    def interrupt(path):
        path.write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(task, "write_rows", interrupt)
    folder = tmp_path / "new" / "task"
    done = CliRunner().invoke(app, ["arithmetic", str(folder)])
    assert done.exit_code != 0
    assert list(folder.parent.iterdir()) == []
