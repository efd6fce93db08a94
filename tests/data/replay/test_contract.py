"""What TorchRL's parts do over a packed replay, beside what they do over its own storage."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import HERReplayBuffer, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers import SliceSampler, TensorDictMaxValueWriter
from torchrl.data.replay_buffers.sample_units import Sequence

from tests.support.transitions import episodes, replay_of, same, stamped, transitions
from torchrl_unilab.data import PackedReplayStorage, PackedReplayWriter
from torchrl_unilab.errors import ConfigError, LayoutShapeError, UniLabError

STORAGES = [LazyTensorStorage, PackedReplayStorage]


def both(make: Any, capacity: int = 50, rows: int = 70, **settings: Any) -> list[Any]:
    """A buffer over each storage, filled alike, past its end."""
    buffers = []
    for storage in STORAGES:
        buffer = make(storage=storage(capacity), batch_size=16, **settings)
        for block in episodes(rows).split(10):
            buffer.extend(block.clone())
        buffers.append(buffer)
    return buffers


def samples(buffers: list[Any], count: int = 3) -> list[list[TensorDict]]:
    found = []
    for buffer in buffers:
        torch.manual_seed(1)
        found.append([buffer.sample().clone() for _ in range(count)])
    return found


def assert_alike(buffers: list[Any]) -> None:
    for one, other in zip(*samples(buffers), strict=True):
        assert same(one, other)


# Indices

INDICES = [
    torch.tensor([[0, 1], [2, 3]]),
    np.array([[4, 0]]),
    np.int64(3),
    np.array([1, 2]),
    torch.tensor([True, False] * 10),
    np.array([True] * 20),
    torch.tensor([True, False]),  # too short
    torch.tensor([True] * 50),  # too long: the storage has 20 of 50
    ...,
    None,
]


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("make", [ReplayBuffer, TensorDictReplayBuffer])
def test_an_index_means_what_it_does_to_the_stock_storage(make, index):
    found = []
    for buffer in both(make, rows=20):
        try:
            found.append(buffer[index])
        except IndexError:
            found.append(IndexError)
    stock, packed = found
    assert packed is stock is IndexError or same(packed, stock)


@pytest.mark.parametrize(
    ("index", "shape"),
    [
        (np.int64(3), []),
        (50, []),  # there is none
        (torch.tensor([[0, 1], [2, 3]]), [2, 2]),
        (torch.tensor([True, False]), [1]),  # too short
        (..., [50]),
        (None, [50]),
        (-1, []),
        (torch.tensor([-1, 3]), [2]),
        ([3, 1], [2]),
        (slice(1, 3), [2]),
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [ReplayBuffer, TensorDictReplayBuffer])
def test_an_index_to_write_to_means_what_it_does_to_the_stock_storage(make, index, shape):
    found = []
    for buffer in both(make):
        try:
            buffer[index] = episodes(50)[: math.prod(shape)].reshape(shape)
        except IndexError:
            found.append(IndexError)
        else:
            found.append(buffer[:].clone())
        assert buffer.write_count == 70
    stock, packed = found
    assert packed is stock is IndexError or same(packed, stock)


BAD = {
    "a key less": lambda rows: rows.exclude("action"),
    "a key more": lambda rows: rows.set("more", rows["observation"]),
    "another shape": lambda rows: rows.set("action", rows["action"][:, :2]),
    "not finite": lambda rows: rows.set("action", rows["action"] + float("nan")),
}


@pytest.mark.parametrize("make", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_rows_continue_where_refused_ones_would_have_been(make, bad):
    buffer = make(storage=PackedReplayStorage(50), batch_size=16)
    first, *blocks = episodes(70).split(10)
    buffer.extend(first.clone())
    for block in blocks:
        before = buffer[:].clone()
        with pytest.raises(UniLabError):
            buffer.extend(bad(block.clone()))
        assert same(buffer[:], before)
        buffer.extend(block.clone())
    expected = both(make)[1]
    assert same(buffer[:], expected[:])
    assert buffer.write_count == expected.write_count


def test_rows_are_replaced_without_the_index_that_a_writer_added():
    for buffer in both(TensorDictReplayBuffer):
        buffer[0:4] = episodes(4)
        assert same(buffer[:4].exclude("index"), episodes(4))
        assert buffer[:4]["index"].tolist() == [0, 1, 2, 3]


# Views


@pytest.mark.parametrize("rows", [5, 20])
@pytest.mark.parametrize(
    "index",
    [slice(None), slice(1, 4), slice(None, None, 2), 3, -1, "action", ("next", "reward")],
    ids=str,
)
def test_slices_ints_and_keys_are_views_of_the_rows(rows, index):
    data = transitions(rows)
    with PackedReplayStorage(20) as storage:
        storage.append(data)

        found, expected = storage.get(index), data[index]
        memory = storage.rows.blocks[0].untyped_storage().data_ptr()
        leaves = [found] if isinstance(found, torch.Tensor) else found.values(True, True)
        assert {leaf.untyped_storage().data_ptr() for leaf in leaves} == {memory}
        assert (found == expected).all()


CHANGES = {
    "view": lambda rb: rb[:]["next", "reward"].fill_(7.0),
    "set_at_": lambda rb: rb.set_at_(("next", "reward"), torch.full((50, 1), 7.0), slice(0, 50)),
    "set_": lambda rb: rb.set_(("next", "reward"), torch.full((50, 1), 7.0)),
    "update_": lambda rb: rb.update_(
        TensorDict({"next": {"reward": torch.full((50, 1), 7.0)}}, [50])
    ),
    "index": lambda rb: rb.__setitem__(slice(0, 50), rb[:].clone().fill_(("next", "reward"), 7.0)),
}


@pytest.mark.parametrize("how", CHANGES)
def test_writing_through_a_view_changes_the_rows(how):
    for buffer in both(TensorDictReplayBuffer):
        CHANGES[how](buffer)

        assert (buffer.sample()["next", "reward"] == 7.0).all()
        assert (buffer.storage.get(torch.arange(50))["next", "reward"] == 7.0).all()


def test_caches_of_samplers_notice_what_is_written_through_views():
    sampler = SliceSampler(slice_len=4, traj_key="episode", cache_values=True)
    _, buffer = both(TensorDictReplayBuffer, sampler=sampler)
    buffer.sample()

    buffer.set_at_("episode", torch.zeros(50, dtype=torch.int64), slice(0, 50))

    assert (buffer.sample()["episode"] == 0).all()


# Samplers


@pytest.mark.parametrize(
    "settings",
    [
        {"traj_key": "episode", "strict_length": False},
        {"end_key": ("next", "done"), "strict_length": False},
        {"traj_key": "episode", "cache_values": True},
    ],
    ids=["traj", "end", "cached"],
)
def test_slices_are_those_over_the_stock_storage_whatever_tells_their_ends(settings):
    samplers = [SliceSampler(slice_len=4, **settings) for _ in STORAGES]
    (one, _), (_, other) = (both(TensorDictReplayBuffer, sampler=each) for each in samplers)
    assert_alike([one, other])


@pytest.mark.parametrize("boundary", ["pad", "stop", "include_reset"])
def test_sequences_are_those_of_the_stock_storage(boundary):
    unit = Sequence(length=4, episode_boundary=boundary, burn_in=1, bootstrap=1)
    assert_alike(both(TensorDictReplayBuffer, sample_unit=unit))


@pytest.mark.parametrize("strategy", ["future", "final", "episode", "random"])
def test_hindsight_goals_are_those_of_the_stock_storage(strategy):
    buffers = []
    for storage in STORAGES:
        buffer = HERReplayBuffer(
            reward_fn=lambda rows: (rows["achieved"] - rows["goal"]).abs().sum(-1, True),
            storage=storage(50),
            strategy=strategy,
            goal_key="goal",
            achieved_goal_key="achieved",
            batch_size=16,
        )
        for block in episodes(70).split(10):
            block["goal"], block["achieved"] = torch.zeros(10, 3), block["observation"][:, :3]
            block["next", "goal"] = torch.zeros(10, 3)
            block["next", "achieved"] = block["next", "observation"][:, :3]
            buffer.extend(block.clone())
        buffers.append(buffer)
    assert_alike(buffers)


def _hindsight(**settings: Any) -> HERReplayBuffer:
    return HERReplayBuffer(
        reward_fn=lambda rows: torch.zeros(len(rows), 1),
        storage=PackedReplayStorage(12),
        **settings,
    )


def _episodes_of(length: int, first: int) -> TensorDict:
    """12 steps of episodes of a length, whose goal is the number of the episode."""
    steps, zeros = torch.arange(12), torch.zeros(12, 1)
    number = (first + steps // length).float().unsqueeze(1)
    rows = {"desired_goal": zeros, "achieved_goal": number, "episode": number}
    after = {"desired_goal": zeros, "achieved_goal": number, "reward": zeros}
    done = ((steps + 1) % length == 0).unsqueeze(1)
    return TensorDict({**rows, "next": {**after, "done": done}}, [12])


def test_hindsight_takes_no_goal_of_another_episode_after_a_whole_lap_or_a_load():
    buffer = _hindsight(her_ratio=1.0, strategy="final", batch_size=64)
    with buffer.storage:
        buffer.extend(_episodes_of(6, 0))
        buffer.sample()
        saved = buffer.storage.state_dict()
        buffer.extend(_episodes_of(4, 100))
        batch = buffer.sample()
        assert batch["desired_goal"].equal(batch["episode"])
        buffer.storage.load_state_dict(saved)
        batch = buffer.sample()
        assert batch["desired_goal"].equal(batch["episode"])


def test_hindsight_looks_for_ends_in_flags_that_no_writer_changes_meanwhile():
    buffer = _hindsight(batch_size=4)
    with buffer.storage as storage:
        buffer.extend(_episodes_of(6, 0))
        before = storage[:]["next", "done"]
        buffer.extend(_episodes_of(4, 0))
        assert before.equal(_episodes_of(6, 0)["next", "done"])
        assert storage[:]["episode"].data_ptr() == storage.get("episode").data_ptr()


def test_slices_copy_no_more_than_they_return(monkeypatch):
    buffer = both(TensorDictReplayBuffer, sampler=SliceSampler(slice_len=4, traj_key="episode"))[1]
    gathered = []
    select = torch.index_select

    def index_select(source, dim, index, **kwargs):
        gathered.append(len(index))
        return select(source, dim, index, **kwargs)

    monkeypatch.setattr(torch, "index_select", index_select)
    buffer.sample()

    assert {*gathered} == {16}  # the sampler's look at the ends of the slices, and the batch


def test_slices_over_several_shards_are_refused_with_the_argument_that_makes_them_right():
    for sampler in (SliceSampler(slice_len=4, traj_key="episode"), None):
        buffer = TensorDictReplayBuffer(
            storage=PackedReplayStorage(50, writers=2),
            writer=PackedReplayWriter(),
            sampler=sampler,
            sample_unit=None if sampler else Sequence(length=4),
            batch_size=16,
        )
        for shard in range(2):
            buffer.extend(episodes(20))
            buffer.storage.use_writer(1 - shard)
        with buffer.storage, pytest.raises(ConfigError, match="writers=1"):
            buffer.sample()


def test_rows_of_a_shard_that_is_ahead_are_drawn_too():
    storage = PackedReplayStorage(50, writers=2)
    buffer = TensorDictReplayBuffer(storage=storage, writer=PackedReplayWriter(), batch_size=200)
    with storage:
        buffer.extend(stamped(torch.arange(20)))

        assert len(storage) == 1  # position 1 is of the other shard
        assert buffer.sample()["count"][:, 0].unique().tolist() == [*range(20)]


def test_agents_keep_their_batch_dimension():
    agents = TensorDict({"observation": torch.rand(6, 3, 2)}, [6, 3])
    rows = TensorDict({"agents": agents, "reward": torch.rand(6, 1)}, [6])
    found = []
    for storage in STORAGES:
        buffer = TensorDictReplayBuffer(storage=storage(10), batch_size=4)
        buffer.extend(rows.clone())
        read = buffer.sample(), buffer[:], buffer[2], buffer[torch.tensor([[1, 2], [3, 4]])]
        found.append([batch["agents"].batch_size for batch in read])
    assert found[0] == found[1] == [(4, 3), (6, 3), (3,), (2, 2, 3)]


# Writers


def test_the_best_rows_stay_as_over_the_stock_storage():
    buffers = []
    for storage in STORAGES:
        buffer = TensorDictReplayBuffer(
            storage=storage(10), writer=TensorDictMaxValueWriter(rank_key="number"), batch_size=16
        )
        order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
        for block in episodes(40)[order].split(8):
            buffer.extend(block.clone().set("index", torch.zeros(8, dtype=torch.int64)))
        buffers.append(buffer)

    assert sorted(buffers[1][:]["number"].flatten().tolist()) == [*range(30, 40)]
    assert torch.equal(buffers[0][:]["number"], buffers[1][:]["number"])


@pytest.mark.parametrize(
    ("capacity", "batch", "before", "after", "length"),
    [(100, 10, 30, 14, 34), (100, 10, 30, 20, 40), (7, 2, 3, 10, 7)],
)
def test_freed_positions_are_written_before_new_ones(capacity, batch, before, after, length):
    """A consuming buffer that is not full gives freed positions first, then new ones."""
    buffers = []
    for storage in STORAGES:
        settings = {"batch_size": batch, "consume_after_n_samples": 1}
        buffer = TensorDictReplayBuffer(storage=storage(capacity), **settings)
        buffer.extend(episodes(before))
        torch.manual_seed(0)
        buffer.sample()
        buffer.extend(episodes(before + after)[before:])
        buffers.append(buffer)

    assert len(buffers[0]) == len(buffers[1]) == length
    assert torch.equal(buffers[0][:]["number"], buffers[1][:]["number"])


def test_a_refused_write_leaves_no_gap_in_what_is_ranked():
    ranked = TensorDictMaxValueWriter(rank_key="number")
    buffer = TensorDictReplayBuffer(storage=PackedReplayStorage(5), writer=ranked, batch_size=2)
    rows = episodes(9)
    buffer.extend(rows[:2].clone())
    with pytest.raises(LayoutShapeError):
        buffer.extend(rows[2:4].clone().set("action", torch.zeros(2, 9)))
    for block in rows[4:].split(2):
        buffer.extend(block.clone())
    assert sorted(buffer[:]["number"].flatten().tolist()) == [4, 5, 6, 7, 8]
    assert buffer.write_count == 7


def test_new_rows_at_positions_need_one_shard():
    storage = PackedReplayStorage(50, writers=2)
    buffer = ReplayBuffer(storage=storage, batch_size=4)
    with storage, pytest.raises(ConfigError, match=r"PackedReplayWriter, or .* writers=1"):
        buffer.extend(transitions(4))


def test_one_row_at_several_positions_is_refused():
    with (
        replay_of(episodes(20), 20) as storage,
        pytest.raises(LayoutShapeError, match="1 at 3 positions"),
    ):
        storage[0:3] = episodes(1)[0]
