from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from torchrl_unilab.data.replay.form import RowForm, is_learnt_from
from torchrl_unilab.data.schema import TensorSchema


@pytest.mark.parametrize(
    ("path", "learnt"),
    [
        (("action",), True),
        (("agents", "action"), True),
        (("next", "reward"), True),
        (("next", "agents", "reward"), True),
        (("reward",), False),
        (("next", "observation"), False),
    ],
)
def test_actions_and_the_rewards_after_them_are_learnt_from_and_no_others(path, learnt):
    assert is_learnt_from(path) is learnt


def test_a_row_is_followed_by_what_it_observes_whatever_it_says_of_the_step_before():
    kinds = {"reward": torch.zeros(1, 1), "done": torch.zeros(1, 1, dtype=torch.bool)}
    kinds |= {"observation": torch.zeros(1, 3)}
    rows = TensorDict({**kinds, "next": kinds}, [1])

    assert RowForm.of(TensorSchema.of(rows[0]), n_step=2).observed == (("observation",),)
