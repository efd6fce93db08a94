"""A policy whose action shows its weights, and an environment that hands it through."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase

from torchrl_unilab.weight_update import UniLabShmScheme


class StillEnv(EnvBase):
    """Observes zeros for ever and takes any action."""

    def __init__(self) -> None:
        super().__init__(batch_size=[])
        self.observation_spec = Composite(observation=Unbounded((3,)))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))

    def _reset(self, tensordict: TensorDictBase | None = None, **_: object) -> TensorDictBase:
        return TensorDict(observation=torch.zeros(3))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return TensorDict(
            observation=torch.zeros(3), reward=torch.zeros(1), done=torch.zeros(1, dtype=torch.bool)
        )

    def _set_seed(self, seed: int | None) -> None:
        pass


class ValuedEnv(StillEnv):
    """Rewards what its network `value` says of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(1, 1)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        with torch.no_grad():
            return super()._step(tensordict).set("reward", self.value(torch.ones(1)))


def make_policy(value: float = 0.0, hidden: int = 8) -> TensorDictModule:
    """A policy whose every action is `value` until its weights change."""
    net = nn.Sequential(nn.Linear(3, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, 1))
    net.register_buffer("counted", torch.tensor(2**53 + 1))
    policy = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
    set_action(policy, value)
    return policy


def set_action(policy: nn.Module, value: float) -> None:
    """Give the policy weights under which every action is `value`."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
        list(policy.parameters())[-1].fill_(value)


class Context:
    """What a sender needs of a collector."""

    def __init__(self, policy: nn.Module) -> None:
        self.policy, self.policy_device = policy, [torch.device("cpu")]


def receiver_of(sender: UniLabShmScheme) -> UniLabShmScheme:
    """The scheme as another process has it, not yet initialised there."""
    receiver = UniLabShmScheme()
    receiver.__setstate__(sender.__getstate__())
    return receiver


def actions(batch: TensorDictBase) -> set[float]:
    """The distinct actions of a batch."""
    return set(batch["action"].unique().tolist())


@contextlib.contextmanager
def collecting(cls: type, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Yield a collector of small rollouts without end, which is shut down on the way out."""
    collector = cls(*args, **({"frames_per_batch": 8, "total_frames": -1} | kwargs))
    try:
        yield collector
    finally:
        collector.shutdown()


def begun(collector: Any) -> Iterator[TensorDictBase]:
    """The batches of a collector after the first, which has come."""
    batches: Iterator[TensorDictBase] = iter(collector)
    next(batches)
    return batches
