"""What owns memory, threads or processes until it is closed, and how its later use is refused."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NoReturn, Self

from torchrl_unilab.errors import SegmentClosedError


def closed_error(what: str, remedy: str = "Create or attach it again.") -> SegmentClosedError:
    """Return the error for the use of an object that is closed."""
    return SegmentClosedError(f"cannot use {what}: it is closed (expected an open one). {remedy}")


class Closed:
    """In place of what an owner has given up, for threads that still use it: refuses every use."""

    def __init__(self, *what: str) -> None:
        self._what = what  # the arguments of `closed_error`

    def __getattr__(self, used: Any, *_: Any) -> NoReturn:
        raise closed_error(*self._what)

    __getitem__ = __setitem__ = __getattr__


class Owner(ABC):
    """Base of what owns memory, threads or processes: a context manager that calls `close`."""

    @abstractmethod
    def close(self) -> None:
        """Release what is owned. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
