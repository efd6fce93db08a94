"""Steps of environments by actions that follow from the step's number, and their comparison."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase


def act(env: EnvBase, i: int) -> torch.Tensor:
    """Random actions of the `i`-th step, within their bounds."""
    low, high = env.action_spec.space.low, env.action_spec.space.high
    generator = torch.Generator().manual_seed(i)
    return low + (high - low) * torch.rand(low.shape, generator=generator)


def step(env: EnvBase, root: TensorDictBase, i: int = 0) -> TensorDictBase:
    """Take the `i`-th step from a root; return what it led to."""
    return env.step(root.set("action", act(env, i)))["next"]


def go(env: EnvBase, root: TensorDictBase, i: int = 0) -> tuple[TensorDictBase, TensorDictBase]:
    """Take the `i`-th step, and start episodes anew; return the step and the next root."""
    return env.step_and_maybe_reset(root.set("action", act(env, i)))


def play(
    env: EnvBase, steps: int, root: TensorDictBase | None = None
) -> tuple[TensorDictBase, TensorDictBase]:
    """Take steps over the ends of episodes; return them stacked along time, and the next root."""
    root = env.reset() if root is None else root
    played = []
    for i in range(steps):
        data, root = go(env, root, i)
        played.append(data)
    return torch.stack(played, 1), root


def assert_same(one: TensorDictBase, other: TensorDictBase) -> None:
    """The same keys, shapes, dtypes, devices, and bits."""
    assert set(one.keys(True, True)) == set(other.keys(True, True))
    assert one.batch_size == other.batch_size
    assert one.device == other.device
    for key in one.keys(True, True):
        assert one[key].dtype == other[key].dtype, key
        assert torch.equal(one[key], other[key]), key
