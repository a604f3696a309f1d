"""Reading a series."""

import json

import pytest
from small_series import CONFIG, CORE, LONG, NEW, TEST

from verl_precision.errors import PatchError
from verl_precision.patching.series import available, load_series, patches_folder


def test_order_titles_and_files(series):
    assert [patch.subject for patch in series.patches] == [
        f"[algo] fix: a is ten, {LONG}",
        "[cfg] feat: x is two, c is new",
    ]
    assert series.patches[0].files == (CORE,)
    assert set(series.patches[1].files) == {CORE, CONFIG, NEW, TEST}
    assert series.version == "1.2.3"
    assert series.files[NEW].pristine is None


def test_a_patch_without_recorded_hashes_is_refused(patches):
    manifest = patches / "verl-1.2.3" / "hashes.json"
    recorded = json.loads(manifest.read_text())
    del recorded["files"][NEW]
    manifest.write_text(json.dumps(recorded))
    with pytest.raises(PatchError, match=r"the patches touch .*new\.py.*record_hashes\.py"):
        load_series(manifest.parent)


def test_a_folder_without_patches_is_refused(tmp_path):
    with pytest.raises(PatchError, match="not a series"):
        load_series(tmp_path)


def test_ours_are_found_and_whole():
    found = available()
    assert set(found) == {"0.6.1", "0.9.1"}
    for version, series in found.items():
        assert series.folder == patches_folder() / f"verl-{version}"
        assert [int(patch.path.name[:4]) for patch in series.patches] == list(range(1, len(series.patches) + 1))
