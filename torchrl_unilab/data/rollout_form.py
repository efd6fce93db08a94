"""What a rollout looks like: keys, shapes and dtypes; its tensors in that order. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_leaf_nontensor

from torchrl_unilab.errors import (
    LayoutDtypeError,
    LayoutKeyError,
)
from torchrl_unilab.shm.layout import BlockLayout, dotted

__all__ = ["RolloutForm", "RolloutSource", "named_leaves", "rollout_leaves"]


@dataclass(frozen=True)
class RolloutForm:
    """What a rollout looks like: batch size, and key, shape and dtype of each leaf."""

    batch_size: tuple[int, ...]
    fields: tuple[tuple[tuple[str, ...], tuple[int, ...], torch.dtype], ...]

    @classmethod
    def of(cls, rollout: TensorDictBase) -> RolloutForm:
        """Return the form of a rollout.

        Raises:
            LayoutKeyError: Two keys have one dotted name, or there is no tensor.
            LayoutDtypeError: A leaf is not a tensor.
        """
        leaves = list(rollout_leaves(rollout))
        names = [dotted(key) for key, _ in leaves]
        if not names or len(set(names)) < len(names):
            raise LayoutKeyError(
                f"keys of a rollout: {names} (expected at least one, each dotted name once). "
                "Rename one; nested and dotted keys share one namespace."
            )
        return cls(
            tuple(rollout.batch_size),
            tuple((key, tuple(leaf.shape), leaf.dtype) for key, leaf in leaves),
        )

    def meta(self) -> dict[str, torch.Tensor]:
        """Dotted key to a tensor without memory."""
        return {
            dotted(key): torch.empty(shape, dtype=dtype, device="meta")
            for key, shape, dtype in self.fields
        }

    def tensordict(
        self, tensors: Iterable[torch.Tensor], batch: tuple[int, ...] = ()
    ) -> TensorDict:
        """A TensorDict of `tensors`, given in order, of batch size [*batch, *batch_size]."""
        rollout = TensorDict(batch_size=[*batch, *self.batch_size], device=torch.device("cpu"))
        for (key, _, _), tensor in zip(self.fields, tensors, strict=True):
            rollout.set(key, tensor)
        return rollout

    def stack(self, rollouts: list[TensorDict]) -> TensorDict:
        """Copy rollouts of this form, which may be none, to one of batch size [K, *batch_size]."""
        if rollouts:
            return torch.stack(rollouts, 0)
        empty = [torch.empty(0, *shape, dtype=dtype) for _, shape, dtype in self.fields]
        return self.tensordict(empty, (0,))

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` makes it from."""
        fields = [[list(key), list(shape), str(dtype)] for key, shape, dtype in self.fields]
        return {"batch_size": list(self.batch_size), "fields": fields}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> RolloutForm:
        """Return the form that was saved."""
        return cls(
            tuple(saved["batch_size"]),
            tuple(
                (tuple(key), tuple(shape), getattr(torch, dtype.removeprefix("torch.")))
                for key, shape, dtype in saved["fields"]
            ),
        )


@dataclass(frozen=True)
class RolloutSource:
    """Tensors to copy to a slot: one per field, or one per field and stacked part.

    Attributes:
        tensors: The tensors, on any device, in the order of the slot's.
        stack_dim: The dimension that parts are stacked along, if there are.
    """

    tensors: list[torch.Tensor]
    stack_dim: int | None = None

    @classmethod
    def of(cls, rollout: TensorDictBase, layout: BlockLayout) -> RolloutSource:
        """Return the tensors of a rollout for a slot of `layout`, checked.

        Raises:
            LayoutError: Keys, shapes or dtypes differ.
        """
        if not isinstance(rollout, LazyStackedTensorDict):
            return cls(layout.select(named_leaves(rollout)))
        dim = rollout.stack_dim
        parts = [named_leaves(part) for part in rollout.tensordicts]
        # The shape that the stack of tensors like these has, without a stack.
        stacked = {
            key: t.unsqueeze(dim).expand(*t.shape[:dim], len(parts), *t.shape[dim:])
            for key, t in parts[0].items()
        }
        layout.select(stacked)
        alike = BlockLayout.of({key: parts[0][key] for key in layout.keys})
        columns = [alike.select(part) for part in parts]
        return cls([part for field in zip(*columns, strict=True) for part in field], dim)

    def copy_to(self, fields: Iterable[torch.Tensor]) -> None:
        """Copy to the tensors of a slot."""
        targets = list(fields)
        if self.stack_dim is not None:
            targets = [part for field in targets for part in field.unbind(self.stack_dim)]
        with torch.no_grad():
            torch._foreach_copy_(targets, self.tensors)


def rollout_leaves(rollout: TensorDictBase) -> Iterable[tuple[tuple[str, ...], torch.Tensor]]:
    """Yield key and tensor of all entries.

    Raises:
        LayoutDtypeError: An entry is not a tensor, or `rollout` is no TensorDict.
    """
    if not isinstance(rollout, TensorDictBase):
        raise LayoutDtypeError(
            f"cannot write a rollout: {type(rollout).__name__} (expected a TensorDict). "
            "Convert it first."
        )
    for key, leaf in rollout.items(True, True, is_leaf=is_leaf_nontensor):
        if not isinstance(leaf, torch.Tensor):
            raise LayoutDtypeError(
                f"entry {dotted(key)!r} of a rollout: {type(leaf).__name__} (expected a tensor). "
                "Leave it out of the rollout."
            )
        yield (key,) if isinstance(key, str) else key, leaf


def named_leaves(rollout: TensorDictBase) -> dict[str, torch.Tensor]:
    """Return dotted key to tensor of all entries. Raises as `rollout_leaves`."""
    return {dotted(key): leaf for key, leaf in rollout_leaves(rollout)}
