"""Which trees a series fits, and which are refused; files made by git, whatever git is told elsewhere."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from verl_precision.base.errors import PatchError, VerlPrecisionError
from verl_precision.base.files import shipped_folder
from verl_precision.tools.patching import series as patching
from verl_precision.tools.patching.series import State, Tree, available, change_tree, check_tree, load_series, sha256

APPLIED, PRISTINE = State.APPLIED, State.PRISTINE
# The files of a small release, and what each holds with its series.
CORE, CONFIG, NEW, TEST = "verl/core.py", "verl/config.yaml", "verl/extra/new.py", "tests/test_new.py"
PATCHED = {CORE: b"a = 10\r\nb = 20\n", CONFIG: b"x: 1\n" * 4 + b"x: 2\n", NEW: b"c = 3\n", TEST: b"def test(): ...\n"}
LONG = "and this title goes on and on until a mail has to fold it"


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=n", "-c", "user.email=e@x.invalid", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `release/`, pristine, and `patches/verl-1.2.3/`."""
    folder = tmp_path_factory.mktemp("made")
    release, work, series = folder / "release", folder / "work", folder / "patches" / "verl-1.2.3"
    for path, text in {
        "verl/version/version": "1.2.3\n",
        CORE: "a = 1\r\nb = 2\n",  # an ending that a careless tool would normalise
        CONFIG: "x: 1\n" * 5,
        "tests/test_old.py": "",
    }.items():
        (release / path).parent.mkdir(parents=True, exist_ok=True)
        (release / path).write_bytes(text.encode())
    (release / CORE).chmod(0o755)
    shutil.copytree(release, work)
    git(work, "init", "-q")
    git(work, "config", "core.autocrlf", "false")
    git(work, "add", "-A")
    git(work, "commit", "-qm", "base")
    (work / CORE).write_bytes(b"a = 10\r\nb = 2\n")
    git(work, "commit", "-qam", f"[algo] fix: a is ten, {LONG}\n\nWhy: a title longer than a line is folded")
    (work / NEW).parent.mkdir()
    for path in (CORE, CONFIG, NEW, TEST):
        (work / path).write_bytes(PATCHED[path])
    git(work, "add", "-A")
    git(work, "commit", "-qm", "[cfg] feat: x is two, c is new")
    git(work, "format-patch", "-q", "--no-signature", "-n", "-o", str(series), "HEAD~2")
    files = {path for patch in patching.read_patches(series) for path in patch.files}
    hashes = {path: {"pristine": sha256(release / path), "patched": sha256(work / path)} for path in sorted(files)}
    (series / "hashes.json").write_text(json.dumps({"verl": "1.2.3", "files": hashes}))
    return folder


@pytest.fixture
def release(made, tmp_path):
    """A pristine tree, tests included."""
    return shutil.copytree(made / "release", tmp_path / "release")


@pytest.fixture
def series(made, tmp_path, monkeypatch):
    """The series, and the only one that the command knows."""
    found = load_series(shutil.copytree(made / "patches" / "verl-1.2.3", tmp_path / "patches" / "verl-1.2.3"))
    monkeypatch.setattr(patching, "available", lambda: {found.version: found})
    return found


def snapshot(root):
    """Return everything about a folder that a patch could change: names, modes, bytes."""
    found = sorted(root.rglob("*"))
    return {str(p.relative_to(root)): (p.stat().st_mode, p.read_bytes() if p.is_file() else None) for p in found}


def test_order_titles_and_files(series):
    titles = [f"[algo] fix: a is ten, {LONG}", "[cfg] feat: x is two, c is new"]
    assert [patch.subject for patch in series.patches] == titles and series.version == "1.2.3"
    assert [set(patch.files) for patch in series.patches] == [{CORE}, {CORE, CONFIG, NEW, TEST}]
    assert series.files[NEW][PRISTINE] is None


def test_ours_are_found_and_whole():
    found = available()
    assert set(found) == {"0.6.1", "0.9.1"}
    for version, series in found.items():
        assert series.folder == shipped_folder("patches") / f"verl-{version}"
        assert [int(patch.path.name[:4]) for patch in series.patches] == list(range(1, len(series.patches) + 1))


@pytest.mark.parametrize(("content", "words"), [
    (None, "unknown tree, .*does not exist"),
    (b"1.2.4\n", r"verl 1\.2\.4 has no patch series here; nothing was changed\. Allowed: 1\.2\.3"),
    *((content, "version|no patch series") for content in (b"\xff\xfe1.2.3", b"1.2.3\n" * 10_000, b"1.2.3\0")),
])  # fmt: skip
def test_a_tree_that_is_no_release_with_a_series_is_refused_in_few_words(release, series, content, words):
    version = release / "verl/version/version"
    version.unlink() if content is None else version.write_bytes(content)
    with pytest.raises(VerlPrecisionError, match=words) as refused:
        Tree(release)
    assert len(str(refused.value)) < 600


