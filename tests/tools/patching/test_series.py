"""A series as it is read, and those that the package brings; which trees it fits, and which are refused, by name."""

import json

import pytest
from small_series import CONFIG, CORE, LONG, NEW, PATCHED, TEST

from verl_precision.base.errors import PatchError, VerlPrecisionError
from verl_precision.base.files import shipped_folder
from verl_precision.tools.patching.series import (
    State,
    available,
    files_to_change,
    load_series,
    open_tree,
    require_permission,
)


def test_order_titles_and_files(series):
    titles = [f"[algo] fix: a is ten, {LONG}", "[cfg] feat: x is two, c is new"]
    assert [patch.subject for patch in series.patches] == titles and series.version == "1.2.3"
    assert [set(patch.files) for patch in series.patches] == [{CORE}, {CORE, CONFIG, NEW, TEST}]
    assert series.files[NEW][State.PRISTINE] is None


def test_a_patch_without_recorded_hashes_and_a_folder_without_patches_are_refused(patches, tmp_path):
    manifest = patches / "verl-1.2.3" / "hashes.json"
    recorded = json.loads(manifest.read_text())
    del recorded["files"][NEW]
    manifest.write_text(json.dumps(recorded))
    with pytest.raises(PatchError, match=r"the patches touch .*new\.py.*record_hashes\.py"):
        load_series(manifest.parent)
    with pytest.raises(PatchError, match="not a series"):
        load_series(tmp_path)


def test_ours_are_found_and_whole():
    found = available()
    assert set(found) == {"0.6.1", "0.9.1"}
    for version, series in found.items():
        assert series.folder == shipped_folder("patches") / f"verl-{version}"
        assert [int(patch.path.name[:4]) for patch in series.patches] == list(range(1, len(series.patches) + 1))


@pytest.fixture
def opened(series):
    """Open a tree, knowing the small series alone."""
    return lambda path: open_tree(path, {series.version: series})


@pytest.mark.parametrize(("place", "hint"), [("verl", "Did you mean"), ("tests", "Did you mean"), ("verl/version", "")])
def test_unknown_tree_is_refused(release, opened, place, hint):
    with pytest.raises(PatchError, match=f"unknown tree, .*{hint}"):
        opened(release / place)


def test_release_without_series_is_refused_with_those_there_are(release, opened, series):
    assert opened(release).series is series
    (release / "verl/version/version").write_text("1.2.4\n")
    with pytest.raises(PatchError, match=r"verl 1\.2\.4 has no series here; nothing was touched\. Allowed: 1\.2\.3"):
        opened(release)


@pytest.mark.parametrize("content", [b"\xff\xfe1.2.3", b"1.2.3\n" * 10_000, b"1.2.3\0"])
def test_a_file_that_is_no_version_is_named_and_not_printed(release, opened, content):
    (release / "verl/version/version").write_bytes(content)
    with pytest.raises(VerlPrecisionError, match="version") as refused:
        opened(release)
    assert len(str(refused.value)) < 600


def test_both_states_are_recognised_and_what_lies_between(release, opened):
    (release / "verl/mine.py").write_text("mine\n")  # no patch touches it, so it does not matter
    tree = opened(release)
    assert files_to_change(tree, State.APPLIED) == tree.files and files_to_change(tree, State.PRISTINE) == []
    (release / NEW).parent.mkdir()
    for path in (CONFIG, NEW):
        (release / path).write_bytes(PATCHED[path])
    assert files_to_change(tree, State.APPLIED) == [TEST, CORE]
    assert files_to_change(tree, State.PRISTINE) == [CONFIG, NEW]
    for path in (CORE, TEST):
        (release / path).write_bytes(PATCHED[path])
    assert files_to_change(tree, State.APPLIED) == [] and files_to_change(tree, State.PRISTINE) == tree.files


def test_changed_and_missing_files_are_named_and_a_link_even_if_the_content_fits(release, opened):
    (release / NEW).parent.mkdir()
    (release / CORE).rename(release / "elsewhere.py")
    for path in (CONFIG, NEW, TEST):
        (release / path).write_text("mine\n")
    with pytest.raises(PatchError, match="dirty; ") as refused:
        files_to_change(opened(release), State.APPLIED)
    assert all(path in str(refused.value) for path in (CORE, CONFIG, NEW, TEST))
    (release / CORE).symlink_to(release / "elsewhere.py")
    with pytest.raises(PatchError, match=f"{CORE} .not a regular file"):
        files_to_change(opened(release), State.APPLIED)


def test_installed_is_not_a_way_to_name_a_checkout(release, opened):
    with pytest.raises(PatchError, match="--installed, and it is not an installed package"):
        require_permission(opened(release), installed=True)
