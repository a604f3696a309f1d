"""Reading a series, and those that the package brings."""

import json
import os
import subprocess
import sys

import pytest
from small_series import CONFIG, CORE, LONG, NEW, TEST

from verl_precision.base.errors import PatchError
from verl_precision.tools.patching.series import State, available, load_series, patches_folder


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
        assert series.folder == patches_folder() / f"verl-{version}"
        assert [int(patch.path.name[:4]) for patch in series.patches] == list(range(1, len(series.patches) + 1))


def test_a_built_package_finds_its_patches(root, tmp_path):
    build = ["-q", "build_py", "--build-lib", str(tmp_path / "built")]
    subprocess.run([sys.executable, "setup.py", *build], cwd=root, check=True, capture_output=True)
    done = subprocess.run(
        [sys.executable, "-m", "verl_precision.cli", "patch", "--list"],
        cwd=tmp_path / "built",
        env={"PATH": os.defpath, "VERL_USE_EXTERNAL_PLUGINS": "none"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "built" / "verl_precision" / "patches" / "verl-0.6.1"
    assert f"verl 0.6.1: 8 patches, 19 files, {folder}" in done.stdout
    assert "  0001 [algo] fix: seq-mean-token-sum-norm takes the mean over responses" in done.stdout
