"""One seed for each response."""

from hashlib import sha256


def response_seed(seed: int, problem: str, response: int) -> int:
    """Return the seed of one response, from 0 to 2³¹ - 1; it does not depend on other responses or on time."""
    return int.from_bytes(sha256(f"{seed}/{problem}/{response}".encode()).digest()[:4], "big") >> 1
