"""Arrays and texts of kept tokens as bytes (`kept_tokens.py`): exact, small where numbers repeat, and bounded."""

import functools
import struct
import zlib

import numpy as np

LONGEST_TEXT = 64  # bytes of UTF-8 for each token; a longer text is cut
PLANE = struct.Struct("<?I")  # is it compressed? its bytes
_SAMPLE = 1024  # bytes


def utf8(text: str, most: int = LONGEST_TEXT) -> bytes:
    """Return at most so many bytes of a text, whole characters."""
    whole = text.encode("utf-8", "replace")
    return whole if len(whole) <= most else whole[:most].decode("utf-8", "ignore").encode()


word_bytes = functools.lru_cache(maxsize=1 << 16)(utf8)  # most tokens of a record were in the one before


def packed(values: np.ndarray) -> bytes:
    """Return an array's bytes: the first byte of all numbers, then the second of all, each compressed if that helps.

    Sign and exponent of log-probs shrink, and the lower bits of their mantissas are noise, which a sample tells.
    """
    parts = []
    for plane in np.ascontiguousarray(values.view("u1").reshape(len(values), values.itemsize).T):
        whole, pressed = plane.tobytes(), b""
        if len(zlib.compress(whole[:_SAMPLE], 1)) < 0.9 * len(whole[:_SAMPLE]):
            pressed = zlib.compress(whole, 1)
        use = 0 < len(pressed) < len(whole)
        parts += [PLANE.pack(use, len(pressed if use else whole)), pressed if use else whole]
    return b"".join(parts)


def unpacked(part: bytes, dtype: np.dtype, count: int) -> np.ndarray:
    """Return the array of so many numbers that `packed` made these bytes of."""
    planes, at = [], 0
    for _ in range(dtype.itemsize):
        pressed, size = PLANE.unpack_from(part, at)
        at += PLANE.size + size
        plane = part[at - size : at]
        planes.append(zlib.decompressobj().decompress(plane, count + 1) if pressed else plane)
    whole = np.frombuffer(b"".join(planes), "u1").reshape(dtype.itemsize, count)
    return whole.T.copy().view(dtype).reshape(count)
