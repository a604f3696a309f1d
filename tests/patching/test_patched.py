"""Contents computed by git, whatever git is told elsewhere."""

import subprocess

import pytest
from small_series import NEW, PATCHED, TEST

from verl_precision.errors import PatchError
from verl_precision.patching.patched import contents
from verl_precision.patching.tree import State, open_tree


def test_contents_and_the_tree_stays(release, series, snapshot):
    before = snapshot(release)
    assert contents(open_tree(release), series, State.APPLIED) == PATCHED
    assert snapshot(release) == before


def test_without_tests_there_are_none(release, series):
    (release / "tests/test_old.py").unlink()
    (release / "tests").rmdir()
    assert set(contents(open_tree(release), series, State.APPLIED)) == set(PATCHED) - {TEST}


def test_settings_of_git_do_not_matter(release, series, monkeypatch, tmp_path):
    """Inside a repository git applies patches relative to it; and it may be told to change line endings."""
    (tmp_path / "gitconfig").write_text("[core]\n\tautocrlf = true\n[apply]\n\twhitespace = fix\n")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert contents(open_tree(release), series, State.APPLIED) == PATCHED


def test_git_missing_says_so(release, series, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PatchError, match=r"git: not found.*Install git\."):
        contents(open_tree(release), series, State.APPLIED)


def test_a_result_that_was_not_recorded_is_refused(release, series):
    from dataclasses import replace

    forged = {**series.files, NEW: replace(series.files[NEW], patched="0" * 64)}
    with pytest.raises(PatchError, match=f"{NEW}: the result is not what is recorded"):
        contents(open_tree(release), replace(series, files=forged), State.APPLIED)
