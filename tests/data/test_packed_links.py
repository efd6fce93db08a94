"""Rows whose successors come after a checkpoint, in a process that has loaded the rows."""

from __future__ import annotations

import copy

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tests.support.transitions import steps
from torchrl_unilab.data.packed_replay import PackedReplayStorage


def contents(storage: PackedReplayStorage) -> list[bytes]:
    """All that a storage holds, as it lies."""
    state = storage.state_dict()
    return [repr(state["head"]).encode(), *(bytes(part.numpy()) for part in state["parts"])]


def links_of(storage: PackedReplayStorage) -> torch.Tensor:
    """The link of each row that can be read."""
    rows = storage.rows
    assert rows.layout.link is not None
    floor, end, _ = rows.window()
    links, _ = rows.layout.unpack(rows.block[:, rows.layout.link])
    return links[torch.arange(floor, end).remainder(rows.capacity)]


@given(
    envs=st.integers(1, 3),
    before=st.integers(0, 12),
    after=st.integers(1, 12),
    capacity=st.integers(8, 40),
    episode=st.sampled_from([0.0, 0.3, 1.0]),
    native=st.booleans(),
    kind=st.sampled_from(
        [
            {"n_step": 3},
            {"next_observation": "derived"},
            {"n_step": 2, "next_observation": "derived"},
        ]
    ),
)
@settings(max_examples=80, deadline=None)
def test_writing_goes_on_over_a_checkpoint_bit_for_bit(
    envs, before, after, capacity, episode, native, kind
):
    """A serial oracle: the storage that was never saved."""
    rows = steps(envs, before + after, seed=before * 31 + after, episode=episode)
    kind = {**kind, "example": rows[0][0]}
    if "next_observation" in kind:
        kind["final_observations"] = capacity
    with (
        PackedReplayStorage(capacity, **kind) as whole,
        PackedReplayStorage(capacity, **kind) as broken,
        PackedReplayStorage(capacity, **kind) as resumed,
    ):
        for row in rows[:before]:
            for storage in (whole, broken):
                (storage.add if native else storage.append)(row)
        assert broken.links is not None
        assert resumed.links is not None
        resumed.use_writer(0)  # as a worker is one, before the rows are loaded
        resumed.load_state_dict(copy.deepcopy(broken.state_dict()))
        resumed.links.load_state_dict(copy.deepcopy(broken.links.state_dict()))
        for row in rows[before:]:
            for storage in (whole, resumed):
                (storage.add if native else storage.append)(row)
        assert contents(resumed) == contents(whole)
        one, other = (storage.sample(16, seed=1) for storage in (whole, resumed))
        assert all(torch.equal(one[key], other[key]) for key in one.keys(True, True))


def test_rows_that_were_not_loaded_are_not_linked():
    rows: list[TensorDict] = steps(2, 3, seed=4)
    kind = {"next_observation": "derived", "example": rows[0][0]}
    with (
        PackedReplayStorage(20, **kind) as saved,
        PackedReplayStorage(20, **kind) as empty,
        PackedReplayStorage(20, **kind) as fresh,
    ):
        assert saved.links is not None
        assert empty.links is not None
        for row in rows[:2]:
            saved.add(row)
        empty.links.load_state_dict(saved.links.state_dict())
        for storage in (saved, empty, fresh):
            storage.add(rows[2])
        assert contents(empty) == contents(fresh)
        assert links_of(saved).tolist()[:4] == [3, 4, 5, 6]


def test_rows_that_are_not_linked_have_no_links_to_save():
    with PackedReplayStorage(4, example=steps(1, 1)[0][0]) as storage:
        assert storage.links is None
