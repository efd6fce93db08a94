"""Which entries of a batch become columns of packed transitions, and in which shapes they come."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tests.support.off_policy import fused, make_loss, transitions_of
from torchrl_unilab.errors import LayoutShapeError

BOTH = pytest.mark.parametrize("algorithm", ["sac", "td3"])
FLAT = (("next", "reward"), ("next", "terminated"), "priority_weight", "steps_to_next_obs")

pytestmark = pytest.mark.usefixtures("double_precision")


def whole_batch(loss) -> TensorDict:
    """Transitions with all that may be there, each number as a column."""
    batch = transitions_of(loss, 8, 0)
    batch["priority_weight"] = torch.rand(8, 1) + 0.1
    batch["steps_to_next_obs"] = torch.randint(2, 5, (8, 1))
    return batch


@BOTH
@pytest.mark.parametrize("key", FLAT, ids=str)
def test_a_number_for_each_transition_may_come_without_a_dimension_of_its_own(algorithm, key):
    loss = make_loss(algorithm)
    update, batch = fused(loss), whole_batch(loss)
    expected = update.prepare(batch)
    assert torch.equal(update.prepare(batch.set(key, batch[key].squeeze(1))), expected)


@BOTH
@pytest.mark.parametrize("key", FLAT, ids=str)
def test_more_than_one_number_for_a_transition_is_refused_by_key(algorithm, key):
    loss = make_loss(algorithm)
    update, batch = fused(loss), whole_batch(loss)
    name = f"^transitions: '{key}'" if isinstance(key, str) else f"^next of .*: '{key[1]}'"
    with pytest.raises(LayoutShapeError, match=rf"{name} has shape \(8, 2\) \(expected \(8, 1"):
        update.prepare(batch.set(key, batch[key].expand(8, 2)))


@BOTH
@pytest.mark.parametrize("key", ["reward", "terminated", "priority_weight"])
def test_what_the_loss_reads_by_another_key_is_packed_from_there(algorithm, key):
    loss = make_loss(algorithm)
    update, batch = fused(loss), whole_batch(loss)
    expected = update.prepare(batch)
    loss.set_keys(**{key: "other"})
    (batch if key == "priority_weight" else batch["next"]).rename_key_(key, "other")
    assert torch.equal(update.prepare(batch), expected)


@BOTH
def test_steps_to_the_next_observation_are_read_where_the_estimator_reads_them(algorithm):
    loss = make_loss(algorithm)
    update, batch = fused(loss), whole_batch(loss)
    expected = update.prepare(batch)
    loss.value_estimator.set_keys(steps_to_next_obs="steps")
    batch.rename_key_("steps_to_next_obs", "steps")
    assert torch.equal(update.prepare(batch), expected)


@BOTH
@pytest.mark.parametrize(("setting", "taken"), [(True, True), ("auto", True), (False, False)])
def test_priority_weights_are_packed_where_the_loss_takes_them(algorithm, setting, taken):
    loss = make_loss(algorithm)
    loss.use_prioritized_weights = setting
    weight = fused(loss).prepare(batch := whole_batch(loss))[:, -1:]
    expected = batch["priority_weight"] if taken else torch.ones(8, 1)
    assert torch.equal(weight, expected.to(weight))


def test_one_transition_without_a_batch_is_refused():
    loss = make_loss("sac")
    with pytest.raises(LayoutShapeError, match=r"batch size \(\) \(expected one dimension\)"):
        fused(loss).prepare(whole_batch(loss)[0])
