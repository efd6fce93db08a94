"""Transitions whose content shows what they are, and processes that write and read them."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import ReplayBuffer

from torchrl_unilab.data.packed_form import leaves
from torchrl_unilab.data.packed_replay import PackedReplayStorage
from torchrl_unilab.shm.row_copy import FoundRows, RowCopy
from torchrl_unilab.shm.row_store import REWRITING, VERSION

OBSERVATIONS = 17
ACTIONS = 6


def flags(*shape: int) -> torch.Tensor:
    """Flags that are not set."""
    return torch.zeros(*shape, 1, dtype=torch.bool)


def transitions(count: int, seed: int = 0) -> TensorDict:
    """Random transitions of HalfCheetah's shapes, 170 bytes each, that follow on nothing."""
    g = torch.Generator().manual_seed(seed)
    return TensorDict(
        {
            "observation": torch.rand(count, OBSERVATIONS, generator=g),
            "action": torch.rand(count, ACTIONS, generator=g),
            **{name: flags(count) for name in ("done", "terminated", "truncated")},
            "next": {
                "observation": torch.rand(count, OBSERVATIONS, generator=g),
                "reward": torch.rand(count, 1, generator=g),
                **{
                    name: torch.rand(count, 1, generator=g) < 0.1
                    for name in ("done", "terminated", "truncated")
                },
            },
        },
        [count],
    )


