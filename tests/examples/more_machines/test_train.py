from __future__ import annotations

import pytest

from tests.examples.more_machines.train import main, per_batch
from torchrl_unilab.trainers import OffPolicyConfig


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("algorithm", ["appo", "sac", "td3"])
def test_a_trainer_learns_from_two_nodes(algorithm):
    assert main([algorithm, "InvertedPendulum-v5", "--frames", "6000"]) > 5


def test_updates_per_frame_stay_as_batches_grow():
    config = OffPolicyConfig.for_task("InvertedPendulum-v5", "td3")
    batched = per_batch(config, 8)
    assert batched.updates_per_step == 8 * config.updates_per_step
    assert batched.policy_frequency == config.policy_frequency
