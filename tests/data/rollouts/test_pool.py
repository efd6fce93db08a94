from __future__ import annotations

import copy
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict

from torchrl_unilab.data.rollouts.pool import RolloutPool
from torchrl_unilab.errors import ConfigError, LayoutDtypeError, LayoutError, LayoutShapeError

N, T = 2, 3


def _rollout(value: int, n: int = N, steps: int = T) -> TensorDict:
    """Each element says which rollout, environment and step it is of."""
    element = value * 100 + torch.arange(n * steps, dtype=torch.float32).reshape(n, steps)
    return TensorDict(
        {
            "observation": element.unsqueeze(-1).repeat(1, 1, 4),
            "next": {"reward": element.unsqueeze(-1), "done": element.unsqueeze(-1) % 2 == 0},
        },
        batch_size=[n, steps],
    )


@settings(max_examples=25)
@given(st.integers(1, 8), st.integers(1, 20))
def test_a_pool_holds_what_a_bounded_queue_holds(size, added):
    pool, queue = RolloutPool(size), deque(maxlen=size)
    for value in range(added):
        pool.add(_rollout(value))
        queue.append(_rollout(value))
        assert len(pool) == len(queue)
        found = sorted(pool.data.unbind(1), key=lambda column: column["next", "reward"][0].item())
        expected = [row for rollout in queue for row in rollout.unbind(0)]
        assert all((a == b).all() for a, b in zip(found, expected, strict=True))
    assert pool.added == added


def test_a_new_rollout_takes_the_place_of_the_oldest_and_moves_no_other():
    pool = RolloutPool(3)
    for value in range(3):
        pool.add(_rollout(value))
    pool.add(_rollout(7))
    columns = pool.data["next", "reward"][0, :, 0] // 100
    assert columns.tolist() == [7, 7, 1, 1, 2, 2]


def test_the_data_is_a_view_with_time_first_and_takes_no_new_memory():
    pool = RolloutPool(2)
    pool.add(_rollout(0))
    assert pool.data.batch_size == (T, N)
    before = {key: value.data_ptr() for key, value in pool.data.items(True, True)}
    pool.add(_rollout(1))
    pool.add(_rollout(2))
    assert pool.data.batch_size == (T, 2 * N)
    assert {key: value.data_ptr() for key, value in pool.data.items(True, True)} == before


def test_what_add_returns_is_the_copy_in_the_pool_and_the_rollout_stays_as_it_was():
    pool, given = RolloutPool(2), _rollout(1)
    copy = pool.add(given)
    copy["next", "reward"].zero_()
    assert pool.data["next", "reward"].unique().tolist() == [0.0]
    assert (given == _rollout(1)).all()


@pytest.mark.parametrize(
    "other",
    [
        _rollout(0, n=N + 1),
        _rollout(0, steps=T + 1),
        _rollout(0).set("more", torch.zeros(N, T)),
        _rollout(0).exclude(("next", "done")),
    ],
    ids=["more environments", "longer", "another key", "a key less"],
)
def test_a_rollout_of_another_kind_is_refused_and_nothing_changes(other):
    pool = RolloutPool(2)
    pool.add(_rollout(1))
    with pytest.raises(LayoutError, match=r"^(shape of '|keys: missing)"):
        pool.add(other)
    assert len(pool) == 1
    assert (pool.data == _rollout(1).transpose(0, 1)).all()


@pytest.mark.parametrize(
    ("observation", "error"),
    [
        (torch.zeros(N, T, 1), LayoutShapeError),  # would be broadcast
        (torch.zeros(N, T, 5), LayoutShapeError),
        (torch.zeros(N, T, 4, dtype=torch.float64), LayoutDtypeError),
    ],
)
def test_tensors_of_another_shape_or_dtype_are_refused_and_nothing_changes(observation, error):
    pool = RolloutPool(2)
    pool.add(_rollout(1))
    pool.add(_rollout(2))
    before = pool.data.clone()
    with pytest.raises(error, match=r"^(shape|dtype) of 'observation': "):
        pool.add(_rollout(3).set("observation", observation))
    assert pool.added == 2
    assert (pool.data == before).all()


@pytest.mark.parametrize("size", [0, -1, 9, 2.0, True])
def test_sizes_out_of_range_are_refused(size):
    with pytest.raises(ConfigError, match="expected an integer of 1 to 8"):
        RolloutPool(size)