def steps(
    envs: int,
    count: int,
    *,
    seed: int = 0,
    episode: float = 0.0,
    start: TensorDictBase | None = None,
) -> list[TensorDict]:
    """Steps of environments that go on, each [envs]; an episode ends with chance `episode`."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    seen = torch.rand(envs, 3, generator=g) if start is None else start
    for _ in range(count):
        final = torch.rand(envs, 3, generator=g)
        ended = torch.rand(envs, 1, generator=g) < episode
        terminated = ended & (torch.rand(envs, 1, generator=g) < 0.5)
        rows.append(
            TensorDict(
                {
                    "observation": seen,
                    "action": torch.rand(envs, 2, generator=g),
                    "done": flags(envs),
                    "next": {
                        "observation": final,
                        "reward": torch.rand(envs, 1, generator=g),
                        "done": ended,
                        "terminated": terminated,
                        "truncated": ended & ~terminated,
                    },
                },
                [envs],
            )
        )
        seen = torch.where(ended, torch.rand(envs, 3, generator=g), final)
    return rows


def stamped(stamps: torch.Tensor) -> TensorDict:
    """Rows each of whose elements says which row it is, below 2**24; 172 bytes."""
    wide = stamps.float().unsqueeze(1)
    count = len(stamps)
    return TensorDict(
        {
            "observation": wide.expand(count, 17),
            "action": wide.expand(count, 6),
            "count": stamps.int().unsqueeze(1).expand(count, 2),
            "next": {"observation": wide.expand(count, 16), "reward": wide},
            "low": stamps.unsqueeze(1).expand(count, 4).to(torch.uint8),
        },
        [count],
    )


def mixed(batch: TensorDictBase) -> int:
    """How many rows of a stamped batch are of two rows."""
    stamp = batch["count"][:, :1]
    bad = (batch["count"] != stamp).any(1)
    for key in ("observation", "action", ("next", "observation"), ("next", "reward")):
        bad |= (batch[key] != stamp).any(1)
    bad |= (batch["low"] != stamp.to(torch.uint8)).any(1)
    return int(bad.sum())


# Targets of spawned processes


def append_until_told(
    pipe: Connection, storage: PackedReplayStorage, writer: int, count: int
) -> None:
    """Append stamped rows, `count` at a time, until the other end says something.

    Every other block lies as it is copied natively.
    """
    torch.set_num_threads(1)
    storage.use_writer(writer)
    pipe.send("ready")
    written, blocks = 0, [stamped(torch.arange(i, i + count) * 8 + writer) for i in range(64)]
    blocks[::2] = [block.contiguous() for block in blocks[::2]]
    while not pipe.poll():
        for block in blocks:
            storage.append(block)
        written += len(blocks) * count
    pipe.send(written)


def add_chain_until_told(
    pipe: Connection, storage: PackedReplayStorage, writer: int, envs: int, episode: int
) -> None:
    """Add steps whose observations count up, ``episode`` steps to an episode."""
    torch.set_num_threads(1)
    storage.use_writer(writer)
    pipe.send("ready")
    t = 0
    while not pipe.poll():
        storage.add(chained(writer, envs, t, episode))
        t += 1
    pipe.send(t)


def chained(writer: int, envs: int, t: int, episode: int) -> TensorDict:
    """Step `t` of environments whose observation is (writer, environment, step, ...)."""
    seen = torch.tensor([[writer, env, t] for env in range(envs)], dtype=torch.float32)
    seen = seen.repeat(1, 4)
    final = (t + 1) % episode == 0
    ahead = seen + torch.tensor([0.0, 0.0, 1.0]).repeat(4)
    if final:
        ahead = ahead + torch.tensor([0.0, 0.0, 0.5]).repeat(4)
    done = torch.full((envs, 1), final)
    return TensorDict(
        {
            "observation": seen,
            "action": seen[:, :2].contiguous(),
            "next": {
                "observation": ahead,
                "reward": seen[:, 2:3].contiguous(),
                "done": done,
                "terminated": done,
                "truncated": torch.zeros_like(done),
            },
        },
        [envs],
    )


def wrong_chain(batch: TensorDictBase, episode: int) -> int:
    """How many rows of chained steps are not what was added."""
    seen, ahead = batch["observation"], batch["next", "observation"]
    t = seen[:, 2]
    final = (t + 1) % episode == 0
    expected = seen + torch.tensor([0.0, 0.0, 1.0]).repeat(4)
    expected = expected + final.unsqueeze(1) * torch.tensor([0.0, 0.0, 0.5]).repeat(4)
    bad = (ahead != expected).any(1) | (seen != seen[:, :3].repeat(1, 4)).any(1)
    bad |= batch["next", "done"][:, 0] != final
    return int((bad | (batch["next", "reward"][:, 0] != t)).sum())


def extend_and_tell(pipe: Connection, buffer: ReplayBuffer, first: int, count: int) -> None:
    """Extend a buffer by stamped rows, and tell their positions."""
    torch.set_num_threads(1)
    pipe.send("ready")
    pipe.recv()
    index = [
        buffer.extend(stamped(torch.arange(first + i * 4, first + i * 4 + 4))) for i in range(count)
    ]
    pipe.send(torch.cat(index).tolist())
    pipe.recv()


def stop_half_way(
    pipe: Connection, storage: PackedReplayStorage, writer: int, count: int, signal_: int
) -> None:
    """Write half of `count` rows of garbage, then get a signal, in mid-write."""
    torch.set_num_threads(1)
    storage.use_writer(writer)
    rows = stamped(torch.arange(count)).contiguous()
    some = [torch.full_like(leaf[: max(1, count // 2)], 7) for leaf in leaves(rows).values()]
    put, put_found = RowCopy.put, RowCopy.put_found

    def put_half(copy: RowCopy, at: int) -> None:
        put(copy, some, at)
        pipe.send(os.getpid())
        os.kill(os.getpid(), signal_)

    def half(copy: RowCopy, tensors: Sequence[torch.Tensor], at: int) -> None:
        put_half(copy, at)
        put(copy, tensors, at)

    def half_found(copy: RowCopy, found: FoundRows, number: int, at: int) -> None:
        put_half(copy, at)
        put_found(copy, found, number, at)

    RowCopy.put, RowCopy.put_found = half, half_found  # type: ignore[method-assign]
    storage.append(rows)
    RowCopy.put, RowCopy.put_found = put, put_found  # type: ignore[method-assign]
    storage.append(stamped(torch.arange(count)))
    pipe.send("went on")
    pipe.recv()


def die_in_rewrite(pipe: Connection, storage: PackedReplayStorage) -> None:
    """Die with rows 1, 5 and 3 noted as being rewritten, and the first of them garbage."""
    rows = storage.rows
    with rows._lock:
        rows._rewritten[:3] = torch.tensor([1, 5, 3])
        rows._header[REWRITING] = 3
        rows._header[VERSION] += 1
        rows.block[1] = -7
        pipe.send("half")
        os.kill(os.getpid(), signal.SIGKILL)
