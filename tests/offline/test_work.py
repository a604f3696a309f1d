"""The processes: nothing is done twice, a failure is named, and none outlives its parent."""

import subprocess
import sys

import pytest
from made import written

from verl_precision.compare.run import RunFailedError
from verl_precision.offline.entry import arguments
from verl_precision.offline.plan import all_work
from verl_precision.offline.work import run_here


@pytest.mark.parametrize("kind", ["sample", "score"])
def test_a_process_whose_files_exist_does_nothing(store, fill, kind):
    fill(store)
    before = written(store.folder)
    work = all_work(store, kind)[0]
    process = subprocess.Popen(arguments(kind, store.folder, work.dtype, work.shards), stdin=subprocess.PIPE)
    assert process.wait(timeout=60) == 0
    process.stdin.close()
    assert written(store.folder) == before


def test_a_process_that_fails_is_named_with_its_log(store):
    (store.folder / "settings.json").unlink()
    words = r"(?s)to score in fp16 ended with exit code 1.*FileNotFoundError.*logs/score-fp16-fp16-00000.log"
    with pytest.raises(RunFailedError, match=words):
        run_here(store.folder, all_work(store, "score")[:1], lambda: None)
    assert written(store.folder) == {}


def test_a_process_ends_with_its_parent():
    script = (
        "import threading; from verl_precision.offline.entry import _end_with_parent as end;"
        "print('up', flush=True); threading.Thread(target=end).start(); threading.Event().wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"up\n" and process.poll() is None
    process.stdin.close()
    assert process.wait(timeout=30) == 1
    process.stdout.close()
