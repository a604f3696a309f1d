"""Files made by git, whatever git is told elsewhere, and put in place so that a kill at any point loses nothing."""

import errno
import itertools
import os
import shutil
import signal
import subprocess
from dataclasses import replace
from unittest.mock import Mock

import pytest
from small_series import CONFIG, CORE, NEW, PATCHED, TEST

from verl_precision.base.errors import PatchError
from verl_precision.tools.patching import change
from verl_precision.tools.patching.change import FOLDER, change_tree, check_tree, folder_for_copies, make_copies
from verl_precision.tools.patching.series import State, files_to_change, open_tree, sha256

APPLIED, PRISTINE = State.APPLIED, State.PRISTINE


def snapshot(root):
    """Return everything about a folder that a patch could change: names, modes, bytes."""
    found = sorted(root.rglob("*"))
    return {str(p.relative_to(root)): (p.stat().st_mode, p.read_bytes() if p.is_file() else None) for p in found}


@pytest.fixture
def tree(release, series):
    return open_tree(release, {series.version: series})


@pytest.fixture
def copied(tree, tmp_path):
    """Make the files of the other state in a folder of their own and return their contents."""

    def run(tree=tree):
        (folder := tmp_path / "copies").mkdir()
        make_copies(tree, APPLIED, files_to_change(tree, APPLIED), folder)
        return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    return run


def test_there_and_back_byte_for_byte(release, series):
    pristine = snapshot(release)
    assert check_tree(release) == "verl 1.2.3 is pristine: the series of 2 patches applies cleanly to 4 files"
    assert snapshot(release) == pristine
    assert change_tree(release, APPLIED) == [f"applied 2 patches for verl 1.2.3: {release}"]
    applied = snapshot(release)
    assert {path: applied[path][1] for path in PATCHED} == PATCHED
    assert applied[CORE][0] == pristine[CORE][0]
    assert check_tree(release) == "verl 1.2.3 is applied: the series of 2 patches reverts cleanly to 4 files"
    assert change_tree(release, APPLIED) == [f"verl 1.2.3 is applied already: {release}"]
    change_tree(release, PRISTINE)
    assert snapshot(release) == pristine


def test_without_tests_there_are_none(release, copied):
    shutil.rmtree(release / "tests")
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
    forged = {**tree.series.files, NEW: {PRISTINE: None, APPLIED: "0" * 64}}
    with pytest.raises(PatchError, match=f"{NEW}: the result is not what is recorded"):
        copied(replace(tree, series=replace(tree.series, files=forged)))


def test_a_file_edited_while_copies_are_made_is_left_alone(release, series, monkeypatch):
    def slow(*arguments):
        make_copies(*arguments)
        (release / CONFIG).write_text("mine\n")

    before = snapshot(release)
    monkeypatch.setattr(change, "make_copies", slow)
    with pytest.raises(PatchError, match=f"dirty; .*{CONFIG}.*nothing was touched"):
        change_tree(release, APPLIED)
    assert snapshot(release) == before | {CONFIG: (before[CONFIG][0], b"mine\n")}


@pytest.mark.parametrize("goal", [None, *State])
@pytest.mark.parametrize("in_part", [False, True])
def test_dirty_is_refused_and_untouched(release, series, goal, in_part):
    (release / CORE).write_text("mine\n")
    if in_part:
        (release / CONFIG).write_bytes(PATCHED[CONFIG])
    before = snapshot(release)
    with pytest.raises(PatchError, match=f"dirty; neither verl 1.2.3 as released nor with the whole series: {CORE}"):
        change_tree(release, goal) if goal else check_tree(release)
    assert snapshot(release) == before


@pytest.mark.parametrize("packages", ["site-packages", "dist-packages"])
def test_installed_package_only_by_name_through_a_link_too(release, series, tmp_path, packages):
    folder, link = shutil.copytree(release, tmp_path / packages), tmp_path / "looks_harmless"
    link.symlink_to(folder)
    before = snapshot(folder)
    with pytest.raises(PatchError, match="an installed package; nothing was touched.*--installed"):
        change_tree(link, APPLIED)
    assert snapshot(folder) == before
    change_tree(link, APPLIED, installed=True)
    assert (folder / NEW).exists() and not (folder / TEST).exists()  # its tests/ may be anybody's
    change_tree(link, PRISTINE, installed=True)
    assert snapshot(folder) == before


