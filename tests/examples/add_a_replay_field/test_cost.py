"""A field of your own in the replay, in two steps.

1. Have the environment, a transform or your script put it into the transitions. `ReplayCollector`
   takes entries of the environment's `observation_spec`, not what a policy adds.
2. There is no second step: the schema comes from the first transitions (or `example=`), and each
   row, sample and checkpoint has the field from then on.
"""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer

from torchrl_unilab.data import PackedReplayStorage


def transitions(first: int, count: int) -> TensorDict:
    """Transitions whose values name their step, with a cost."""
    step = torch.arange(first, first + count, dtype=torch.float32).unsqueeze(-1)
    flags = torch.zeros(count, 1, dtype=torch.bool)
    return TensorDict(
        observation=step,
        action=-step,
        cost=step * 10.0,
        next=TensorDict(
            observation=step + 1, reward=step, done=flags, terminated=flags, truncated=flags
        ),
        batch_size=[count],
    )


@pytest.fixture
def buffer():
    with PackedReplayStorage(64) as storage:
        yield TensorDictReplayBuffer(storage=storage, batch_size=32)


def test_samples_have_the_field(buffer):
    buffer.extend(transitions(0, 40))
    sample = buffer.sample()
    assert torch.equal(sample["cost"], sample["observation"] * 10.0)


def test_transitions_without_the_field_are_refused_by_its_name(buffer):
    buffer.extend(transitions(0, 8))
    with pytest.raises(KeyError, match="cost"):
        buffer.extend(transitions(8, 8).exclude("cost"))
