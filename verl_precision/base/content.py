"""Fingerprints of files, from their sizes and a sample of their bytes: fast for 100 GB, and independent of the path."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

BLOCK = 1 << 16  # bytes
MOST, FEWEST, IN_ALL = 64, 4, 1024  # blocks of a file where files are few, where they are many, and of all of them
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # transformers' order of preference; several files have an index


def content_digest(files: Sequence[Path]) -> str:
    """Return 16 hex digits of the contents of files, in order; names and folders have no effect.

    Of each file: its size and 64 blocks of 64 KiB at equal distances, the first and the last among them. A file of at
    most 4 MiB is read whole. More than 16 files share 1,024 blocks, and each keeps at least four. So a change that
    keeps a large file's size and lies between the blocks is not seen; other weights, and rows added, are.
    """
    blocks = max(FEWEST, min(MOST, IN_ALL // max(len(files), 1)))
    found = hashlib.blake2b(digest_size=8)
    for path in files:
        size = path.stat().st_size
        found.update(size.to_bytes(8, "big"))
        whole = size <= blocks * BLOCK
        with path.open("rb") as file:
            for offset in (0,) if whole else (i * (size - BLOCK) // (blocks - 1) for i in range(blocks)):
                file.seek(offset)
                found.update(file.read(size if whole else BLOCK))
    return found.hexdigest()


def weight_files(folder: Path) -> list[Path] | None:
    """Return `config.json`, the weights and their index in a model's folder of Hugging Face's format.

    None where one of them is missing, as in a cache whose download has not ended. The tokenizer is not among them: it
    may come to a cache before or after the weights.
    """
    for single in _WEIGHTS:
        index = f"{single}.index.json"
        if (folder / index).is_file():
            shards = json.loads((folder / index).read_text())["weight_map"].values()
            names = ["config.json", index, *sorted({*shards})]
        elif (folder / single).is_file():
            names = ["config.json", single]
        else:
            continue
        files = [folder / name for name in names]
        return files if all(file.is_file() for file in files) else None
    return None
