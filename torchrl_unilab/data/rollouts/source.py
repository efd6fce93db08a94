"""What a write copies to a slot, checked before the slot is claimed.

`RolloutRingStorage` calls it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from torchrl_unilab.data.schema import TensorField, TensorSchema
from torchrl_unilab.errors import LayoutShapeError


@dataclass(frozen=True)
class RolloutSource:
    """Tensors to copy to a slot: one per field, or one per field and part of a lazy stack."""

    tensors: list[torch.Tensor]
    stack_dim: int | None = None

    @classmethod
    def of(cls, rollout: TensorDictBase, schema: TensorSchema) -> RolloutSource:
        """Return the tensors of a rollout, checked."""
        if not isinstance(rollout, LazyStackedTensorDict):
            return cls(schema.select(rollout))
        if tuple(rollout.batch_size) != schema.batch_size:
            raise LayoutShapeError(
                f"batch size of a rollout: {tuple(rollout.batch_size)} (expected "
                f"{schema.batch_size}). Pass rollouts like the first one, or make a new storage."
            )
        dim = rollout.stack_dim

        def part(shape: tuple[int, ...]) -> tuple[int, ...]:
            return shape[:dim] + shape[dim + 1 :]

        fields = tuple(TensorField(f.path, part(f.shape), f.dtype) for f in schema.fields)
        parts = TensorSchema(part(schema.batch_size), fields)
        columns = [parts.select(each) for each in rollout.tensordicts]
        return cls([tensor for field in zip(*columns, strict=True) for tensor in field], dim)

    def copy_to(self, fields: list[torch.Tensor]) -> None:
        """Copy to the tensors of a slot."""
        targets = fields
        if self.stack_dim is not None:
            targets = [part for field in fields for part in field.unbind(self.stack_dim)]
        with torch.no_grad():
            torch._foreach_copy_(targets, self.tensors)
