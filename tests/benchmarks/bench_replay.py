"""Packed replay beside TorchRL's storages and a plain gather.

``python -m tests.benchmarks.bench_replay [--rounds 15] [--calls 8] [--torn 10000000] [--peers]``

All storages hold 262,144 rows with random content, and are full. A contender's call is timed
in blocks of so many calls; blocks of all contenders take turns, in an order that changes from
round to round, and the median over the rounds is printed. One thread.

**Sample.** Uniform, with replacement, other rows in each call. *stock* is a `ReplayBuffer` over
`LazyTensorStorage` with a `RandomSampler`, *memmap* over `LazyMemmapStorage`; *packed* is the same
buffer over `PackedReplayStorage`, *native* its own `sample`, *reused* the same into one batch
(`out`). *gather* is the limit: `torch.index_select` of as many rows from one float32 tensor of the
row's size, at positions drawn beforehand. With ``--peers`` the buffers of Stable-Baselines3 and of
cpprb, from `.venv-peers`, sample as many rows. *Slices* are of 16 rows, found by the ends of
episodes after 16 more were written; *known* is *packed* by `PackedSliceSampler`; episodes end every
1,000 or every 20 rows. *Sequences* are `Sequence` units of 16 rows from positions that
`RandomSampler` draws. *Hindsight* is `HERReplayBuffer`, by the strategy ``future``; goals are
actions here. *By priority* 16 rows are written, so many sampled, and their priorities set; *packed*
is by `PackedPrioritizedSampler`. TorchRL's needs its extension: without it there is no such table.

**Extend.** 1024 rows a call, of 64 blocks made beforehand, or always the same block, which the
caches then hold. *storage* is `set` of the stock storages and `add`, `append` and `set` of ours;
*copy* is the limit: one block of as many bytes copied to its place among the 262,144.

**Torn.** Rows that mix two, found in so many samples while two processes write.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict
from torchrl._utils import logger as torchrl_logger
from torchrl.data import (
    HERReplayBuffer,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    Storage,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers import SliceSampler
from torchrl.data.replay_buffers.sample_units import Sequence
from torchrl.data.replay_buffers.samplers import prioritized

from tests.benchmarks.peer_homes import python_of
from tests.benchmarks.turns import race
from tests.support.processes import receive, spawned
from tests.support.transitions import append_until_told, mixed, stamped
from torchrl_unilab.data import (
    PackedPrioritizedSampler,
    PackedReplayStorage,
    PackedReplayWriter,
    PackedSliceSampler,
)

CAPACITY = 262_144
BLOCK = 1024
BLOCKS = 64
SIZES = {"172 B": (17, 6), "912 B": (102, 21)}
EVERY = {"done": 1000, "terminated": 20}  # rows of an episode, by its end key
EXTENSION = prioritized.SumSegmentTreeFp32 is not None  # of TorchRL, which its samplers need
SAMPLES = (256, 2048, 8192, 32_768)

Call = Callable[[], object]
Calls = dict[str, Call]


def make_blocks(observations: int, actions: int) -> list[TensorDict]:
    """Steps of 1024 environments that go on from each to the next, and in a circle.

    By ``done`` an episode ends every 1,000 rows, by ``terminated`` one every 20.
    """
    seen = torch.rand(BLOCKS + 1, BLOCK, observations)
    seen[-1] = seen[0]

    def flags(first: int | None = None) -> dict[str, torch.Tensor]:
        none = {name: torch.zeros(BLOCK, 1, dtype=torch.bool) for name in (*EVERY, "truncated")}
        if first is None:
            return none
        rows = torch.arange(first + 1, first + BLOCK + 1).unsqueeze(1)
        return none | {name: rows % every == 0 for name, every in EVERY.items()}

    return [
        TensorDict(
            {
                "observation": seen[i].clone(),
                "action": torch.rand(BLOCK, actions),
                **flags(),
                "next": {
                    "observation": seen[i + 1].clone(),
                    "reward": torch.rand(BLOCK, 1),
                    **flags(i * BLOCK),
                },
            },
            [BLOCK],
        )
        for i in range(BLOCKS)
    ]


def make_peers(observations: int, actions: int) -> dict[str, Callable[[int], object]]:
    """What samples so many rows of other libraries' buffers, by library; they are full."""
    home = Path(python_of("baselines")).parents[1]
    sys.path.append(str(next(home.glob("lib/python*/site-packages"))))
    cpprb, buffers, spaces = map(
        importlib.import_module, ("cpprb", "stable_baselines3.common.buffers", "gymnasium.spaces")
    )
    random = np.random.default_rng(0)
    seen = random.random((CAPACITY, observations), np.float32)
    taken = random.random((CAPACITY, actions), np.float32)
    flat = {"obs": seen, "act": taken, "next_obs": seen}
    shapes = {name: {"shape": values.shape[1]} for name, values in flat.items()}
    rows = cpprb.ReplayBuffer(CAPACITY, shapes | {"rew": {}, "done": {}})
    zeros = np.zeros(CAPACITY, np.float32)
    rows.add(**flat, rew=zeros, done=zeros)
    boxes = (spaces.Box(0.0, 1.0, (size,)) for size in (observations, actions))
    baselines = buffers.ReplayBuffer(CAPACITY, *boxes, device="cpu")
    baselines.observations[:, 0] = baselines.next_observations[:, 0] = seen
    baselines.actions[:, 0] = taken
    baselines.full = True
    return {"SB3": baselines.sample, "cpprb": rows.sample}


