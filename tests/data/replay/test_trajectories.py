"""Which rows follow which, where observations do not tell by themselves."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from torchrl_unilab.data import PackedReplayStorage


def _still(count: int, **changes: torch.Tensor) -> TensorDict:
    """Rows that observe zeros before and after, unless `changes` say otherwise."""
    after = {"observation": torch.zeros(count, 2), "reward": torch.ones(count, 1)}
    after |= {"done": torch.zeros(count, 2, dtype=torch.bool)}
    return TensorDict({"observation": torch.zeros(count, 2), "next": after | changes}, [count])


def _steps(*writes: tuple[str, TensorDict]) -> list[int]:
    """How many steps, of two at most, each row takes after rows were written one by one."""
    with PackedReplayStorage(16, n_step=2) as storage:
        for method, rows in writes:
            getattr(storage, method)(rows)
        return storage.get(torch.arange(len(storage)))["steps_to_next_obs"].tolist()


def test_a_step_follows_no_rows_that_were_steps_of_another_size():
    assert _steps(("append", _still(2)), ("add", _still(2))) == [2, 1, 1, 1]
    assert _steps(("add", _still(2)), ("append", _still(1)), ("add", _still(2))) == [1] * 5


@pytest.mark.parametrize(
    "change", [{"observation": torch.tensor([[0.0, 9.0]])}, {"done": torch.tensor([[True, False]])}]
)
def test_a_row_follows_none_of_which_one_number_differs_or_one_agent_is_done(change):
    assert _steps(("add", _still(1)), ("add", _still(1))) == [2, 1]
    assert _steps(("add", _still(1, **change)), ("add", _still(1))) == [1, 1]


def test_rows_are_a_step_if_one_environment_continues_though_another_was_done():
    done = torch.tensor([[True, True], [False, False]])
    for method in ("add", "append"):
        assert _steps((method, _still(2, done=done)), ("append", _still(2))) == [1, 2, 1, 1]


def test_rows_are_trajectories_if_at_least_half_are_followed_by_the_next():
    half, less = torch.zeros(3, 2), torch.zeros(4, 2)
    half[1] = less[1:] = 9.0
    assert _steps(("append", _still(3, observation=half))) == [2, 1, 1]
    assert _steps(("append", _still(4, observation=less))) == [1] * 4


def test_more_rows_than_there_are_places_are_written_whole_steps_at_a_time():
    with PackedReplayStorage(5, n_step=2) as storage:
        assert storage.add(torch.stack([_still(2)] * 4, 1)) == 0  # the first row's, as ever
        places = torch.tensor([3, 4, 0, 1, 2])  # the oldest first
        assert storage.get(places)["steps_to_next_obs"].tolist() == [2, 2, 2, 1, 1]
    with PackedReplayStorage(3, n_step=2) as storage:
        storage.add(_still(4))
        assert storage.get(torch.arange(3))["steps_to_next_obs"].tolist() == [1, 1, 1]
