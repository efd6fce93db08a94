"""A writer of the replay is killed at any step and replaced: every row stays whole and there."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.processes import receive, spawned
from tests.support.transitions import (
    add_chain_until_told,
    append_until_told,
    chained,
    mixed,
    stamped,
    wrong_chain,
)
from torchrl_unilab.data.packed_replay import PackedReplayStorage
from torchrl_unilab.shm.row_copy import RowCopy
from torchrl_unilab.shm.rows import SharedRows

CAPACITY, BLOCK = 256, 8
EPISODE = 3
STEPS = {"stored": 7, "derived": 14}  # of a write: all that others see of it


Region = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class _StruckWords:
    """Shared words whose stores are counted."""

    def __init__(self, words: Any, step: Callable[[], None]) -> None:
        self._words, self._step, self.view = words, step, self

    def __getitem__(self, index: int) -> int:
        return int(self._words[index])

    def __setitem__(self, index: int, value: int) -> None:
        self._step()
        self._words[index] = value

    def __len__(self) -> int:
        return len(self._words)


def strike_at(rows: SharedRows, nth: int, strike: Callable[[], None]) -> None:
    """Have a process struck before the `nth` thing it does to the rows: a store, half a copy."""
    steps = itertools.count(1)

    def step() -> None:
        if next(steps) == nth:
            strike()

    def halved(copy: Callable[..., None], region: Region) -> Callable[..., None]:
        def half(*arguments: Any) -> None:
            table, at = region(*arguments)
            copy(*arguments)
            words = table[at]
            words[:, words.shape[1] // 2 :] = -7
            table[at] = words
            step()  # half of each row is garbage
            copy(*arguments)
            step()

        return half

    def positions(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return rows.block, torch.arange(first, first + count).remainder(rows.capacity)

    words: Any = rows
    words._header, words._words = _StruckWords(rows._header, step), _StruckWords(rows._words, step)
    words.write = halved(rows.write, lambda start, new: positions(start, len(new)))
    words.write_side = halved(rows.write_side, lambda slots, _, new: (rows.side, slots))
    put, found = RowCopy.put, RowCopy.put_found
    changed: Any = RowCopy
    changed.put = halved(put, lambda _, tensors, at: positions(at, len(tensors[0])))
    changed.put_found = halved(found, lambda _, found, count, at: positions(at, count))


def write_and_die(pipe: Any, storage: PackedReplayStorage, kind: str, first: int, nth: int) -> None:
    """As writer 1, write one block whole, say so, and be killed at a step of the next ones."""
    torch.set_num_threads(1)
    storage.use_writer(1)
    for number in itertools.count(first):
        if number == first + 1:
            pipe.send("one is written")
            strike_at(storage.rows, nth, lambda: os.kill(os.getpid(), signal.SIGKILL))
        if kind == "derived":
            storage.add(chained(1, BLOCK, number, EPISODE))
        else:
            storage.append(stamped(torch.arange(BLOCK) + number * BLOCK).contiguous())


@pytest.mark.parametrize("kind", ["stored", "derived"])
def test_a_writer_is_killed_at_each_step_and_replaced_and_no_row_is_torn_or_missing(kind):
    derived = kind == "derived"
    example = chained(1, 1, 0, EPISODE)[0] if derived else stamped(torch.zeros(1))[0]
    storage = PackedReplayStorage(
        CAPACITY,
        example=example.contiguous(),
        writers=2,
        next_observation=kind,
        final_observations=8 * BLOCK,  # all would be gone if those of the dead were lost
    )
    wrong = (lambda batch: wrong_chain(batch, EPISODE)) if derived else mixed
    beside: Any = (add_chain_until_told, 0, BLOCK, EPISODE)
    if not derived:
        beside = (append_until_told, 0, BLOCK)
    target, *arguments = beside
    with storage, spawned(target, storage, *arguments) as (_, other):
        assert receive(other) == "ready"
        while not storage.size:
            pass
        for nth in range(1, STEPS[kind] + 1):
            with spawned(write_and_die, storage, kind, nth * 10, nth) as (process, pipe):
                while process.exitcode is None:
                    assert wrong(storage.sample(64)) == 0
                    process.join(0.001)
                assert process.exitcode == -signal.SIGKILL
                assert receive(pipe) == "one is written"
            storage.recover(1)  # unless the other one, or a sample, came before
            assert wrong(storage.sample(256)) == 0
        other.send("end")
        receive(other)
        assert not storage.recover(1)
        seen = storage.rows.window()
        assert seen.end == seen.head  # nothing is in flight, nothing is short
        assert derived or storage.size == CAPACITY
        assert wrong(storage.get(torch.arange(seen.floor, seen.end) % CAPACITY)) == 0