def test_what_lies_between_the_states_is_refused(release, series):
    (release / "verl/mine.py").write_text("mine\n")  # no patch touches it, so it does not matter
    assert Tree(release).state is PRISTINE
    (release / CONFIG).write_bytes(PATCHED[CONFIG])
    with pytest.raises(PatchError, match=f"patched in part: {CONFIG}"):
        change_tree(release, APPLIED)


def test_changed_and_missing_files_are_named_and_a_link_even_if_the_content_fits(release, series):
    (release / NEW).parent.mkdir()
    (release / CORE).rename(release / "elsewhere.py")
    for path in (CONFIG, NEW, TEST):
        (release / path).write_text("mine\n")
    before = snapshot(release)
    for call in (check_tree, lambda path: change_tree(path, APPLIED), lambda path: change_tree(path, PRISTINE)):
        with pytest.raises(PatchError, match="dirty; neither verl 1.2.3 as released nor") as refused:
            call(release)
    assert snapshot(release) == before
    assert all(path in str(refused.value) for path in (CORE, CONFIG, NEW, TEST))
    (release / CORE).symlink_to(release / "elsewhere.py")
    with pytest.raises(PatchError, match=f"dirty; .*{CORE}"):
        change_tree(release, APPLIED)


def test_there_and_back_byte_for_byte(release, series):
    (cache := release.with_name("cache")).hardlink_to(release / CORE)  # installers link packages from a cache
    pristine, linked = snapshot(release), cache.read_bytes()
    said = "verl 1.2.3 is pristine: the series of 2 patches applies cleanly to 4 files"
    assert check_tree(release) == f"{said}\nnext: verl-precision patch --apply {release}"
    assert snapshot(release) == pristine
    assert change_tree(release, APPLIED) == f"applied 2 patches for verl 1.2.3: {release}"
    applied = snapshot(release)
    assert {path: applied[path][1] for path in PATCHED} == PATCHED and cache.read_bytes() == linked
    assert applied[CORE][0] == pristine[CORE][0]
    said = "verl 1.2.3 is applied: the series of 2 patches reverts cleanly to 4 files"
    assert check_tree(release) == f"{said}\nnext: verl-precision patch --revert {release}"
    assert change_tree(release, APPLIED) == f"verl 1.2.3 is applied already: {release}"
    change_tree(release, PRISTINE)
    assert snapshot(release) == pristine


def test_settings_of_git_do_not_matter(release, series, monkeypatch, tmp_path):
    """A tree may be a repository or within one; and git may be told to change line endings."""
    (tmp_path / "gitconfig").write_text("[core]\n\tautocrlf = true\n[apply]\n\twhitespace = fix\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    for repository in (tmp_path, release):
        subprocess.run(["git", "init", "-q", str(repository)], check=True)
        subprocess.run(["git", "-C", str(repository), "config", "core.autocrlf", "true"], check=True)
        monkeypatch.setenv("GIT_DIR", str(repository / ".git"))
        for goal in (APPLIED, PRISTINE):
            change_tree(release, goal)
    change_tree(release, APPLIED)
    assert {path: (release / path).read_bytes() for path in PATCHED} == PATCHED


def test_git_missing_and_a_result_that_was_not_recorded_are_said(release, series, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        with pytest.raises(PatchError, match=r"git was not found.*Install git\."):
            change_tree(release, APPLIED)
    series.files[NEW][APPLIED], before = "0" * 64, snapshot(release)
    with pytest.raises(PatchError, match=f"{NEW}: not what is recorded in .*; nothing was changed"):
        change_tree(release, APPLIED)
    assert snapshot(release) == before


def test_a_patch_that_does_not_fit_leaves_the_tree_as_it_was(release, series):
    before, last = snapshot(release), series.patches[-1].path
    last.write_text(last.read_text().replace("-x: 1", "-x: 7"))
    for call in (check_tree, lambda path: change_tree(path, APPLIED)):
        with pytest.raises(PatchError, match="does not apply; nothing was changed. git says: .*config.yaml"):
            call(release)
        assert snapshot(release) == before


def test_installed_package_only_by_name_through_a_link_too(release, series, tmp_path):
    folder, link = shutil.copytree(release, tmp_path / "site-packages"), tmp_path / "looks_harmless"
    link.symlink_to(folder)
    before = snapshot(folder)
    with pytest.raises(PatchError, match="an installed package; nothing was changed.*--installed"):
        change_tree(link, APPLIED)
    assert snapshot(folder) == before
    change_tree(link, APPLIED, installed=True)
    assert (folder / NEW).exists() and not (folder / TEST).exists()  # its tests/ may be anybody's
    change_tree(link, PRISTINE, installed=True)
    assert snapshot(folder) == before
