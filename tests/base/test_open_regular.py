"""Nothing but a regular file is opened to be read, and what goes wrong inside names the file."""

import os
import socket
import threading

import pytest

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import open_regular


def opened(path, **settings):
    with open_regular(path, **settings) as file:
        yield file


def bound(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(path))


@pytest.mark.parametrize("make", [
    os.mkfifo, os.mkdir, bound, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to("/dev"),
])  # fmt: skip
@pytest.mark.parametrize("mode", ["rb", "rb+"])
def test_only_a_regular_file_is_opened(tmp_path, monkeypatch, make, mode):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "file")
    asked = []
    monkeypatch.setattr(os, "open", lambda *words, **more: asked.append(words))
    with pytest.raises(ConfigurationError, match="file'?: it is no regular file"):
        next(opened(tmp_path / "file", mode=mode))
    assert not asked


def test_a_fifo_that_takes_the_place_of_a_file_holds_nobody_up(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("text")
    found = path.stat()
    path.unlink()
    os.mkfifo(path)
    monkeypatch.setattr(type(path), "stat", lambda self, **more: found)
    read = []
    thread = threading.Thread(target=lambda: read.extend(file.read() for file in opened(path)), daemon=True)
    thread.start()
    thread.join(60)
    assert read == [b""]


def test_errors_inside_name_the_file_and_one_that_is_not_there_is_told_apart(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        next(opened(path))
    path.write_bytes(b"1234")
    with pytest.raises(ConfigurationError, match="file'?: it has 4 bytes, .* at most 3"):
        next(opened(path, most=3))
    for error in (ValueError("line 3 is odd"), KeyError("line 3"), RecursionError("line 3"), MemoryError("line 3")):
        reading = opened(path)
        next(reading)
        with pytest.raises(ConfigurationError, match="file'?: it cannot be read .*line 3"):
            reading.throw(error)
