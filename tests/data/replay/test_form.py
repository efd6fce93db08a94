from __future__ import annotations

import pytest

from torchrl_unilab.data.replay.form import is_learnt_from


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