def print_row(case: str, medians: dict[str, float], limit: str) -> None:
    """One line of a table: microseconds, with how many times as fast as stock."""
    stock = medians["stock"]
    cells = [f"{1e6 * seconds:,.0f} ({stock / seconds:.1f}x)" for seconds in medians.values()]
    ours = [name for name in ("packed", "native", "known", "add") if name in medians]
    beside = ", ".join(f"{name} {medians[name] / medians[limit]:.2f}" for name in ours)
    print(f"| {case} | " + " | ".join(cells) + f" | {beside} |", flush=True)


class Contenders:
    """All storages with rows of one size."""

    def __init__(self, size: str, stack: contextlib.ExitStack, *, peers: bool) -> None:
        self._stack = stack
        self.peers = make_peers(*SIZES[size]) if peers else {}
        self.blocks = make_blocks(*SIZES[size])
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        self.packed = stack.enter_context(PackedReplayStorage(CAPACITY, writers=1))
        self.storages = {
            "stock": LazyTensorStorage(CAPACITY),
            "memmap": LazyMemmapStorage(CAPACITY, scratch_dir=scratch),
            "packed": self.packed,
        }
        self.buffers = {
            name: ReplayBuffer(
                storage=storage, writer=PackedReplayWriter() if name == "packed" else None
            )
            for name, storage in self.storages.items()
        }
        for i in range(CAPACITY // BLOCK):
            for buffer in self.buffers.values():
                buffer.extend(self.blocks[i % BLOCKS])
        self.turn = 0

    def block(self, blocks: int = BLOCKS) -> TensorDict:
        """The next block of so many."""
        self.turn += 1
        return self.blocks[self.turn % blocks]

    def sampling(self, count: int) -> dict[str, Call]:
        """A call that samples `count` rows, by contender."""
        out = self.packed.empty_batch(count)
        plain = torch.rand(CAPACITY, sum(self.packed.rows.widths))
        positions = [torch.randint(0, CAPACITY, (count,)) for _ in range(32)]

        def gather() -> torch.Tensor:
            self.turn += 1
            return plain.index_select(0, positions[self.turn % len(positions)])

        calls: dict[str, Call] = {
            name: (lambda buffer=buffer: buffer.sample(count))  # type: ignore[misc]
            for name, buffer in self.buffers.items()
        }
        return calls | {
            "native": lambda: self.packed.sample(count),
            "reused": lambda: self.packed.sample(count, out=out),
            "gather": gather,
            **{name: partial(sample, count) for name, sample in self.peers.items()},
        }

    def slicing(self, count: int, end: str) -> dict[str, Call]:
        """A call that writes 16 rows and samples slices of 16 by their trajectory, by contender."""
        samplers = {"stock": SliceSampler, "packed": SliceSampler, "known": PackedSliceSampler}
        rows = self.blocks[0][:16]

        def slicing(name: str, sampler: type[SliceSampler]) -> Call:
            storage = "stock" if name == "stock" else "packed"
            buffer = ReplayBuffer(
                storage=self.storages[storage],
                sampler=sampler(slice_len=16, end_key=("next", end), strict_length=False),
                batch_size=count,
            )
            return lambda: (self.buffers[storage].extend(rows), buffer.sample())

        return {name: slicing(name, sampler) for name, sampler in samplers.items()}

    def sequences(self, count: int) -> dict[str, Call]:
        """A call that samples rows in sequences of 16, by contender."""
        return {
            name: ReplayBuffer(
                storage=self.storages[name], sample_unit=Sequence(length=16), batch_size=count // 16
            ).sample
            for name in ("stock", "packed")
        }

    def hindsight(self, count: int) -> dict[str, Call]:
        """A call that samples rows, most of them with another goal, by contender."""
        return {
            name: HERReplayBuffer(
                reward_fn=lambda rows: rows["action"].sum(-1, keepdim=True),
                storage=self.storages[name],
                goal_key="action",
                achieved_goal_key="action",
                batch_size=count,
            ).sample
            for name in ("stock", "packed")
        }

    def prioritising(self, count: int) -> dict[str, Call]:
        """A call that writes 16 rows, samples by priority and sets priorities, by contender."""
        samplers = {"stock": PrioritizedSampler, "packed": PackedPrioritizedSampler}
        rows, priority = self.blocks[0][:16], torch.rand(count)

        def prioritising(name: str, sampler: type[PrioritizedSampler]) -> Call:
            storage = self.storages[name]
            buffer = TensorDictReplayBuffer(
                storage=storage,
                sampler=sampler(CAPACITY, 0.6, 0.4),
                writer=PackedReplayWriter() if name == "packed" else None,
                batch_size=count,
            )
            buffer.update_priority(torch.arange(CAPACITY), torch.rand(CAPACITY))

            def call() -> None:
                buffer.extend(rows)
                index = buffer.sample()["index"]
                buffer.update_priority(index, priority)

            return call

        return {name: prioritising(name, sampler) for name, sampler in samplers.items()}

    def extending(self) -> dict[str, Call]:
        """A call that extends a buffer by a block, by contender."""
        return {
            name: (lambda buffer=buffer: buffer.extend(self.block()))  # type: ignore[misc]
            for name, buffer in self.buffers.items()
        }

    def writing(self, blocks: int = BLOCKS) -> dict[str, Call]:
        """A call that writes one of so many blocks to a storage, by contender."""
        at = dict.fromkeys((*self.storages, "set", "copy"), 0)
        set_only = self._stack.enter_context(PackedReplayStorage(CAPACITY, writers=1))
        for i in range(CAPACITY // BLOCK):
            set_only.append(self.blocks[i % BLOCKS])
        source = torch.zeros(BLOCK, sum(self.packed.rows.widths))
        target = torch.zeros(CAPACITY, sum(self.packed.rows.widths))

        def positions(name: str) -> torch.Tensor:
            start = at[name]
            at[name] = (start + BLOCK) % CAPACITY
            return torch.arange(start, start + BLOCK)

        def copy() -> None:
            target[positions("copy")[0] :][:BLOCK].copy_(source)

        def set_(name: str, storage: Storage) -> Call:
            return lambda: storage.set(positions(name), self.block(blocks))

        return {
            "stock": set_("stock", self.storages["stock"]),
            "memmap": set_("memmap", self.storages["memmap"]),
            "add": lambda: self.packed.add(self.block(blocks)),
            "append": lambda: self.packed.append(self.block(blocks)),
            "set": set_("set", set_only),
            "copy": copy,
        }


def torn(rows: int) -> tuple[int, int, float]:
    """Sampled rows that mix two, rows written meanwhile, seconds."""
    example = stamped(torch.zeros(1))[0].contiguous()
    storage = PackedReplayStorage(8192, example=example, writers=2)
    bad, done, started = 0, 0, time.monotonic()
    with storage, contextlib.ExitStack() as stack:
        pipes = [
            stack.enter_context(spawned(append_until_told, storage, writer, 300 + 57 * writer))[1]
            for writer in range(2)
        ]
        for pipe in pipes:
            receive(pipe)
        while storage.ptr < 8192:
            pass
        while done < rows:
            bad += mixed(storage.sample(8192))
            done += 8192
        for pipe in pipes:
            pipe.send("stop")
        written = sum(receive(pipe) for pipe in pipes)
    return bad, written, time.monotonic() - started


def tables(contenders: Contenders) -> dict[str, tuple[dict[str, Callable[[], Calls]], str]]:
    """What makes the calls of each case, and what they are compared with, by title."""
    few = SAMPLES[:2]
    slices = {
        f"256, of {every:,}": partial(contenders.slicing, 256, end) for end, every in EVERY.items()
    }
    found = {
        "Sample": ({f"{n:,}": partial(contenders.sampling, n) for n in SAMPLES}, "gather"),
        "Extend a buffer": ({"1,024": contenders.extending}, "stock"),
        "Slices": (slices, "stock"),
        "Sequences": ({f"{n:,}": partial(contenders.sequences, n) for n in few}, "stock"),
        "Hindsight": ({f"{n:,}": partial(contenders.hindsight, n) for n in few}, "stock"),
    }
    if EXTENSION:
        by_priority = {f"{n:,}": partial(contenders.prioritising, n) for n in few}
        found["By priority"] = by_priority, "stock"
    writing = {"1,024": contenders.writing, "1,024, one block": partial(contenders.writing, 1)}
    return found | {"Write to a storage": (writing, "copy")}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=8, help="of a block")
    parser.add_argument("--peers", action="store_true", help="add SB3's buffer and cpprb's")
    parser.add_argument("--torn", type=int, default=10_000_000, help="rows to sample; 0: none")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torchrl_logger.setLevel("ERROR")
    for size in SIZES:
        with contextlib.ExitStack() as stack:
            contenders = Contenders(size, stack, peers=options.peers)
            for title, (cases, limit) in tables(contenders).items():
                print(f"\n{title}, rows of {size}: µs (times as fast as stock)")
                for number, (case, make) in enumerate(cases.items()):
                    calls = make()  # as late: a storage tells each buffer of it what is written
                    if not number:
                        print(f"\n| rows | {' | '.join(calls)} | time / {limit} |")
                        print("|---:|" + "---:|" * len(calls) + "---|")
                    print_row(case, race(calls, options.rounds, options.calls), limit)
            row = sum(leaf.nbytes for leaf in contenders.blocks[0].values(True, True)) / BLOCK
            packed = contenders.packed.nbytes / CAPACITY
            print(f"\nBytes of a row, all told: stock {row:.1f}, packed {packed:.1f}")
    if options.torn:
        bad, written, seconds = torn(options.torn)
        print(
            f"\nTorn: {bad} of {options.torn:,} rows sampled in {seconds:.0f} s, while two "
            f"processes wrote {written:,}"
        )


if __name__ == "__main__":
    main()
