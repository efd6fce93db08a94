"""Rollouts whose content shows who made them, and processes that write them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl.data import ReplayBuffer

from torchrl_unilab.data import RolloutRingStorage

BATCH = (2, 3)


def make_rollout(value: int = 0, batch: tuple[int, ...] = BATCH) -> TensorDict:
    """A rollout of nested keys and mixed dtypes with `value` in every element."""
    return TensorDict(
        {
            "observation": torch.full((*batch, 4), float(value)),
            "critic": torch.full((*batch, 5), value, dtype=torch.bfloat16),
            "action": torch.full(batch, value),
            "next": {
                "reward": torch.full((*batch, 1), float(value)),
                "done": torch.full((*batch, 1), bool(value % 2)),
                "state": {"count": torch.full((*batch, 2), value, dtype=torch.int32)},
            },
        },
        batch,
    )


def stack(*numbers: int) -> TensorDict:
    """Rollouts of these values."""
    return torch.stack([make_rollout(number) for number in numbers])


def misfit(kind: str) -> TensorDict:
    """A rollout that has another shape, dtype or set of keys than `make_rollout` has."""
    rollout = make_rollout(1)
    if kind == "shape":
        rollout["next", "reward"] = torch.zeros(*BATCH, 2)
    elif kind == "dtype":
        rollout["next", "state", "count"] = torch.zeros(*BATCH, 2)
    elif kind == "missing":
        del rollout["next", "done"]
    elif kind == "unknown":
        rollout["next", "value"] = torch.zeros(BATCH)
    elif kind == "not a tensor":
        rollout["next", "note"] = NonTensorData("x", batch_size=BATCH)
    return rollout


def values(rollouts: TensorDictBase) -> list[int]:
    """The value of each rollout along the first dimension, all of whose elements agree."""
    found = []
    for rollout in rollouts.unbind(0):
        value = int(rollout["action"].flatten()[0])
        expected = make_rollout(value, tuple(rollout.batch_size))
        assert (rollout.select(*expected.keys(True, True)) == expected).all(), rollout.to_dict()
        found.append(value)
    return found


def stamp(writer: int, count: int) -> int:
    """A value that says who wrote it and as which of its rollouts; small enough for bf16."""
    return writer * 64 + count


@contextmanager
def copied_bytes() -> Iterator[list[int]]:
    """Collect the bytes of every copy of tensors made in the block."""

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            name = func._schema.name.removeprefix("aten::")
            if name in ("clone", "copy_", "_to_copy", "cat", "stack"):
                copies.append(result.nbytes)
            elif name == "_foreach_copy_":
                copies.extend(tensor.nbytes for tensor in args[0])
            return result

    copies: list[int] = []
    with Copies():
        yield copies


# Targets of spawned processes


def extend_buffer(
    pipe: Connection, buffer: ReplayBuffer, writer: int, rollouts: int, explicit: bool = True
) -> None:
    """Write `rollouts` stamped rollouts, one at a time, and report what `extend` returned."""
    pipe.send("ready")
    pipe.recv()
    if explicit:
        buffer.storage.use_writer(writer)
    kinds = {str(buffer.extend(make_rollout(stamp(writer, i + 1))).dtype) for i in range(rollouts)}
    pipe.send(kinds)
    pipe.recv()


def extend_items(pipe: Connection, buffer: ReplayBuffer, first: int, rollouts: int) -> None:
    """Write rollouts as items of one extend, as any storage takes them."""
    buffer.extend(stack(*range(first, first + rollouts)))
    pipe.send(buffer.write_count)


def claim_and_die(pipe: Connection, storage: RolloutRingStorage) -> None:
    """Claim a slot, and wait to be killed."""
    storage.claim()
    pipe.send("claimed")
    pipe.recv()


def fill_blocked(pipe: Connection, buffer: ReplayBuffer, rollouts: int) -> None:
    """Write more rollouts than there are slots, which waits for the reader."""
    pipe.send("ready")
    for i in range(rollouts):
        buffer.extend(make_rollout(i + 1))
    pipe.send("done")
