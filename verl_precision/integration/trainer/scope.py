"""Parts of a run in which a wrapped function of the host behaves in our way, and elsewhere in its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

ValueT = TypeVar("ValueT")


@contextmanager
def within(variable: ContextVar[ValueT], value: ValueT) -> Iterator[None]:
    """Give a variable a value inside the block.

    Args:
        variable: What the wrapper asks.
        value: Its value there.
    """
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
