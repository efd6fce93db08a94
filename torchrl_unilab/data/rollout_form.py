"""What a rollout looks like: keys, shapes and dtypes. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor

from torchrl_unilab.errors import (
    LayoutDtypeError,
    LayoutKeyError,
)
from torchrl_unilab.shm.layout import dotted

__all__ = ["RolloutForm", "named_leaves", "rollout_leaves"]


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
