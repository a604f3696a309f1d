"""An installed package carries the series."""

import subprocess
import sys


def test_a_built_package_finds_its_patches(root, tmp_path):
    build = ["-q", "build_py", "--build-lib", str(tmp_path / "built")]
    subprocess.run([sys.executable, "setup.py", *build], cwd=root, check=True, capture_output=True)
    done = subprocess.run(
        [sys.executable, "-m", "verl_precision.cli", "patch", "--list"],
        cwd=tmp_path / "built",
        env={"PATH": "/usr/bin:/bin", "VERL_USE_EXTERNAL_PLUGINS": "none"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert f"verl 0.6.1: 8 patches, 19 files, {tmp_path / 'built' / 'verl_precision' / 'patches' / 'verl-0.6.1'}" in (
        done.stdout
    )
