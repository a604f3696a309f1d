"""What is recognised, what is refused, and by which name."""

import shutil

import pytest
from small_series import CONFIG, CORE, NEW, PATCHED, TEST

from verl_precision.errors import PatchError
from verl_precision.patching.tree import (
    State,
    open_tree,
    require_permission,
    series_for,
    state_of,
    touched_files,
)


def test_version_is_read_from_the_tree(release):
    assert open_tree(release).version == "1.2.3"


@pytest.mark.parametrize(
    ("inside", "hint"), [("verl", "Did you mean"), ("tests", "Did you mean"), ("verl/version", "")]
)
def test_unknown_tree_is_refused(release, inside, hint):
    with pytest.raises(PatchError, match=f"unknown tree, .*{hint}"):
        open_tree(release / inside)


def test_release_without_series_is_refused_with_those_there_are(release, series):
    (release / "verl/version/version").write_text("1.2.4\n")
    with pytest.raises(PatchError, match=r"verl 1\.2\.4 has no series here; nothing was touched\. Allowed: 1\.2\.3"):
        series_for(open_tree(release), {"1.2.3": series})


def test_both_states_are_recognised(release, series):
    assert state_of(open_tree(release), series) is State.PRISTINE
    (release / NEW).parent.mkdir()
    for path, content in PATCHED.items():
        (release / path).write_bytes(content)
    assert state_of(open_tree(release), series) is State.APPLIED


@pytest.mark.parametrize("path", [CORE, CONFIG, NEW, TEST])
def test_a_changed_file_is_named(release, series, path):
    (release / path).parent.mkdir(exist_ok=True)
    (release / path).write_text("mine\n")
    with pytest.raises(PatchError, match=f"dirty; .*{path}"):
        state_of(open_tree(release), series)


def test_a_missing_file_is_named(release, series):
    (release / CORE).unlink()
    with pytest.raises(PatchError, match=f"dirty; .*{CORE}"):
        state_of(open_tree(release), series)


def test_a_link_is_refused_even_if_its_content_fits(release, series):
    (release / CORE).rename(release / "elsewhere.py")
    (release / CORE).symlink_to(release / "elsewhere.py")
    with pytest.raises(PatchError, match=f"{CORE} .not a regular file"):
        state_of(open_tree(release), series)


def test_patched_in_part_is_refused(release, series):
    (release / CONFIG).write_bytes(PATCHED[CONFIG])
    with pytest.raises(PatchError, match=f"patched in part.*{CONFIG}"):
        state_of(open_tree(release), series)


def test_files_that_no_patch_touches_do_not_matter(release, series):
    (release / "verl/mine.py").write_text("mine\n")
    assert state_of(open_tree(release), series) is State.PRISTINE


@pytest.mark.parametrize("packages", ["site-packages", "dist-packages"])
def test_installed_package_needs_its_name(release, series, tmp_path, packages):
    folder = tmp_path / packages
    shutil.copytree(release, folder)  # its tests/ may be anybody's
    tree = open_tree(folder)
    assert tree.installed and TEST not in touched_files(tree, series)
    with pytest.raises(PatchError, match="an installed package; nothing was touched.*--installed"):
        require_permission(tree, installed=False)
    require_permission(tree, installed=True)


def test_a_link_to_an_installed_package_is_one(release, tmp_path):
    shutil.copytree(release, tmp_path / "site-packages")
    (tmp_path / "looks_harmless").symlink_to(tmp_path / "site-packages")
    assert open_tree(tmp_path / "looks_harmless").installed


def test_installed_is_not_a_way_to_name_a_checkout(release):
    with pytest.raises(PatchError, match="--installed with TREE=.*not an installed package"):
        require_permission(open_tree(release), installed=True)