def test_an_empty_pool_has_no_data():
    with pytest.raises(ConfigError, match="it is empty"):
        _ = RolloutPool(1).data


@pytest.mark.parametrize("added", [0, 1, 2, 5])
def test_a_restored_pool_continues_with_the_same_rollouts_in_the_same_places(added):
    pool, other = RolloutPool(3), RolloutPool(3)
    for value in range(added):
        pool.add(_rollout(value))
    other.add(_rollout(99))
    other.load_state_dict(copy.deepcopy(pool.state_dict()))
    for value in (7, 8):
        pool.add(_rollout(value))
        other.add(_rollout(value))
        assert (pool.data == other.data).all()
    assert other.added == added + 2


def test_a_state_that_was_loaded_is_not_changed_by_what_comes_then():
    pool, others = RolloutPool(1), [RolloutPool(1) for _ in range(2)]
    pool.add(_rollout(1))
    state = pool.state_dict()
    for other in others:
        other.load_state_dict(state)
        assert (other.data == pool.data).all()
        other.add(_rollout(2))


def test_a_state_of_another_size_changes_nothing():
    pool, other = RolloutPool(2), RolloutPool(3)
    pool.add(_rollout(1))
    other.add(_rollout(4))
    with pytest.raises(ConfigError, match=r"a state of 2 rollouts \(expected 3\)"):
        other.load_state_dict(pool.state_dict())
    assert other.added == 1
    assert other.data["next", "reward"][0, 0].item() == 400.0


@pytest.mark.parametrize(
    ("rollout", "size"), [(_rollout(1)[0], r"\[3\]"), (_rollout(1).unsqueeze(0), r"\[1, 2, 3\]")]
)
def test_a_rollout_of_other_dimensions_than_environments_and_time_is_refused(rollout, size):
    with pytest.raises(LayoutShapeError, match=rf"batch size {size} \(expected \[N, T\]"):
        RolloutPool(2).add(rollout)


def test_a_state_is_not_changed_by_rollouts_that_come_later():
    pool = RolloutPool(1)
    pool.add(_rollout(1))
    state = pool.state_dict()
    pool.add(_rollout(2))
    other = RolloutPool(1)
    other.load_state_dict(state)
    assert (other.data["next", "reward"] < 200).all()


def test_the_pool_is_on_its_own_device_whatever_the_rollouts_is():
    pool = RolloutPool(2, "meta")
    pool.add(_rollout(0).to("cpu"))
    assert pool.data["observation"].is_meta
    assert pool.data.device == torch.device("meta")
    on_host = RolloutPool(2)
    on_host.add(_rollout(0))
    pool.load_state_dict(on_host.state_dict())
    assert pool.data["observation"].is_meta


def test_a_pool_that_loads_rollouts_of_another_size_takes_those_from_then_on():
    pool, other = RolloutPool(2), RolloutPool(2)
    pool.add(_rollout(0))
    other.add(_rollout(0, steps=T + 1))

    pool.load_state_dict(other.state_dict())

    pool.add(_rollout(1, steps=T + 1))
    with pytest.raises(LayoutShapeError):
        pool.add(_rollout(2))


def test_a_pool_that_loads_no_rollouts_is_as_a_new_one():
    pool = RolloutPool(2)
    pool.add(_rollout(0))
    pool.load_state_dict(RolloutPool(2).state_dict())
    with pytest.raises(ConfigError, match="it is empty"):
        _ = pool.data
    pool.add(_rollout(1, steps=T + 1))
    assert pool.data.batch_size == (T + 1, N)


def test_a_pool_keeps_no_graph_of_what_it_is_given():
    pool, weight = RolloutPool(2), torch.ones(N, T, requires_grad=True)
    pool.add(TensorDict(reward=2 * weight, batch_size=[N, T]))
    assert not pool.data["reward"].requires_grad


def test_a_first_rollout_that_is_refused_leaves_the_pool_to_the_next():
    pool = RolloutPool(2)
    with pytest.raises(LayoutError):
        pool.add(_rollout(1).set("name", NonTensorData("a", batch_size=[N, T])))
    pool.add(_rollout(1))
    assert len(pool) == 1
