"""Examples of rollouts, copies of policies for the CPU, and closing environments."""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tests.support.collecting import CountingEnv, actor, parallel_env, transformed_env
from torchrl_unilab.collectors.worker import POLICY_VERSION, close_env, example_rollout, on_host
from torchrl_unilab.envs import MujocoBatchEnv


def test_an_example_leaves_the_statistics_of_a_policy_as_they_were():
    net = nn.Sequential(nn.LazyLinear(4), nn.BatchNorm1d(4), nn.LazyLinear(1), nn.LazyBatchNorm1d())
    policy = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
    example_rollout(MujocoBatchEnv("InvertedPendulum-v5", num_envs=3, num_threads=1), policy, 2)
    assert (net[1].num_batches_tracked, net[1].running_mean.any()) == (0, False)
    assert net[0].weight.shape == (4, 4)  # sized by it


def test_an_example_has_a_rollouts_form_and_draws_nothing():
    env, policy = transformed_env(), actor()
    before = torch.get_rng_state()
    with set_exploration_type(ExplorationType.RANDOM):
        example = example_rollout(env, policy, 6)
    assert torch.equal(torch.get_rng_state(), before)
    assert example.batch_size == (4, 6)
    assert {("critic", "state"), ("next", "critic", "state"), POLICY_VERSION} <= set(
        example.keys(True, True)
    )


class _Sized(nn.Module):
    """Gives its buffer a size in its first call, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.zeros(0))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        if not self.scale.numel():
            self.scale.resize_(1).fill_(0.5)
        return observation[..., :1] * self.scale


def test_a_buffer_that_an_example_gave_its_size_stays():
    net = _Sized()
    example_rollout(CountingEnv(), TensorDictModule(net, ["observation"], ["action"]), 2)
    assert net.scale.tolist() == [0.5]


class _Elsewhere(torch.nn.Module):
    """Stands for a module on an accelerator: copies go where they are sent."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(2, device="meta"))
        self.sent: list[str] = []

    def to(self, device: str) -> _Elsewhere:
        self.sent.append(device)
        return self


def test_what_acts_is_the_policy_itself_on_the_cpu():
    policy = actor()
    assert on_host(policy) is policy


def test_of_a_policy_on_an_accelerator_a_copy_acts_on_the_cpu():
    policy = _Elsewhere()
    copied = on_host(policy)
    assert copied is not policy
    assert (copied.sent, policy.sent) == (["cpu"], [])


def test_environments_in_processes_that_never_started_are_closed_without_an_error():
    env = parallel_env()
    close_env(env)
    assert env.is_closed