def test_a_full_disk_leaves_the_tree_as_it_was(release, series, monkeypatch):
    before = snapshot(release)
    monkeypatch.setattr(change.os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(OSError, match="No space left on device"):
        change_tree(release, APPLIED)
    assert snapshot(release) == before


def test_permissions_and_hard_links_are_kept_and_new_files_take_those_of_their_folder(release, series):
    (release / CONFIG).chmod(0o640)
    (release / "verl").chmod(0o2775)
    (cache := release.with_name("cache")).hardlink_to(release / CORE)  # installers link packages from a cache
    before = cache.read_bytes()
    change_tree(release, APPLIED)
    assert cache.read_bytes() == before
    modes = {path: (release / path).stat().st_mode & 0o7777 for path in (CORE, CONFIG, "verl/extra", NEW)}
    assert modes == {CORE: 0o755, CONFIG: 0o640, "verl/extra": 0o2775, NEW: 0o664}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_owner_is_kept_when_root_patches(release, series):
    for path in (release, *release.rglob("*")):
        os.chown(path, 12345, 23456)
    for goal in (APPLIED, PRISTINE):
        change_tree(release, goal)
        assert {(p.stat().st_uid, p.stat().st_gid) for p in (release, *release.rglob("*"))} == {(12345, 23456)}


def test_an_owner_that_cannot_be_kept_is_refused(release, series, monkeypatch):
    real = change.Path.stat

    def of_another_user(path, **options):
        found = real(path, **options)
        return found if FOLDER in path.parts else os.stat_result([*found[:4], 12345, *found[5:]])

    before = snapshot(release)
    with monkeypatch.context() as patch:
        patch.setattr(change.os, "chown", Mock(side_effect=PermissionError(1, "Operation not permitted")))
        patch.setattr(change.Path, "stat", of_another_user)
        with pytest.raises(PatchError, match="belongs to user 12345.*nothing was touched"):
            change_tree(release, APPLIED)
    assert snapshot(release) == before


def die_at_call(number, goal, release):
    """In a fork: bring a tree into a state, and die by SIGKILL just before this call that changes anything on disk."""
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    counted = itertools.count()

    def dying(real):
        def call(*arguments, **keywords):
            if next(counted) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **keywords)

        return call

    calls = {os: "replace fsync", change.Path: "mkdir unlink rmdir chmod", shutil: "copyfile rmtree"}
    for owner, name in ((owner, name) for owner, names in calls.items() for name in names.split()):
        setattr(owner, name, dying(getattr(owner, name)))
    try:
        change_tree(release, goal)
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.parametrize("goal", list(State))
def test_killed_anywhere_files_are_whole_and_the_next_call_finishes_or_takes_back(series, copy_of_release, goal):
    (other,) = set(State) - {goal}
    states, seen = {PRISTINE: snapshot(copy_of_release("pristine"))}, {PRISTINE: 0, APPLIED: 0, None: 0}
    change_tree(example := copy_of_release("example"), APPLIED)
    states[APPLIED] = snapshot(example)
    for number in range(100):
        release = copy_of_release(f"{number}")
        change_tree(release, other)
        if die_at_call(number, goal, release) == 0:
            break
        for path, hashes in series.files.items():
            assert sha256(release / path) in hashes.values(), (number, path)
        tree = open_tree(release, {series.version: series})
        state = next((state for state in State if not files_to_change(tree, state)), None)
        seen[state] += 1
        if state is None:
            with pytest.raises(PatchError, match="patched in part, as an interrupted call leaves it: . of 4 files"):
                check_tree(release)
        wanted = (goal, other)[number % 2]  # finish it, or take it back
        said = change_tree(release, wanted)
        assert (said[0] == "finished an interrupted call") == (state is None)
        assert snapshot(release) == states[wanted], number
    else:
        pytest.fail("never ran to its end")
    assert seen[goal] >= 1 and seen[other] >= 8 and seen[None] >= 3, seen  # each was really met


def test_one_at_a_time(tmp_path):
    with folder_for_copies(tmp_path) as folder:
        (folder / "copy").write_text("")
        with pytest.raises(PatchError, match="another verl-precision patch is at work"), folder_for_copies(tmp_path):
            pass
        assert (folder / "copy").exists()
    with folder_for_copies(tmp_path):
        pass
    assert not folder.exists()
