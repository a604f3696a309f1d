"""Writes files and folders so that they appear complete or not at all."""

import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from verl_precision.base.errors import (
    ConfigurationError,
    EnvironmentMismatchError,
    VerlPrecisionError,
    error_in_one_line,
)

LARGEST = 2**31  # bytes of the largest file that is read; metrics of 100,000 steps have a third of that


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Turn any error of the block into a message that this file cannot be read, except for a missing file."""
    try:
        yield
    except (VerlPrecisionError, FileNotFoundError, NotADirectoryError):
        raise
    except Exception as error:
        raise _unreadable(path, f"it cannot be read ({error_in_one_line(error)})") from error


@contextmanager
def open_regular(path: Path, mode: str = "rb", most: float = LARGEST) -> Iterator[BinaryIO]:
    """Open a file in a binary mode; errors of the block name the file, as in `naming_file`.

    A FIFO, a socket, a device, a folder, or a link to one is not opened, because reading it could block or fill memory.

    Raises:
        FileNotFoundError: If the file does not exist.
        ConfigurationError: If the file is not regular, has more than `most` bytes, or cannot be read.
    """
    with naming_file(path):
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise _unreadable(path, "it is not a regular file, so it was not opened")
        if found.st_size > most:
            raise _unreadable(path, f"it has {found.st_size} bytes; files of at most {most:.0f} bytes are read")
        with open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            yield cast(BinaryIO, file)


def _unreadable(path: Path, problem: str) -> ConfigurationError:
    return ConfigurationError(problem, setting="FILE", value=str(path), remedy="Correct the file, or move it away.")


def table_of(module: str, name: str = "") -> Any:
    """Return the content of a YAML or JSON file beside a module, given its `__file__`; the default is `<module>.yaml`.

    The tables of the losses are JSON, so that the losses need torch alone.
    """
    path = Path(module).with_name(name or f"{Path(module).stem}.yaml")
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    import yaml

    return yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # C: faster


def shipped_folder(name: str) -> Path:
    """Return a folder that is shipped with the package: the installed one, or the repository's."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise EnvironmentMismatchError(f"no folder {name} in {package} or beside it. Reinstall verl-precision.")


@contextmanager
def new_file(path: Path, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `path`, and rename it to `path` when the block ends without an error.

    The folder is created. The content is on the disk before the file gets its name. After an error the temporary file
    is removed, and `path` is unchanged. An existing file is an error unless `replace` is set; a device, pipe or folder
    is always an error. If `path` is a link, the file that the link points to is replaced.
    """
    require_regular(path, replace)
    path = path.resolve() if path.is_symlink() else path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _scratch(path) as scratch:
        yield scratch
        with scratch.open("rb+") as written:
            os.fsync(written.fileno())
        require_regular(path, replace)
        scratch.replace(path)


def write_file(path: Path, content: str | bytes, replace: bool = False) -> None:
    """Write text (as UTF-8) or bytes to a file that appears complete or not at all; see `new_file`."""
    with new_file(path, replace) as scratch:
        scratch.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; rename it to `path` when the block ends, or remove it after an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _scratch(path) as scratch:
        scratch.mkdir()
        yield scratch
        scratch.rename(path)


@contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    """Yield a new path beside another path, with the same suffix, because some writers read it; remove it at the end.

    A system error about the new path, or about no file, names the path that the caller gave.
    """
    scratch = path.with_name(f".{uuid.uuid4().hex[:12]}.{path.name}")
    try:
        yield scratch
    except OSError as error:
        if error.errno and (error.filename is None or str(error.filename).startswith(str(scratch))):
            error.filename = str(path)
        raise
    except Exception as error:
        if refused := re.search(r"\(os error (\d+)\)", str(error)):  # safetensors raises Rust's form of a system error
            raise OSError(int(refused[1]), os.strerror(int(refused[1])), str(path)) from error
        raise
    finally:
        if scratch.is_dir():
            shutil.rmtree(scratch, ignore_errors=True)
        else:
            scratch.unlink(missing_ok=True)


def require_regular(path: Path, replace: bool = True) -> None:
    """Refuse to write to a device, pipe or folder (also through a link), or to a file that must not be replaced."""
    if path.exists() and not path.is_file():
        problem, remedy = f"{path}: it is no regular file; nothing was written", "Name another file."
        raise ConfigurationError(problem, allowed="a regular file, or a new name", remedy=remedy)
    if not replace and path.exists():
        raise ConfigurationError(f"{path}: the file exists. Allowed: a new name. Nothing was written; move it away.")
