"""One process owns a folder; when it is killed the folder is free, and whoever asks is told who owns it."""

import errno
import fcntl
import json
import logging
import os
import socket
from unittest.mock import Mock

import pytest
from rubbish import FOREIGN

from verl_precision.base import owner
from verl_precision.base.errors import ConfigurationError


@pytest.fixture
def start(tmp_path, start_owner):
    yield lambda job: start_owner(tmp_path, job)
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
    (tmp_path / owner.OWNER_FILE).write_bytes(b"\xff{\n")
    assert owner.take(tmp_path) is not None and owner.owned_here(tmp_path), "its line is gone"
    owner.release(tmp_path)
    assert start("9")[1] == "None"


def test_a_forked_child_owns_nothing(tmp_path):
    assert owner.take(tmp_path) is None
    if (child := os.fork()) == 0:
        os._exit(owner.owned_here(tmp_path) or owner.take(tmp_path) is None)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    owner.release(tmp_path)


LINES = *FOREIGN.values(), b'{"host": "a', b"{rubbish}", b"{}", b'{"host": 1, "process": "x", "job": {}, "since": []}'


def test_whatever_is_written_into_the_file_of_a_held_folder_it_stays_held(tmp_path, start):
    """Before it is taken, and while it is held."""
    path = tmp_path / owner.OWNER_FILE
    path.write_bytes(b"\n".join(LINES) + b'\n{"host": "a')
    first, said = start("7")
    assert said == "None" and owner.take(tmp_path).process == first.pid
    mine = path.read_bytes()
    for line in LINES:
        for content in (mine + line + b"\n", line + b"\n" + mine, line):
            path.write_bytes(content)
            holder = owner.take(tmp_path)
            assert holder is not None and not owner.owned_here(tmp_path), line
            assert holder.process == (first.pid if content.strip().endswith(mine.strip()) else 0), "or nobody is named"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_refused_by_name(tmp_path, make):
    make(tmp_path / owner.OWNER_FILE)
    with pytest.raises(ConfigurationError, match=r"owner\.txt: it is no regular file"):
        owner.take(tmp_path)
    assert not owner.owned_here(tmp_path)


def test_a_line_of_a_later_version_names_its_owner_and_rubbish_nobody(tmp_path):
    later = {"host": "h", "process": 7, "job": "j", "since": "s", "user": "u"}
    content = b"\n".join((b"", *(line for line in LINES if len(line) < 1 << 20), json.dumps(later).encode(), b""))
    (tmp_path / owner.OWNER_FILE).write_bytes(content)
    assert [each.job for each in owner.owners(tmp_path)] == ["j"]


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, caplog):
    no_locks = OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    monkeypatch.setattr(fcntl, "lockf", Mock(side_effect=no_locks))
    with caplog.at_level(logging.WARNING, logger="verl_precision"):
        assert owner.take(tmp_path) is None
    assert str(tmp_path) in caplog.text
    owner.release(tmp_path)
