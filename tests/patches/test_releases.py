"""The series against the released packages: they apply, they come off, they do what they say, and nothing else.

Pristine trees are unpacked from the released packages, fetched by pip once and kept outside the repository.
"""

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from verl_precision.tools.patching.series import State, Tree, available, change_tree, check_tree, sha256
from verl_precision.tools.runs.fork_server import fork_server

VERSIONS = sorted(available())
# Upstream's tests of what is patched, on a CPU.
UPSTREAM_0_9_1 = [
    *("tests/trainer/ppo/test_rollout_corr.py", "tests/trainer/ppo/test_rollout_corr_integration.py"),
    *(f"tests/trainer/ppo/test_{name}_on_cpu.py" for name in ("core_algos", "loss_aggregation", "metric_utils")),
    *("tests/trainer/ppo/test_value_loss_normalization_on_cpu.py", "tests/test_base_config_on_cpu.py"),
    "tests/checkpoint_engine/test_fsdp_lora_only_checkpoint_on_cpu.py",
]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "verl-precision" / "releases"
# pip's own words when no index answers, as opposed to an index that lacks the release
UNREACHABLE = re.compile(r"from versions: none\)|Connection to .* failed|Temporary failure in name resolution")
# What every verl imports, and takes ten seconds of a core.
PRELOADED = (
    *("torch.distributed.fsdp", "transformers.models.qwen2.modeling_qwen2", "ray", "accelerate", "datasets", "peft"),
    *("tensordict", "pandas", "hydra", "pytest"),
)
# Without our plugin, which is for 0.9 alone.
SETTINGS = {"VERL_USE_EXTERNAL_PLUGINS": "none", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def _fetch(version: str) -> Path:
    wheel = CACHE / f"verl-{version}-py3-none-any.whl"
    if not wheel.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--retries", "1"]
        pip += ["--timeout", "15", "-d", str(CACHE), f"verl=={version}"]
        done = subprocess.run(pip, capture_output=True, text=True, timeout=180)
        if done.returncode and UNREACHABLE.search(done.stderr):
            pytest.skip(f"verl {version} cannot be fetched, no package index is reachable: {done.stderr[-200:]}")
        assert done.returncode == 0, done.stderr
    return wheel


@pytest.fixture(scope="session")
def unpack(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Unpack a release into a fresh folder."""

    def run(version: str) -> Path:
        folder = tmp_path_factory.mktemp(f"verl-{version}")
        shutil.unpack_archive(_fetch(version), folder, "zip")
        return folder

    return run


@pytest.fixture(scope="session")
def outcomes() -> Iterator[Callable[..., dict[str, str]]]:
    """Run pytest in a tree, in a fork of one process that has all but verl; return each test's outcome by its name."""
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": str(Path(__file__).parent)}
    options = ["-q", "-rA", "--noconftest", "-p", "no:cacheprovider", "-W", "ignore", "--tb=no"]

    with fork_server(PRELOADED) as python:

        def run(tree: Path, *arguments: str) -> dict[str, str]:
            command = [*shlex.split(python), "-m", "pytest", *options, "--continue-on-collection-errors"]
            command += ["--rootdir", str(tree), *arguments]
            done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=280)
            found = re.findall(r"^(PASSED|FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.M)
            assert found, done.stdout[-3000:] + done.stderr[-3000:]
            return {name.split("/")[-1].removeprefix("::"): outcome.lower() for outcome, name in found}

        yield run


def everything(tree):
    return {str(p.relative_to(tree)): sha256(p) for p in sorted(tree.rglob("*")) if "__pycache__" not in p.parts}


@pytest.mark.parametrize("version", VERSIONS)
def test_applies_and_reverts_byte_for_byte(unpack, version):
    tree = unpack(version)
    before = everything(tree)
    assert f"verl {version} is pristine" in check_tree(tree)
    change_tree(tree, State.APPLIED)
    changed = {path for path, digest in everything(tree).items() if before.get(path, "") != digest and digest}
    assert changed == set(available()[version].files)
    for path in changed:
        if path.endswith(".py"):
            compile((tree / path).read_text(), path, "exec")
    assert f"verl {version} is applied" in check_tree(tree)
    change_tree(tree, State.PRISTINE)
    assert everything(tree) == before


@pytest.mark.parametrize("version", VERSIONS)
def test_git_am_and_patch_take_it_too(unpack, version, tmp_path):
    series, release = available()[version], unpack(version)
    wanted = {path: hashes[State.APPLIED] for path, hashes in series.files.items()}
    identity = ["-c", "user.name=n", "-c", "user.email=e@x.invalid", "-c", "commit.gpgsign=false"]
    by_git, by_patch = tmp_path / "git", tmp_path / "patch"
    for folder, path in itertools.product((by_git, by_patch), Tree(release).files):
        if (release / path).exists():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(release / path, folder / path)
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "release"]):
        subprocess.run(["git", *identity, *command], cwd=by_git, check=True)
    mails = [str(patch.path) for patch in series.patches]
    subprocess.run(["git", *identity, "am", "-q", "--keep-non-patch", *mails], cwd=by_git, check=True)
    assert {path: sha256(by_git / path) for path in wanted} == wanted
    subjects = subprocess.run(["git", "log", "--format=%s"], cwd=by_git, check=True, capture_output=True, text=True)
    assert subjects.stdout.splitlines()[-2::-1] == [patch.subject for patch in series.patches]
    if shutil.which("patch"):
        for mail in mails:
            subprocess.run(["patch", "-p1", "-s", "-F0", "-i", mail], cwd=by_patch, check=True)
        assert {path: sha256(by_patch / path) for path in wanted} == wanted


@pytest.mark.matrix  # 0.9.1 and the series change rarely; that the series applies byte for byte: the tests above
def test_0_9_1_the_tests_it_brings_fail_before_and_pass_after_as_upstreams_do(unpack, outcomes):
    series, release, patched = available()["0.9.1"], unpack("0.9.1"), unpack("0.9.1")
    change_tree(patched, State.APPLIED)
    brought = sorted(p for p, was in series.files.items() if was[State.PRISTINE] is None and "/test_" in p)
    assert len(brought) == len(series.patches)
    for path in brought:
        (release / path).parent.mkdir(exist_ok=True)
        shutil.copyfile(patched / path, release / path)
    before = outcomes(release, *brought)
    for path in brought:  # each patch is needed
        assert any(name.startswith(Path(path).name) and outcome != "passed" for name, outcome in before.items()), path
    after = outcomes(patched, *brought, *UPSTREAM_0_9_1)
    assert len(after) >= len(before) + 100
    assert {name: outcome for name, outcome in after.items() if outcome != "passed"} == {}
