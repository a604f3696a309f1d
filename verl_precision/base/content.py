"""Digests: fingerprints of files, fast for 100 GB and independent of their paths, and one seed for each response."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

BLOCK = 1 << 16  # bytes
MOST, FEWEST, IN_ALL = 64, 4, 1024  # blocks: most of one file, fewest of one file, most of all files together
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in transformers' order of preference


def content_digest(files: Sequence[Path]) -> str:
    """Return a digest (16 hex digits) of the contents of files, in their order; names and folders have no effect.

    The digest covers each file's size and 64 blocks of 64 KiB at equal distances, with the first and the last block. A
    file of at most 4 MiB is read whole. More than 16 files share 1,024 blocks, and each file keeps at least four. A
    change between the blocks that keeps a large file's size is not seen. Other weights and added rows are seen.
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
    """Return `config.json`, the weights and their index from a model's folder in Hugging Face's format.

    Return None if one of these files is missing, as in a cache whose download has not ended. The tokenizer is left out:
    it may enter a cache before or after the weights.
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


def response_seed(seed: int, problem: str, response: int) -> int:
    """Return the seed of one response, from 0 to 2³¹ - 1; it does not depend on other responses or on time."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{problem}/{response}".encode()).digest()[:4], "big") >> 1
