"""One process owns a folder; when it is killed the folder is free, and whoever asks is told who owns it."""

import errno
import fcntl
import logging
import os
import socket
import subprocess
import sys

import pytest

from verl_precision.base import owner

HOLD = """
import sys
from pathlib import Path
from verl_precision.base.owner import take
print(take(Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start(tmp_path, root):
    """Start a process that takes the folder, and return it once it has, or has been told who owns it."""
    started = []

    def take(job):
        command, variables = [sys.executable, "-c", HOLD, str(tmp_path)], {**os.environ, "SLURM_JOB_ID": job}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        started.append(subprocess.Popen(command, env=variables, cwd=root, text=True, **pipes))
        return started[-1], started[-1].stdout.readline().strip()

    yield take
    for process in started:
        process.kill()
        process.communicate()
    owner.release(tmp_path)


def test_the_second_is_told_who_owns_it_and_gets_it_when_that_one_is_killed(tmp_path, start):
    first, said = start("7")
    assert said == "None"
    holder = owner.take(tmp_path)
    assert (holder.process, holder.host, holder.job) == (first.pid, socket.gethostname(), "7")
    assert f"process {first.pid} on {socket.gethostname()} (job 7), since 2" in str(holder)
    assert start("8")[1] == str(holder), "and so is a third"
    first.kill()
    first.wait()
    assert owner.take(tmp_path) is None
    assert [each.process for each in owner.owners(tmp_path)] == [first.pid, os.getpid()]


def test_what_this_process_owns_it_keeps_while_it_reads_who_has_owned_it(tmp_path, start):
    assert owner.take(tmp_path) is None and owner.take(tmp_path).process == os.getpid()
    owner.owners(tmp_path)
    assert start("8")[1].startswith(f"process {os.getpid()} on ")
    owner.release(tmp_path)
    assert start("9")[1] == "None"


def test_a_forked_child_owns_nothing(tmp_path):
    assert owner.take(tmp_path) is None
    if (child := os.fork()) == 0:
        os._exit(owner.owned_here(tmp_path) or owner.take(tmp_path) is None)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    owner.release(tmp_path)


def test_a_torn_line_costs_no_other(tmp_path):
    (tmp_path / owner.OWNER_FILE).write_text('{"host": "a')
    assert owner.take(tmp_path) is None
    assert [each.process for each in owner.owners(tmp_path)] == [os.getpid()]
    owner.release(tmp_path)


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, caplog):
    def no_locks(*arguments):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    with caplog.at_level(logging.WARNING, logger="verl_precision"):
        assert owner.take(tmp_path) is None
    assert f"the file system of {tmp_path} has no locks" in caplog.text
    owner.release(tmp_path)
