"""Transitions as the rows of one tensor, with all computed that updates do not change."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import nn
from torchrl.objectives import LossModule

from torchrl_unilab.checks import entry_of
from torchrl_unilab.errors import LayoutShapeError
from torchrl_unilab.objectives.fused.networks import one_input
from torchrl_unilab.objectives.targets import sync_normalizers

_REMEDY = "Store it, or name it by loss.set_keys."


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
        loss, head, entry = self._loss, self._head, partial(_entry, "transitions", batch)
        after = entry_of("transitions", batch, "next", _REMEDY)
        entry_after = partial(_entry, "next of transitions", after)
        keys, critic = loss.tensor_keys, loss.qvalue_network
        # In the order of the packed columns; the first width is that of state and action together.
        both, state, actor_input, *_ = self._widths
        seen = critic.in_keys[0]
        parts = [
            critic.normalizer(entry(seen, state)),
            entry(keys.action, both - state),
            critic.normalizer(entry_after(seen, state)),
        ]
        if not self._one_input:
            seen = head.in_keys[0]
            parts += [head.normalizer(get(seen, actor_input)) for get in (entry, entry_after)]
        gamma = loss.value_estimator.gamma
        steps = loss.value_estimator.tensor_keys.steps_to_next_obs
        if batch.get(steps, None) is not None:
            gamma = gamma ** entry(steps)
        parts.append(entry_after(keys.reward))
        parts.append(gamma * entry_after(keys.terminated).logical_not())
        weighted = loss.use_prioritized_weights in (True, "auto")
        weighted = weighted and batch.get(keys.priority_weight, None) is not None
        parts.append(entry(keys.priority_weight) if weighted else torch.ones_like(parts[-1]))
        return torch.cat([part.to(dtype) for part in parts], dim=1)

    def unpack(self, rows: torch.Tensor) -> Transitions:
        """Return the columns of some rows, [n, k]; their weights sum to one."""
        critic, after, actor, actor_after, reward, discount, weight = rows.split(self._widths, 1)
        if self._one_input:
            actor, actor_after = critic[:, : after.shape[1]], after
        weight = weight.squeeze(1)
        scalars = reward.squeeze(1), discount.squeeze(1), weight / weight.sum()
        return Transitions(critic, after, actor, actor_after, *scalars)


def _entry(
    what: str, batch: TensorDictBase, key: NestedKey, width: int | None = None
) -> torch.Tensor:
    """Return an entry of transitions, [n, width]; one number for each, [n, 1], for None."""
    part: torch.Tensor = entry_of(what, batch, key, _REMEDY)
    expected, remedy = (len(batch), width or 1), "Make the networks of the environment's sizes."
    if width is None:
        remedy = "Add the rewards of several agents up."
        part = part.reshape(expected) if part.numel() == len(batch) else part
    if part.shape != expected:
        raise LayoutShapeError(
            f"{what}: {key!r} has shape {tuple(part.shape)} (expected {expected}). {remedy}"
        )
    return part
