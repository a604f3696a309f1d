"""All or nothing, also when the process is killed: at every rename, removal and write, for any set of files."""

import json
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_precision.errors import PatchError
from verl_precision.patching import transaction

NAMES = st.sampled_from(["a", "b", "d/a", "d/e/a", "f/a"])
CONTENTS = st.one_of(st.none(), st.binary(max_size=8))

# Replaces files in folder argv[1] by the JSON argv[2]; dies by SIGKILL just before the argv[3]-th change of a file.
KILLED = """
import json, os, signal, sys
from pathlib import Path
from verl_precision.patching import transaction

left = int(sys.argv[3])

def dying(real):
    def call(*arguments, **keywords):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **keywords)
    return call

os.replace, os.fsync, os.rmdir = map(dying, (os.replace, os.fsync, os.rmdir))
Path.unlink, transaction.shutil.rmtree = dying(Path.unlink), dying(transaction.shutil.rmtree)
new = {path: None if text is None else text.encode() for path, text in json.loads(sys.argv[2]).items()}
transaction.replace_all(Path(sys.argv[1]), new)
"""
OLD = {"a": "old a", "d/a": "old d", "gone/a": "old"}
NEW = {"a": "new a", "d/a": "new d", "gone/a": None, "added/a": "new"}


def write(root, files):
    for path, content in files.items():
        if content is not None:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content if isinstance(content, bytes) else content.encode())


def files_of(root):
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def folders_of(root):
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_dir()}


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(old=st.dictionaries(NAMES, CONTENTS), new=st.dictionaries(NAMES, CONTENTS))
def test_there_and_back_is_the_same_bytes(tmp_path_factory, old, new):
    root = tmp_path_factory.mktemp("tree")
    write(root, old)
    before, folders = files_of(root), folders_of(root)
    transaction.replace_all(root, new)
    wanted = {**before, **new}
    assert files_of(root) == {path: content for path, content in wanted.items() if content is not None}
    transaction.replace_all(root, {path: before.get(path) for path in new})
    assert (files_of(root), folders_of(root)) == (before, folders)


def test_mode_is_kept(tmp_path):
    write(tmp_path, {"a": "old"})
    (tmp_path / "a").chmod(0o750)
    transaction.replace_all(tmp_path, {"a": b"new"})
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o750


def test_a_hard_link_elsewhere_keeps_its_content(tmp_path):
    """Installers link packages from a cache: writing in place would change the cache."""
    root = tmp_path / "tree"
    write(root, {"a": "old"})
    (tmp_path / "cache").hardlink_to(root / "a")
    transaction.replace_all(root, {"a": b"new"})
    assert (tmp_path / "cache").read_bytes() == b"old"


def _run_until_killed(root, steps):
    write(root, OLD)
    return subprocess.run([sys.executable, "-c", KILLED, str(root), json.dumps(NEW), str(steps)]).returncode


def test_killed_at_any_point_is_as_it_was_or_finished_by_the_next_call(tmp_path):
    finished, forgotten, between = 0, 0, 0
    for steps in range(100):
        root = tmp_path / str(steps)
        if _run_until_killed(root, steps) == 0:
            break
        pending = transaction.interrupted(root)
        now = {path: content for path, content in files_of(root).items() if not path.startswith(transaction.FOLDER)}
        old = {path: text.encode() for path, text in OLD.items()}
        new = {path: text.encode() for path, text in NEW.items() if text is not None}
        between += pending and now not in (old, new)
        if transaction.recover(root):
            finished += 1
            assert pending
        elif now == old:
            forgotten += 1
        expected = new if pending or now == new else old
        assert files_of(root) == expected, steps
        assert folders_of(root) == {path.split("/")[0] for path in expected if "/" in path}, steps
        assert not transaction.recover(root)  # a second time there is nothing to do
    else:
        pytest.fail("never ran to its end")
    assert finished >= 4 and forgotten >= 4 and between >= 3  # each was really met


def test_a_file_changed_since_the_interruption_is_left_alone_and_named(tmp_path):
    for steps in range(100):
        root = tmp_path / str(steps)
        _run_until_killed(root, steps)
        if transaction.interrupted(root):
            break
    (root / "a").write_text("mine")
    with pytest.raises(PatchError, match="a: changed since verl-precision patch was interrupted"):
        transaction.recover(root)
    assert (root / "a").read_text() == "mine"
    (root / "a").write_text("old a")
    assert transaction.recover(root)
    assert (root / "a").read_text() == "new a"


def test_one_at_a_time(tmp_path):
    with transaction.exclusive(tmp_path):
        with pytest.raises(PatchError, match="another verl-precision patch is at work"):
            with transaction.exclusive(tmp_path):
                pass
    with transaction.exclusive(tmp_path):
        pass
