"""`verl-precision patch`: what a user types, sees, and finds in the tree."""

import errno
import os
import shutil

import pytest
from small_series import CONFIG, CORE, PATCHED
from typer.testing import CliRunner

from verl_precision.cli import app
from verl_precision.patching import change

runner = CliRunner()


def patch(*arguments):
    result = runner.invoke(app, ["patch", *map(str, arguments)])
    return result.exit_code, " ".join(result.output.split())


def test_list_names_ours():
    code, output = patch("--list")
    assert code == 0
    assert "verl 0.6.1: 8 patches" in output and "verl 0.9.1: 8 patches" in output
    assert "0001 [algo] fix: seq-mean-token-sum-norm takes the mean over responses" in output


@pytest.mark.parametrize("arguments", [(), ("tree",), ("--list", "tree"), ("--apply",), ("--apply", "--check", "tree")])
def test_one_action_and_its_tree(arguments):
    code, output = patch(*arguments)
    assert code == 2 and "give --list, or one of" in output


def test_there_and_back_byte_for_byte(release, series, snapshot):
    pristine = snapshot(release)
    assert patch("--check", release) == (
        0,
        "verl 1.2.3 is pristine: the series of 2 patches applies cleanly to 4 files",
    )
    assert snapshot(release) == pristine
    code, output = patch("--apply", release)
    assert code == 0 and output.startswith("applied 2 patches for verl 1.2.3")
    applied = snapshot(release)
    assert {path: applied[path][1] for path in PATCHED} == PATCHED
    assert applied[CORE][0] == pristine[CORE][0]
    assert "is applied: the series of 2 patches reverts cleanly" in patch("--check", release)[1]
    assert "is applied already" in patch("--apply", release)[1]
    assert patch("--revert", release)[0] == 0
    assert snapshot(release) == pristine
    assert "is pristine already" in patch("--revert", release)[1]


@pytest.mark.parametrize("action", ["--check", "--apply", "--revert"])
def test_dirty_is_refused_and_untouched(release, series, snapshot, action):
    (release / CONFIG).write_text("mine\n")
    before = snapshot(release)
    code, output = patch(action, release)
    assert code == 1 and f"dirty; neither verl 1.2.3 as released nor with the whole series: {CONFIG}" in output
    assert snapshot(release) == before


def test_installed_package_only_by_name(release, series, snapshot, tmp_path):
    folder = tmp_path / "site-packages"
    shutil.copytree(release, folder)
    before = snapshot(folder)
    code, output = patch("--apply", folder)
    assert code == 1 and "an installed package; nothing was touched" in output
    assert snapshot(folder) == before
    assert patch("--check", folder)[0] == 0
    assert patch("--apply", folder, "--installed")[0] == 0
    assert not (folder / "tests/test_new.py").exists()
    assert patch("--revert", folder)[0] == 1
    assert patch("--revert", folder, "--installed")[0] == 0
    assert snapshot(folder) == before


def test_a_full_disk_leaves_the_tree_as_it_was(release, series, snapshot, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = snapshot(release)
    monkeypatch.setattr(change.os, "fsync", full)
    code, output = patch("--apply", release)
    assert code == 1 and "No space left on device" in output
    assert snapshot(release) == before


@pytest.mark.parametrize(("action", "goal"), [("--apply", PATCHED), ("--revert", None)])
def test_an_interrupted_call_is_named_and_finished_or_taken_back(release, series, snapshot, monkeypatch, action, goal):
    """As a call leaves it that dies after one of four files."""
    pristine = snapshot(release)
    (release / CONFIG).write_bytes(PATCHED[CONFIG])
    (release / change.FOLDER).mkdir()
    (release / change.FOLDER / "copy").write_text("half")
    before = snapshot(release)
    code, output = patch("--check", release)
    assert (
        code == 1 and "patched in part, as an interrupted call leaves it: 1 of 4 files. Run --apply or --rev" in output
    )
    assert snapshot(release) == before
    code, output = patch(action, release)
    assert code == 0 and "finished an interrupted call" in output
    assert change.FOLDER not in os.listdir(release)
    if goal is None:
        assert snapshot(release) == pristine
    else:
        assert {path: (release / path).read_bytes() for path in goal} == goal


def test_patched_in_part_and_dirty_is_refused(release, series, snapshot):
    (release / CONFIG).write_bytes(PATCHED[CONFIG])
    (release / CORE).write_text("mine\n")
    before = snapshot(release)
    for action in ("--check", "--apply", "--revert"):
        code, output = patch(action, release)
        assert code == 1 and f"dirty; neither verl 1.2.3 as released nor with the whole series: {CORE}" in output
        assert snapshot(release) == before
