"""`verl-precision patch`: what a user types, sees, and finds in the tree."""

import errno
import os
import shutil
import subprocess
import sys

import pytest
from small_series import CONFIG, CORE, PATCHED
from typer.testing import CliRunner

from verl_precision.cli import app
from verl_precision.patching import transaction

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
    monkeypatch.setattr(transaction.os, "fsync", full)
    code, output = patch("--apply", release)
    assert code == 1 and "No space left on device" in output
    assert snapshot(release) == before


KILLED = """
import os, signal, sys
from pathlib import Path
from verl_precision.cli import app
from verl_precision.patching import command
from verl_precision.patching.series import available

command.available = lambda: available(Path(sys.argv[1]))
left, real = int(sys.argv[4]), os.replace

def replace(*arguments):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    real(*arguments)

os.replace = replace
app(["patch", sys.argv[3], sys.argv[2]])
"""


@pytest.mark.parametrize(("action", "goal"), [("--apply", "applied"), ("--revert", "pristine")])
@pytest.mark.parametrize("renames", [0, 1, 2])
def test_killed_between_files(release, series, snapshot, patches, action, goal, renames):
    """kill -9 before the journal (0 renames), and after it and 0 or 1 files."""
    pristine = snapshot(release)
    if action == "--revert":
        assert patch("--apply", release)[0] == 0
    begun = snapshot(release)
    done = subprocess.run([sys.executable, "-c", KILLED, patches, release, action, str(renames)])
    assert done.returncode == -9
    if renames == 0:  # as it was
        assert transaction.FOLDER in os.listdir(release)
        left = {path: entry for path, entry in snapshot(release).items() if not path.startswith(transaction.FOLDER)}
        assert left == begun
        assert patch("--check", release)[0] == 0
    else:
        code, output = patch("--check", release)
        assert code == 1 and "was interrupted; files may be old or new. Run --apply or --revert" in output
    code, output = patch(action, release)
    assert code == 0
    assert ("finished an interrupted call" in output) == (renames > 0)
    assert f"is {goal}" in patch("--check", release)[1]
    assert transaction.FOLDER not in os.listdir(release)
    patch("--revert", release)
    assert snapshot(release) == pristine


def test_an_interrupted_apply_can_be_reverted_at_once(release, series, snapshot, patches):
    pristine = snapshot(release)
    subprocess.run([sys.executable, "-c", KILLED, patches, release, "--apply", "2"])
    code, output = patch("--revert", release)
    assert code == 0 and "finished an interrupted call" in output
    assert snapshot(release) == pristine
