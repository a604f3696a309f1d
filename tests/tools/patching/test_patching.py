"""Which trees a series fits; files made by git, whatever git is told elsewhere, and put in place so that a kill at any
point loses nothing.
"""

import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
from unittest.mock import Mock

import pytest
from small_series import CONFIG, CORE, LONG, NEW, PATCHED, TEST

from verl_precision.base.errors import PatchError, VerlPrecisionError
from verl_precision.base.files import shipped_folder
from verl_precision.tools.patching import tree as trees
from verl_precision.tools.patching.series import State, available, load_series, sha256
from verl_precision.tools.patching.tree import Tree, change_tree, check_tree, folder_for_copies

APPLIED, PRISTINE = State.APPLIED, State.PRISTINE


def snapshot(root):
    """Return everything about a folder that a patch could change: names, modes, bytes."""
    found = sorted(root.rglob("*"))
    return {str(p.relative_to(root)): (p.stat().st_mode, p.read_bytes() if p.is_file() else None) for p in found}


@pytest.fixture
def copied(release, series, tmp_path):
    """Make the files of the other state in a folder of their own and return their contents."""

    def run():
        tree, folder = Tree(release), tmp_path / "copies"
        folder.mkdir()
        tree.make_copies(APPLIED, tree.files_to_change(APPLIED), folder)
        return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    return run


def test_order_titles_and_files(series):
    titles = [f"[algo] fix: a is ten, {LONG}", "[cfg] feat: x is two, c is new"]
    assert [patch.subject for patch in series.patches] == titles and series.version == "1.2.3"
    assert [set(patch.files) for patch in series.patches] == [{CORE}, {CORE, CONFIG, NEW, TEST}]
    assert series.files[NEW][PRISTINE] is None


def test_a_patch_without_recorded_hashes_is_refused(series):
    manifest = series.folder / "hashes.json"
    recorded = json.loads(manifest.read_text())
    del recorded["files"][NEW]
    manifest.write_text(json.dumps(recorded))
    with pytest.raises(PatchError, match=r"the patches touch .*new\.py.*record_hashes\.py"):
        load_series(series.folder)


def test_ours_are_found_and_whole():
    found = available()
    assert set(found) == {"0.6.1", "0.9.1"}
    for version, series in found.items():
        assert series.folder == shipped_folder("patches") / f"verl-{version}"
        assert [int(patch.path.name[:4]) for patch in series.patches] == list(range(1, len(series.patches) + 1))


@pytest.mark.parametrize(("content", "words"), [
    (None, "unknown tree, .*does not exist"),
    (b"1.2.4\n", r"verl 1\.2\.4 has no series here; nothing was touched\. Allowed: 1\.2\.3"),
    *((content, "version|no series") for content in (b"\xff\xfe1.2.3", b"1.2.3\n" * 10_000, b"1.2.3\0")),
])  # fmt: skip
def test_a_tree_that_is_no_release_with_a_series_is_refused_in_few_words(release, series, content, words):
    version = release / "verl/version/version"
    version.unlink() if content is None else version.write_bytes(content)
    with pytest.raises(VerlPrecisionError, match=words) as refused:
        Tree(release)
    assert len(str(refused.value)) < 600


def test_both_states_are_recognised_and_what_lies_between(release, series):
    (release / "verl/mine.py").write_text("mine\n")  # no patch touches it, so it does not matter
    tree = Tree(release)
    assert tree.files_to_change(APPLIED) == tree.files and tree.files_to_change(PRISTINE) == []
    (release / NEW).parent.mkdir()
    for path in (CONFIG, NEW):
        (release / path).write_bytes(PATCHED[path])
    assert tree.files_to_change(APPLIED) == [TEST, CORE] and tree.files_to_change(PRISTINE) == [CONFIG, NEW]


def test_changed_and_missing_files_are_named_and_a_link_even_if_the_content_fits(release, series):
    (release / NEW).parent.mkdir()
    (release / CORE).rename(release / "elsewhere.py")
    for path in (CONFIG, NEW, TEST):
        (release / path).write_text("mine\n")
    with pytest.raises(PatchError, match="dirty; ") as refused:
        Tree(release).files_to_change(APPLIED)
    assert all(path in str(refused.value) for path in (CORE, CONFIG, NEW, TEST))
    (release / CORE).symlink_to(release / "elsewhere.py")
    with pytest.raises(PatchError, match=f"{CORE} .not a regular file"):
        Tree(release).files_to_change(APPLIED)


def test_there_and_back_byte_for_byte(release, series):
    (release / CONFIG).chmod(0o640)
    (cache := release.with_name("cache")).hardlink_to(release / CORE)  # installers link packages from a cache
    pristine, linked = snapshot(release), cache.read_bytes()
    assert check_tree(release) == "verl 1.2.3 is pristine: the series of 2 patches applies cleanly to 4 files"
    assert snapshot(release) == pristine
    assert change_tree(release, APPLIED) == [f"applied 2 patches for verl 1.2.3: {release}"]
    applied = snapshot(release)
    assert {path: applied[path][1] for path in PATCHED} == PATCHED and cache.read_bytes() == linked
    assert [applied[path][0] for path in (CORE, CONFIG)] == [pristine[path][0] for path in (CORE, CONFIG)]
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


def test_git_missing_and_a_result_that_was_not_recorded_are_refused(release, series, copied, monkeypatch):
    series.files[NEW][APPLIED] = "0" * 64
    monkeypatch.setattr(trees, "available", lambda: {"1.2.3": series})
    with pytest.raises(PatchError, match=f"{NEW}: the result is not what is recorded"):
        change_tree(release, APPLIED)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PatchError, match=r"git: not found.*Install git\."):
        copied()


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


def test_a_file_edited_while_copies_are_made_is_left_alone(release, series, monkeypatch):
    def slow(*arguments):
        make_copies(*arguments)
        (release / CONFIG).write_text("mine\n")

    before, make_copies = snapshot(release), Tree.make_copies
    monkeypatch.setattr(Tree, "make_copies", slow)
    with pytest.raises(PatchError, match=f"dirty; .*{CONFIG}.*nothing was touched"):
        change_tree(release, APPLIED)
    assert snapshot(release) == before | {CONFIG: (before[CONFIG][0], b"mine\n")}


def test_installed_package_only_by_name_through_a_link_too(release, series, tmp_path):
    with pytest.raises(PatchError, match="--installed, and it is not an installed package"):
        change_tree(release, APPLIED, installed=True)
    folder, link = shutil.copytree(release, tmp_path / "site-packages"), tmp_path / "looks_harmless"
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
    monkeypatch.setattr(trees.os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(OSError, match="No space left on device"):
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

    calls = {os: "replace fsync", trees.Path: "mkdir unlink rmdir chmod", shutil: "copyfile rmtree"}
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
        tree = Tree(release)
        state = next((state for state in State if not tree.files_to_change(state)), None)
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
