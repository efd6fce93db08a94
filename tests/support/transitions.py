"""Transitions whose content shows what they are, and processes that write and read them."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import ReplayBuffer

from tests.support.striking import strike_at
from torchrl_unilab.data import PackedReplayStorage

OBSERVATIONS = 17
ACTIONS = 6


def same(a: TensorDictBase, b: TensorDictBase) -> bool:
    """Whether keys, batch sizes, dtypes and values are equal."""
    keys = {*a.keys(True, True)}
    return (
        a.batch_size == b.batch_size
        and keys == {*b.keys(True, True)}
        and all(a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]) for key in keys)
    )


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


def episodes(count: int, length: int = 7) -> TensorDict:
    """Rows of episodes of a length, whose content says which row they are."""
    rows, number = transitions(count), torch.arange(count)
    rows["next", "done"] = ((number + 1) % length == 0).unsqueeze(1)
    rows["next", "terminated"] = rows["next", "done"].clone()
    rows["episode"], rows["number"] = number // length, number.unsqueeze(1)
    rows["policy_version"] = number // 10
    return rows


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


def replay_of(rows: TensorDictBase, capacity: int, **settings: Any) -> PackedReplayStorage:
    """A replay that holds these rows."""
    storage = PackedReplayStorage(capacity, **settings)
    storage.append(rows)
    return storage


# Targets of spawned processes


def append_until_told(
    pipe: Connection, storage: PackedReplayStorage, writer: int | None, count: int
) -> None:
    """Append stamped rows, `count` at a time, until the other end says something.

    Args:
        pipe: To the other end.
        storage: Where to.
        writer: Shard to write to; None for one that the storage chooses.
        count: Rows of an append.
    """
    torch.set_num_threads(1)
    if writer is not None:
        storage.use_writer(writer)
    pipe.send("ready")
    written, blocks = (
        0,
        [stamped(torch.arange(i, i + count) * 8 + (writer or 0)) for i in range(64)],
    )
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
    """Step `t` of environments, each observed as (writer, environment, step); rewards are 1."""
    seen = torch.tensor([[writer, env, t] for env in range(envs)], dtype=torch.float32)
    done = torch.full((envs, 1), (t + 1) % episode == 0)
    ahead = seen + torch.tensor([0.0, 0.0, 1.0]) + 0.5 * done
    return TensorDict(
        {
            "observation": seen,
            "next": {"observation": ahead, "reward": torch.ones(envs, 1), "done": done},
        },
        [envs],
    )


def wrong_chain(batch: TensorDictBase, episode: int, n: int) -> int:
    """How many n-step returns of chained steps are none, but for those at a shard's end."""
    seen, ahead = batch["observation"], batch["next", "observation"]
    taken, t = batch["steps_to_next_obs"], seen[:, 2]
    left = episode - t % episode  # steps to the episode's end
    bad = (batch["next", "reward"][:, 0] != taken) | (taken > left.clamp(max=n)) | (taken < 1)
    done = batch["next", "done"][:, 0]
    bad |= done != (taken == left)
    expected = seen + taken.unsqueeze(1) * torch.tensor([0.0, 0.0, 1.0])
    bad |= (ahead != expected + 0.5 * done.unsqueeze(1)).any(1)
    return int(bad.sum())


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


def strike_half_way(
    pipe: Connection, storage: PackedReplayStorage, writer: int, count: int, signal_: int
) -> None:
    """Append `count` rows, and get a signal when half of each row is written."""
    torch.set_num_threads(1)
    storage.use_writer(writer)

    def strike() -> None:
        pipe.send(os.getpid())
        os.kill(os.getpid(), signal_)

    full = storage.rows.window().heads[writer] + count > storage.rows.shard_rows
    strike_at(storage.rows, 3 if full else 2, strike)
    storage.append(stamped(torch.arange(count)))
    pipe.send("went on")
    pipe.recv()
