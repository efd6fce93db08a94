"""The scheme below TorchRL's other distributed collectors, each on this machine."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torchrl.collectors import MultiSyncCollector
from torchrl.collectors.distributed import DistributedCollector, RPCCollector

from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.modules import make_actor
from torchrl_unilab.weight_update import UniLabShmScheme

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of torch.distributed, and of TorchRL's own
]

ENVS, STEPS, BATCHES = 2, 8, 6


@pytest.mark.parametrize("kind", [DistributedCollector, RPCCollector])
def test_published_weights_reach_the_workers_whole(kind: Any, unused_tcp_port: int):
    collector = kind(
        [partial(MujocoBatchEnv, "Hopper-v5", ENVS, num_threads=1)],
        make_actor(11, 3),
        collector_class=MultiSyncCollector,
        num_workers_per_collector=2,
        collector_kwargs={"weight_sync_schemes": {"policy": UniLabShmScheme()}},
        frames_per_batch=2 * ENVS * STEPS,
        total_frames=BATCHES * 2 * ENVS * STEPS,
        sync=True,
        launcher="mp",
        tcp_port=unused_tcp_port,
    )
    try:
        for parameter in collector.policy.parameters():  # actions have a mean of zero
            parameter.data.zero_()
        collector.update_policy_weights_()
        means = [batch["loc"].abs().max().item() for batch in collector]
        assert len(means) == BATCHES
        assert means[-2:] == [0.0, 0.0]
    finally:
        collector.shutdown()
