"""Files made by git, whatever git is told elsewhere, and put in place so that a kill at any point loses nothing."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from small_series import CONFIG, CORE, NEW, PATCHED, TEST

from verl_precision.errors import PatchError
from verl_precision.patching import change
from verl_precision.patching.change import FOLDER, folder_for_copies, make_copies
from verl_precision.patching.command import change_tree
from verl_precision.patching.series import State, sha256
from verl_precision.patching.tree import files_to_change, open_tree


@pytest.fixture
def tree(release, series):
    return open_tree(release, {series.version: series})


@pytest.fixture
def copied(tree, tmp_path):
    """Make the files of the other state in a folder of their own and return their contents."""

    def run(tree=tree):
        folder = tmp_path / "copies"
        folder.mkdir()
        make_copies(tree, State.APPLIED, files_to_change(tree, State.APPLIED), folder)
        return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    return run


def test_copies_are_patched_and_the_tree_stays(release, copied, snapshot):
    before = snapshot(release)
    assert copied() == PATCHED
    assert snapshot(release) == before


def test_without_tests_there_are_none(release, copied):
    (release / "tests/test_old.py").unlink()
    (release / "tests").rmdir()
    assert set(copied()) == set(PATCHED) - {TEST}


def test_settings_of_git_do_not_matter(copied, monkeypatch, tmp_path):
    """Inside a repository git applies patches relative to it; and it may be told to change line endings."""
    (tmp_path / "gitconfig").write_text("[core]\n\tautocrlf = true\n[apply]\n\twhitespace = fix\n")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    assert copied() == PATCHED


def test_git_missing_says_so(copied, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PatchError, match=r"git: not found.*Install git\."):
        copied()


def test_a_result_that_was_not_recorded_is_refused(tree, copied):
    forged = {**tree.series.files, NEW: replace(tree.series.files[NEW], patched="0" * 64)}
    with pytest.raises(PatchError, match=f"{NEW}: the result is not what is recorded"):
        copied(replace(tree, series=replace(tree.series, files=forged)))


def test_a_file_edited_while_copies_are_made_is_left_alone(release, series, snapshot, monkeypatch):
    def slow(*arguments):
        make_copies(*arguments)
        (release / CONFIG).write_text("mine\n")

    before = snapshot(release)
    monkeypatch.setattr("verl_precision.patching.command.make_copies", slow)
    with pytest.raises(PatchError, match=f"dirty; .*{CONFIG}.*Nothing was touched"):
        change_tree(release, State.APPLIED)
    assert (release / CONFIG).read_text() == "mine\n"
    (release / CONFIG).write_bytes(before[CONFIG][1])
    assert snapshot(release) == before


def test_permissions_are_kept_and_new_files_take_those_of_their_folder(release, series):
    (release / CONFIG).chmod(0o640)
    (release / "verl").chmod(0o2775)
    change_tree(release, State.APPLIED)
    modes = {path: (release / path).stat().st_mode & 0o7777 for path in (CORE, CONFIG, "verl/extra", NEW)}
    assert modes == {CORE: 0o755, CONFIG: 0o640, "verl/extra": 0o2775, NEW: 0o664}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_owner_is_kept_when_root_patches(release, series):
    for path in (release, *release.rglob("*")):
        os.chown(path, 12345, 23456)
    for goal in (State.APPLIED, State.PRISTINE):
        change_tree(release, goal)
        assert {(p.stat().st_uid, p.stat().st_gid) for p in (release, *release.rglob("*"))} == {(12345, 23456)}


def test_an_owner_that_cannot_be_kept_is_refused(release, series, snapshot, monkeypatch):
    def forbidden(*arguments):
        raise PermissionError(1, "Operation not permitted")

    before = snapshot(release)
    monkeypatch.setattr(change.os, "chown", forbidden)
    real = change.Path.stat
    monkeypatch.setattr(  # the tree's files are another user's
        change.Path,
        "stat",
        lambda path, **options: (
            real(path, **options)
            if FOLDER in path.parts
            else os.stat_result([*real(path, **options)[:4], 12345, *real(path, **options)[5:]])
        ),
    )
    with pytest.raises(PatchError, match="belongs to user 12345.*nothing was touched"):
        change_tree(release, State.APPLIED)
    monkeypatch.setattr(change.Path, "stat", real)
    assert snapshot(release) == before


def test_a_hard_link_elsewhere_keeps_its_content(release, series, tmp_path):
    """Installers link packages from a cache: writing in place would change the cache."""
    (tmp_path / "cache").hardlink_to(release / CORE)
    before = (tmp_path / "cache").read_bytes()
    change_tree(release, State.APPLIED)
    assert (tmp_path / "cache").read_bytes() == before


# Brings the tree argv[2] into state argv[3] with the series in argv[1]; dies by SIGKILL just before the argv[4]-th call
# that changes anything on disk.
KILLED = """
import os, signal, sys
from pathlib import Path
from verl_precision.patching import change, command
from verl_precision.patching.series import State, available

command.available = lambda: available(Path(sys.argv[1]))
left = int(sys.argv[4])

def dying(real):
    def call(*arguments, **keywords):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **keywords)
    return call

os.replace, os.fsync = dying(os.replace), dying(os.fsync)
for name in ("mkdir", "unlink", "rmdir", "chmod"):
    setattr(Path, name, dying(getattr(Path, name)))
for name in ("copyfile", "rmtree"):
    setattr(change.shutil, name, dying(getattr(change.shutil, name)))
command.change_tree(Path(sys.argv[2]), State[sys.argv[3]])
"""


@pytest.mark.parametrize("goal", list(State))
def test_killed_at_any_point_every_file_is_whole_and_the_next_call_finishes_or_takes_back(
    made, patches, series, snapshot, tmp_path, copy_of_release, goal
):
    other = State.PRISTINE if goal is State.APPLIED else State.APPLIED
    states = {State.PRISTINE: snapshot(made / "release")}
    change_tree(example := copy_of_release("example"), State.APPLIED)
    states[State.APPLIED] = snapshot(example)
    seen = {State.PRISTINE: 0, State.APPLIED: 0, None: 0}
    for calls in range(100):
        release = copy_of_release(f"{calls}")
        if goal is State.PRISTINE:
            change_tree(release, State.APPLIED)
        done = subprocess.run([sys.executable, "-c", KILLED, patches, release, goal.name, str(calls)])
        if done.returncode == 0:
            break
        for path, hashes in series.files.items():
            assert sha256(release / path) in (hashes.pristine, hashes.patched), (calls, path)
        tree = open_tree(release, {series.version: series})
        seen[next((state for state in State if not files_to_change(tree, state)), None)] += 1
        wanted = (goal, other)[calls % 2]  # finish it, or take it back
        change_tree(release, wanted)
        assert snapshot(release) == states[wanted], calls
    else:
        pytest.fail("never ran to its end")
    assert seen[goal] >= 1 and seen[other] >= 8 and seen[None] >= 3, seen  # each was really met


def test_one_at_a_time(tmp_path):
    with folder_for_copies(tmp_path) as folder:
        (folder / "copy").write_text("")
        with pytest.raises(PatchError, match="another verl-precision patch is at work"):
            with folder_for_copies(tmp_path):
                pass
        assert (folder / "copy").exists()
    with folder_for_copies(tmp_path):
        pass
    assert not folder.exists()
