"""Transitions as the rows of one tensor, with all computed that updates do not change."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import nn
from torchrl.objectives import LossModule

from torchrl_unilab.errors import LayoutKeyError, LayoutShapeError
from torchrl_unilab.objectives.fused.networks import one_input
from torchrl_unilab.objectives.targets import sync_normalizers


class Transitions(NamedTuple):
    """Columns of packed transitions by name: views, [n, ...]."""

    critic_input: torch.Tensor  # state and action, side by side
    next_state: torch.Tensor
    observation: torch.Tensor
    next_observation: torch.Tensor
    reward: torch.Tensor
    discount: torch.Tensor  # 0 where terminated
    weight: torch.Tensor

    @property
    def state(self) -> torch.Tensor:
        """What the critics see of the state, [n, state size]."""
        return self.critic_input[:, : self.next_state.shape[1]]


class TransitionRows:
    """The columns of a loss's packed transitions; `FusedOffPolicyUpdate` keeps it.

    Args:
        loss: Whose keys, normalisers and discount hold.
        head: The actor's, with its ``net`` and ``normalizer``.
    """

    def __init__(self, loss: LossModule, head: TensorDictModuleBase) -> None:
        critic = loss.qvalue_network
        self._loss, self._head = loss, head
        self._one_input = one_input(head, critic)
        self._normalizes = {type(head.normalizer), type(critic.normalizer)} != {nn.Identity}
        actions = len(head.center)
        state = critic.net[0].in_features - actions
        actor_input = 0 if self._one_input else head.net[0].in_features
        self._widths = [state + actions, state, actor_input, actor_input, 1, 1, 1]

    def pack(self, batch: TensorDictBase, dtype: torch.dtype) -> torch.Tensor:
        """Return transitions as rows of a dtype, as `FusedOffPolicyUpdate.prepare` does."""
        if batch.batch_dims != 1:
            raise LayoutShapeError(
                f"transitions: batch size {tuple(batch.batch_size)} (expected one dimension). "
                "Flatten the batch by reshape(-1)."
            )
        if self._normalizes:
            sync_normalizers(self._loss)
        loss, keys, critic = self._loss, self._loss.tensor_keys, self._loss.qvalue_network
        after = _required(batch, "next")
        # In the order of the packed columns; the first width is that of state and action together.
        columns = [
            (critic.normalizer, batch, critic.in_keys[0], self._widths[1]),
            (None, batch, keys.action, self._widths[0] - self._widths[1]),
            (critic.normalizer, after, critic.in_keys[0], self._widths[1]),
        ]
        if not self._one_input:
            head, width = self._head, self._widths[2]
            columns += [(head.normalizer, td, head.in_keys[0], width) for td in (batch, after)]
        parts = []
        for normalizer, source, key, width in columns:
            part = _required(source, key)
            if part.shape[1:] != (width,):
                raise LayoutShapeError(
                    f"transitions: {key!r} has shape {tuple(part.shape)} (expected "
                    f"({len(batch)}, {width})). Make the networks of the environment's sizes."
                )
            parts.append(part if normalizer is None else normalizer(part))

        def column(part: torch.Tensor, key: NestedKey, where: str = "") -> torch.Tensor:
            if part.numel() != len(batch):
                raise LayoutShapeError(
                    f"transitions: {key!r}{where} has shape {tuple(part.shape)} (expected "
                    f"({len(batch)}, 1)). Add the rewards of several agents up."
                )
            return part.reshape(len(batch), 1)

        gamma = loss.value_estimator.gamma
        steps_key = loss.value_estimator.tensor_keys.steps_to_next_obs
        steps = batch.get(steps_key, None)
        if steps is not None:
            gamma = gamma ** column(steps, steps_key)
        parts.append(column(_required(after, keys.reward), keys.reward, " under 'next'"))
        terminated = _required(after, keys.terminated)
        terminated = column(terminated, keys.terminated, " under 'next'")
        parts.append(gamma * terminated.logical_not())
        key, weighted = keys.priority_weight, loss.use_prioritized_weights in (True, "auto")
        weight = batch.get(key, None) if weighted else None
        parts.append(torch.ones_like(parts[-1]) if weight is None else column(weight, key))
        return torch.cat([part.to(dtype) for part in parts], dim=1)

    def unpack(self, rows: torch.Tensor) -> Transitions:
        """Return the columns of some rows, [n, k]; their weights sum to one."""
        critic, after, actor, actor_after, reward, discount, weight = rows.split(self._widths, 1)
        if self._one_input:
            actor, actor_after = critic[:, : after.shape[1]], after
        weight = weight.squeeze(1)
        scalars = reward.squeeze(1), discount.squeeze(1), weight / weight.sum()
        return Transitions(critic, after, actor, actor_after, *scalars)


def _required(batch: TensorDictBase, key: NestedKey) -> TensorDictBase | torch.Tensor:
    value = batch.get(key, None)
    if value is None:
        raise LayoutKeyError(
            f"transitions: no {key!r} among {sorted(map(str, batch.keys()))} (expected the keys "
            "that the loss reads). Store it, or name it by loss.set_keys."
        )
    return value
