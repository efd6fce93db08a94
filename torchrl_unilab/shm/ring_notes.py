"""What the writers of a ring note of themselves, and which slots nobody holds by it.

A writer has one word for its note: a state, and above it a number that counts its notes, so
that no two of them are equal. A state is `IDLE`, or `MOVING` while the writer takes a token
out of a pipe or puts one in, or else the slot that it fills, plus one. A token is taken or put
while its writer's note says `MOVING`, and the pipe orders that store before what is done to
the pipe (`torchrl_unilab.shm.words`).

**A census** finds the slots that the dead held, while others go on. Who takes it reads all
notes, empties both pipes, and reads all notes again. If no note has changed, no writer has
touched a pipe in between, and at the moment the pipes were empty each slot was with the taker,
or noted by the living writer that fills it, or in the hands of a living writer that moves it.
Without the last, the rest is nobody's. With them, or if a note has changed, the taker tries
again; it holds all tokens meanwhile, so writers soon have nothing to move.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

__all__ = ["IDLE", "MOVING", "Note", "following", "nobodys", "noted_slot", "unsettled"]

IDLE, MOVING = 0, 0xFFFF
_STATE = 0xFFFF


class Note(NamedTuple):
    """A writer's process, 0 for none, and the word of its note."""

    pid: int
    word: int


def following(word: int, state: int) -> int:
    """Return the note that follows the note `word`, of another state.

    Example:
        >>> note = following(following(0, MOVING), IDLE)
        >>> note == following(0, IDLE), noted_slot(following(note, 3 + 1))
        (False, 3)
    """
    return (word | _STATE) + 1 + state


def noted_slot(word: int) -> int | None:
    """Return the slot that a note says is being filled, if it does."""
    state = word & _STATE
    return None if state in (IDLE, MOVING) else state - 1


def unsettled(before: Sequence[Note], after: Sequence[Note], living: Set[int]) -> list[int]:
    """Return the writers of whom it is not known what they held when the pipes were empty.

    Args:
        before: The writers' notes before the pipes were emptied.
        after: Those after it.
        living: The processes that live.
    """
    return [
        writer
        for writer, (was, note) in enumerate(zip(before, after, strict=True))
        if was != note or (note.pid in living and note.word & _STATE == MOVING)
    ]


def nobodys(slots: int, held: Iterable[int], notes: Iterable[Note], living: Set[int]) -> list[int]:
    """Return the slots that nobody alive holds, in ascending order, of settled notes.

    Args:
        slots: How many there are.
        held: Those that the taker of the census holds.
        notes: The writers' notes.
        living: The processes that live.
    """
    filled = {noted_slot(note.word) for note in notes if note.pid in living}
    return sorted(set(range(slots)) - set(held) - filled)
