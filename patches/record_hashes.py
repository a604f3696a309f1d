"""Record the hashes of the files that a series makes: python patches/record_hashes.py patches/verl-0.6.1 TREE.

TREE is an unpacked source release, as released (it has the tests that wheels lack). Run this after you change a patch.
The script writes only `hashes.json` of the series.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from verl_precision.tools.patching.series import MANIFEST, read_patches, sha256


def main(folder: Path, tree: Path) -> None:
    """Write the hashes of the series in `folder`, made for the release in `tree`."""
    patches = read_patches(folder)
    paths = sorted({path for patch in patches for path in patch.files})
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        for path in paths:
            if (tree / path).exists():
                (copy / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(tree / path, copy / path)
        for patch in patches:
            subprocess.run(["patch", "-p1", "-s", "-i", str(patch.path.resolve())], cwd=copy, check=True)
        files = {path: {"pristine": sha256(tree / path), "patched": sha256(copy / path)} for path in paths}
    version = (tree / "verl" / "version" / "version").read_text().strip()
    (folder / MANIFEST).write_text(json.dumps({"verl": version, "files": files}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
