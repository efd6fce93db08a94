"""The receiving side of a scheme: pulls published weights into the model of the thread that acts.

`WeightReceiver` copies a newer snapshot into a worker's model, whole, and reports its version.
`pull_in_rollouts` makes a TorchRL collector pull at the start of each rollout or step: TorchRL
creates a worker's collector itself, so the object's class becomes a subclass of its class. Hooks
that the user sets on the collector are left free, and replacing them disconnects nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.collectors import Collector

from torchrl_unilab.runtime.trace import span
from torchrl_unilab.shm.seqlock import Snapshot, SnapshotCell
from torchrl_unilab.weight_update.module_weights import (
    EXTRA_STATE,
    ModuleWeights,
    check_tied,
    nested,
    tied_names,
)
from torchrl_unilab.weight_update.packing import DevicePacker

_address = torch.Tensor.data_ptr


class WeightReceiver:
    """A worker's end of a cell.

    Args:
        cell: Where weights come from.
        worker: The worker's index, under which it reports to the cell.
        private: Whether to move the model's tensors into memory of this process first.

    Attributes:
        applied: The version that the model has; None before the first.
    """

    def __init__(self, cell: SnapshotCell, worker: int, *, private: bool = True) -> None:
        self.applied: int | None = None
        self._private = private
        cell.become_reader(worker)
        self._cell, self._worker = cell, worker
        self._snapshot = Snapshot(cell.layout)
        self._extra = {k: v for k, v in self._snapshot.tensors.items() if EXTRA_STATE in k}
        self._weights: ModuleWeights | None = None
        self._packer: DevicePacker | None = None

    def pull(self, model: nn.Module) -> bool:
        """Copy the newest version into `model` if it is not there yet; return whether it did.

        Raises:
            LayoutError: The model's keys, shapes or dtypes are not those of the cell, or it ties
                weights that differ there.
            ContentionError: The writer overtook every bounded try; the model keeps
                its previous whole version.
        """
        weights = self._weights
        if weights is None or weights.module is not model:
            weights, self.applied = self._bind(model), None
        if self._cell.version == self.applied:
            return False
        with span("pull"):
            version = self._cell.read(self._snapshot)
            targets = weights.tensors()
            # A layer was replaced, or a tensor's memory, which may be of another shape or dtype.
            if targets is None or [*map(_address, targets)] != self._addresses:
                weights = self._bind(model)
                targets = weights.tensors() or []
            values: Mapping[str, torch.Tensor] = self._snapshot.tensors
            if self._tied:
                check_tied(self._tied, values)
            if self._packer is not None:
                values = self._packer.to_device(self._snapshot)
            if targets:
                with torch.no_grad():
                    torch._foreach_copy_(targets, [values[name] for name in weights.names])
            if self._extra:
                weights.set_extra_state(self._extra)
        # Reported first: after an interrupt between the two, the next pull repeats both.
        self._cell.report_applied(self._worker, version)
        self.applied = version
        return True

    def _bind(self, model: nn.Module) -> ModuleWeights:
        """Match the model with the cell, and give it private tensors."""
        weights = ModuleWeights(model)
        parameters = {k: value for k, value in weights.named().items() if EXTRA_STATE not in k}
        remedy = "Use the same architecture on sender and worker."
        self._cell.layout.select(parameters | self._extra, remedy=remedy)
        if self._private:
            weights.make_private()
        targets = weights.tensors() or []
        self._addresses = [*map(_address, targets)]
        self._tied = tied_names(dict(zip(weights.names, targets, strict=True)))
        device = next((tensor.device for tensor in targets), torch.device("cpu"))
        self._packer = None if device.type == "cpu" else DevicePacker(self._cell.layout, device)
        self._weights = weights
        return weights

    def invalidate(self) -> None:
        """Report that the model has weights from elsewhere, until the next publish."""
        self._cell.report_applied(self._worker, None)

    def weights(self) -> TensorDictBase:
        """Return the model's weights as a nested TensorDict."""
        assert self._weights is not None, "a pull binds the model"
        return nested(self._weights.named())


@runtime_checkable
class AcceptsWeights(Protocol):
    """A context that applies weights to what it holds: sub-collectors, an inference server."""

    def update_policy_weights_(self, *args: Any, **kwargs: Any) -> None:
        """Apply weights."""


@runtime_checkable
class ProvidesModels(Protocol):
    """A context that finds its models itself."""

    def get_model(self, model_id: str) -> nn.Module:
        """Return the model of that name."""


class Puller(Protocol):
    """What a collector pulls through: a receiving scheme."""

    pull_at: str

    def pull(self) -> bool:
        """Apply the newest version if it is not applied yet."""

    def invalidate(self) -> None:
        """Report that the model has weights from elsewhere, until the next publish."""


class _PullsWeights(Collector):
    """Collector whose weights are those published when its rollout (or step) starts."""

    _pullers: list[Puller]
    _in_rollout: bool

    def _pull(self) -> None:
        for puller in self._pullers:
            if puller.pull_at != "manual":
                puller.pull()

    def rollout(self) -> TensorDictBase | None:
        """Pull, then collect one rollout."""
        for puller in self._pullers:  # as `_pull` does, without its call
            if puller.pull_at != "manual":
                puller.pull()
        self._in_rollout = True
        try:
            return super().rollout()
        finally:
            self._in_rollout = False

    # A worker pulls before it answers a request for its state. During a rollout its weights change
    # only with ``pull="step"``.

    @property
    def policy(self) -> Any:
        """The acting policy, with the published weights if no rollout is under way."""
        if not self._in_rollout:
            self._pull()
        try:
            return self.__dict__["policy"]
        except KeyError:
            raise AttributeError("policy") from None

    @policy.setter
    def policy(self, policy: Any) -> None:
        self.__dict__["policy"] = policy

    @property
    def _wrapped_policy(self) -> Any:
        for puller in self._pullers:
            if puller.pull_at == "step":
                puller.pull()
        return super()._wrapped_policy

    @_wrapped_policy.setter
    def _wrapped_policy(self, policy: Any) -> None:
        Collector._wrapped_policy.fset(self, policy)

    def state_dict(self) -> Any:
        """Pull, then return the collector's state."""
        self._pull()
        return super().state_dict()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load a state; its weights act until the next publish."""
        self._pull()  # or the next pull would replace the loaded weights by earlier ones
        try:
            super().load_state_dict(*args, **kwargs)
        finally:  # a state that is refused may have been loaded in part
            for puller in self._pullers:
                puller.invalidate()

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Pull, then call a nested method."""
        self._pull()
        return super().cascade_execute(attr_path, *args, **kwargs)

    def get_distant_attr(self, attr: str) -> Any:
        """Pull, then return a nested attribute."""
        self._pull()
        return super().get_distant_attr(attr)


def _pulling_class(cls: Any) -> type[_PullsWeights]:
    return type(f"Pulling{cls.__name__}", (_PullsWeights, cls), {"__doc__": cls.__doc__})


def pull_in_rollouts(collector: Collector, puller: Puller) -> None:
    """Make `collector` pull through `puller` at the start of each rollout."""
    if not isinstance(collector, _PullsWeights):
        cls: Any = type(collector)
        collector.__class__ = _pulling_class(cls)
        collector._pullers = []
        collector._in_rollout = False
    if puller not in collector._pullers:
        collector._pullers.append(puller)
