"""Shared words and token pipes that report what is done to them, before it is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchrl_unilab.shm.tokens import TokenPipe, unpack_token


class WatchedWords:
    """Words that report each store by index and value, and each load by index.

    Args:
        words: The words themselves.
        stored: Called before a store.
        loaded: Called before a load; with the slice of all for `tolist`.
    """

    def __init__(
        self,
        words: Any,
        stored: Callable[[int, int], object],
        loaded: Callable[[Any], object] = bool,
    ) -> None:
        self._words, self._stored, self._loaded = words, stored, loaded

    def __getitem__(self, index: Any) -> Any:
        self._loaded(index)
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._stored(index, value)
        self._words[index] = value

    def tolist(self) -> list[int]:
        """Load all words."""
        found: list[int] = self[:].tolist()
        return found


class WatchedPipe:
    """A token pipe that reports each put by its slot, and each take by None."""

    def __init__(self, pipe: TokenPipe, moved: Callable[[int | None], object]) -> None:
        self._pipe, self._moved = pipe, moved
        self.ends, self.close = pipe.ends, pipe.close

    def put(self, hand: list[bytes], index: int = 0) -> None:
        """Report, and put."""
        self._moved(unpack_token(hand[index])[1])
        self._pipe.put(hand, index)

    def take(self, hand: list[bytes]) -> bool:
        """Report, and take."""
        self._moved(None)
        return self._pipe.take(hand)

    def drain(self, hand: list[bytes]) -> None:
        """Take all tokens, each with its report."""
        while self.take(hand):
            pass

    def __len__(self) -> int:
        return len(self._pipe)
