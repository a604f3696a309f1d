"""A file is there, whole, or it is not; nothing but a regular file is opened to be read."""

import errno
import os
import socket
import threading

import pytest

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import new_file, new_folder, open_regular, write_file


@pytest.mark.parametrize("content", ["täxt\n", b"\x00bytes"])
def test_text_and_bytes_in_a_new_folder_are_replaced_only_when_asked(tmp_path, content):
    path = tmp_path / "new" / "file.txt"
    write_file(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigurationError, match=r"file.txt: the file exists.*Nothing was written"):
        write_file(path, "second")
    assert path.read_bytes() != b"second"
    write_file(path, "second", replace=True)
    assert path.read_text() == "second" and list(path.parent.iterdir()) == [path]


def test_what_appears_while_we_write_is_kept(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(ConfigurationError, match="the file exists"), new_file(path) as scratch:
        scratch.write_text("ours")
        path.write_text("theirs")
    assert path.read_text() == "theirs" and list(tmp_path.iterdir()) == [path]


def test_after_an_error_everything_is_as_it_was(tmp_path):
    path = tmp_path / "file.png"
    write_file(path, "first")
    with pytest.raises(ZeroDivisionError), new_file(path, replace=True) as scratch:
        assert scratch.suffix == path.suffix
        scratch.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


def test_of_a_link_the_file_that_it_names_is_replaced(tmp_path):
    link, path = tmp_path / "link", tmp_path / "folder" / "file"
    link.symlink_to(path)
    for content in ("first", "second"):
        write_file(link, content, replace=True)
        assert link.is_symlink() and path.read_text() == content


FULL = "No space left on device"


@pytest.mark.parametrize("new", [new_file, new_folder])
@pytest.mark.parametrize("error", [
    lambda scratch: OSError(errno.ENOSPC, FULL),
    lambda scratch: OSError(errno.ENOSPC, FULL, str(scratch)),
    lambda scratch: OSError(errno.ENOSPC, FULL, str(scratch / "inside")),
    lambda scratch: Exception(f"Error while serializing: I/O error: {FULL} (os error {errno.ENOSPC})"),
])  # fmt: skip
def test_what_a_disk_refuses_is_said_of_the_path_that_was_meant(tmp_path, new, error):
    with pytest.raises(OSError) as caught, new(tmp_path / "path") as scratch:
        raise error(scratch)
    found = caught.value
    assert (found.errno, found.strerror, found.filename) == (errno.ENOSPC, FULL, str(tmp_path / "path"))
    assert not list(tmp_path.iterdir())


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
def test_only_a_regular_file_is_opened_or_written_over(tmp_path, monkeypatch, make, mode):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "file")
    asked = []
    monkeypatch.setattr(os, "open", lambda *words, **more: asked.append(words))
    with pytest.raises(ConfigurationError, match="file'?: it is not a regular file"):
        next(opened(tmp_path / "file", mode=mode))
    with pytest.raises(ConfigurationError, match="it is no regular file"):
        write_file(tmp_path / "file", "ours", replace=True)
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
    with pytest.raises(ConfigurationError, match="file'?: it has 4 bytes; .* at most 3"):
        next(opened(path, most=3))
    for error in (ValueError("line 3 is odd"), KeyError("line 3"), RecursionError("line 3"), MemoryError("line 3")):
        reading = opened(path)
        next(reading)
        with pytest.raises(ConfigurationError, match="file'?: it cannot be read .*line 3"):
            reading.throw(error)
