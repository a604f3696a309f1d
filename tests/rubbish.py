"""What killed processes, full disks, editors and other versions leave in small files."""

from collections.abc import Iterator

FOREIGN = {
    "empty": b"",
    "not UTF-8": b"\xff\xfe\x00\x81",
    "zeros": bytes(4096),
    "a number": b"3",
    "null": b"null",
    "a list": b"[1, {}]",
    "10^400": b"1" + b"0" * 400,
    "more digits than Python reads": b"9" * 5000,
    "deep": b"[" * 100_000,
    "deep blocks": b"- " * 100_000,
    "an object of a later version": b'{"version": {"of": 2}}',
    "an alias": b"a: &a [x]\nb: *a\n",
    "a tag": b"!!python/object/apply:os.getcwd []",
    "a tag without a value": b"a: !!int ''\n",
    "five megabytes": b"# " + b"x" * (5 << 20),
}


def cut(content: bytes) -> Iterator[bytes]:
    """Yield a content cut short after each byte, the last excepted."""
    return (content[:length] for length in range(len(content)))


def flipped(content: bytes, bits: int = 8) -> Iterator[bytes]:
    """Yield a content with one bit changed: each, or so many of each byte, others at each."""
    for place, byte in enumerate(content):
        for bit in range(bits):
            yield content[:place] + bytes([byte ^ 1 << (bit + place) % 8]) + content[place + 1 :]
