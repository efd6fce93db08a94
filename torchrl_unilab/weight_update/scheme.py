"""`UniLabShmScheme`: a TorchRL weight-sync scheme whose sender never waits."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.collectors import BaseCollector, Collector
from torchrl.weight_update import WeightSyncScheme
from torchrl.weight_update.utils import _resolve_model
from torchrl.weight_update.weight_sync_schemes import register_weight_sync_backend

from torchrl_unilab.errors import ConfigError, LayoutKeyError, WaitTimeoutError
from torchrl_unilab.runtime.trace import span
from torchrl_unilab.shm import SnapshotCell
from torchrl_unilab.shm.seqlock import DEFAULT_SLOTS
from torchrl_unilab.weight_update.module_tensors import EXTRA_STATE, ModuleTensors
from torchrl_unilab.weight_update.pull import pull_in_rollouts
from torchrl_unilab.weight_update.transport import (
    UniLabShmTransport,
    Weights,
    named_tensors,
    nested,
)

__all__ = ["UniLabShmScheme"]

PullAt = Literal["rollout", "step", "manual"]
_PULL_MOMENTS = ("rollout", "step", "manual")
_POLL_SECONDS = 0.0005


@register_weight_sync_backend("unilab_shm")
class UniLabShmScheme(WeightSyncScheme):
    """Publishes a policy's weights in shared memory; workers pull them as they act.

    ``send()`` copies the weights into the next slot of a versioned seqlock and returns.
    It does not depend on any worker being alive, awake or reading. A worker pulls in the
    thread that acts, so **a rollout that starts after** ``send()`` **returned acts with
    that version or a newer one, whole**. Workers own their weights: they change by
    publishing alone (a tensor that a module keeps outside its parameters, buffers and extra
    state, in a plain list say, is not a weight and is not covered).

    Drop-in for :class:`~torchrl.weight_update.SharedMemWeightSyncScheme`.

    Args:
        strategy: ``"tensordict"`` or ``"state_dict"``, as in TorchRL. Both publish the
            same snapshot; kept so that either works unchanged.
        sync: Accepted for drop-in use and without effect: there is no acknowledgement to
            wait for. Use `wait_applied` to wait for workers.
        per_worker_weights: Give each worker weights of its own. Set by itself for
            distinct policy factories.
        pull: When a worker looks for a new version: at the start of each ``"rollout"``,
            before each policy call (``"step"``), or only on `receive` (``"manual"``).
        slots: How many snapshots rotate, at least 2.
        first_version: Version of the initial weights, so that versions go on where those of a
            run that is resumed left off.

    Raises:
        ConfigError: `pull`, `slots` or `first_version` is not one of the above.

    Example:
        >>> from torchrl.collectors import MultiSyncCollector
        >>> collector = MultiSyncCollector(  # doctest: +SKIP
        ...     [make_env] * 2,
        ...     policy,
        ...     frames_per_batch=200,
        ...     total_frames=-1,
        ...     weight_sync_schemes={"policy": UniLabShmScheme()},
        ... )
        >>> collector.update_policy_weights_()  # doctest: +SKIP
    """

    def __init__(
        self,
        strategy: Literal["tensordict", "state_dict"] = "tensordict",
        sync: bool = True,
        per_worker_weights: bool = False,
        *,
        pull: PullAt = "rollout",
        slots: int = DEFAULT_SLOTS,
        first_version: int = 0,
    ) -> None:
        super().__init__(strategy)
        if pull not in _PULL_MOMENTS:
            raise ConfigError(
                f"pull: {pull!r} (expected one of {_PULL_MOMENTS}). "
                "Leave it out to pull at the start of each rollout."
            )
        if slots < 2:
            raise ConfigError(f"slots: {slots} (expected at least 2). Leave it out for 3.")
        if first_version < 0:
            raise ConfigError(
                f"first_version: {first_version} (expected at least 0). Leave it out for 0."
            )
        self.sync = sync
        self.per_worker_weights = per_worker_weights
        self.pull_at: PullAt = pull
        self.slots = slots
        self.first_version = first_version
        self._transport: UniLabShmTransport | None = None
        self._clear_local()

    def _clear_local(self) -> None:
        """Forget what holds for one process only."""
        self._given: nn.Module | None = None  # sender: the model, if there is no context
        self._source: ModuleTensors | None = None  # sender: that model's or the context's tensors
        self._sent: ModuleTensors | None = None  # sender: the last other model given
        self._cell: SnapshotCell | None = None  # receiver: where to pull from
        self._binding: _Binding | None = None  # receiver: where to put it
        self._applied = -1  # receiver: the version the model has

    # Sender

    def _init_on_sender_impl(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        weights: TensorDictBase | None = None,
        model: nn.Module | None = None,
        params_map: dict[int, TensorDictBase] | None = None,
        devices: Sequence[torch.device] | None = None,
        device_map_fn: Callable[[int, TensorDictBase], TensorDictBase] | None = None,
        num_workers: int | None = None,
        ctx: Any = None,
    ) -> None:
        """Create the cells, with the initial weights as version 0.

        Args:
            model_id: The model's name in the context.
            context: A collector: gives the model and the number of workers.
            weights: Initial weights, instead of a model.
            model: The model to publish, instead of a context.
            params_map: Initial weights of each worker, instead of all others.
            devices: One device per worker (counts the workers; each worker copies to the
                device of its own model).
            device_map_fn: Maps (worker index, weights) to that worker's weights.
            num_workers: How many workers, with `device_map_fn`.
            ctx: Unused: cells need no multiprocessing context.
        """
        given = {
            "context": context,
            "weights": weights,
            "model": model,
            "devices": devices,
            "device_map_fn": device_map_fn,
            "num_workers": num_workers,
        }
        if params_map is not None:
            _refuse(given | {"model_id": model_id}, "params_map")
            initial = _checked_params_map(params_map)
        elif context is not None:
            if model_id is None:
                raise ValueError("model_id must be provided if context is provided")
            del given["context"]
            workers = _num_workers(context)
            if num_workers == workers:
                del given["num_workers"]
            _refuse(given, "context")
            initial = self._initial_from_context(context, model_id, workers)
        else:
            initial = self._initial_from_model(model, weights, devices, device_map_fn, num_workers)
        source = next(iter(initial.values()), None)
        self._transport = UniLabShmTransport(
            initial,
            slots=self.slots,
            first_version=self.first_version,
            casts=params_map is not None or device_map_fn is not None,
            optional=(
                ModuleTensors(source).optional if isinstance(source, nn.Module) else frozenset()
            ),
        )
        self.shared_transport = self._transport
        self._model_id = model_id
        if context is not None:
            self.context = context

    def _initial_from_context(
        self, context: Any, model_id: str, workers: int
    ) -> Mapping[int, Weights]:
        model = _model_of_context(context, model_id)
        if model is None and model_id == "policy":
            factories = context.policy_factory
            if any(factory is not factories[0] for factory in factories):
                self.per_worker_weights = True
                return {i: _module(factory(), "policy") for i, factory in enumerate(factories)}
            model = factories[0]()
        return self._initial_for(_module(model, model_id), workers)

    def _initial_from_model(
        self,
        model: nn.Module | None,
        weights: TensorDictBase | None,
        devices: Sequence[torch.device] | None,
        device_map_fn: Callable[[int, TensorDictBase], TensorDictBase] | None,
        num_workers: int | None,
    ) -> Mapping[int, Weights]:
        source: Weights
        if model is not None:
            if weights is not None:
                raise ValueError("weights cannot be provided if model is provided")
            source = self._given = _module(model, "model")
        elif weights is not None:
            source = weights
        else:
            raise ValueError(
                "Either params_map, model_id + context or model/weights + devices must be provided."
            )
        if devices is not None:
            return self._initial_for(source, len(devices))
        if device_map_fn is None or num_workers is None:
            raise ValueError(
                "Either params_map, model_id + context or model/weights + devices must be provided."
            )
        mapped = TensorDict.from_module(source) if isinstance(source, nn.Module) else source
        assert isinstance(mapped, TensorDictBase)
        return {i: device_map_fn(i, mapped.data) for i in range(num_workers)}

    def _initial_for(self, source: Weights, workers: int) -> Mapping[int, Weights]:
        if not self.per_worker_weights:
            return dict.fromkeys(range(workers), source)
        # Equal content, yet a cell each: the transport shares by identity.
        return {i: named_tensors(source) for i in range(workers)}

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any | None = None
    ) -> None:
        """Publish `weights` if given; the initial weights are in place already."""
        if weights is not None:
            self._require_transport().send_weights(weights)

    def send(
        self,
        weights: Weights | Mapping[int, Weights] | str | None = None,
        worker_ids: int | Sequence[int] | None = None,
    ) -> None:
        """Publish weights and return, without waiting.

        Weights are copied straight from where they are, so TorchRL's `prepare_weights` runs only
        where a subclass overrides it.

        Args:
            weights: A module, TensorDict, (flattened) state dict, the name of a model in
                the context, or worker index -> weights for ``per_worker_weights``. The
                scheme's model if not given.
            worker_ids: With ``per_worker_weights``, which workers get them. Workers that
                share weights share what is published, as with the stock scheme.

        Raises:
            RuntimeError: Not initialised and connected on the sender, or shut down.
            ValueError: Unknown worker, per-worker weights for shared ones, or no model to
                take weights from.
            LayoutError: Keys, shapes or dtypes differ from the initial weights; nothing
                was published.
        """
        if not self._initialized_on_sender:
            raise RuntimeError("Must be initialized on sender before sending weights")
        if not self.synchronized_on_sender:
            raise RuntimeError("Must be synchronized on sender before sending weights")
        with span("publish"):
            self._send(self._require_transport(), weights, worker_ids)

    def _send(
        self,
        transport: UniLabShmTransport,
        weights: Weights | Mapping[int, Weights] | str | None,
        worker_ids: int | Sequence[int] | None,
    ) -> None:
        if type(self).prepare_weights is not WeightSyncScheme.prepare_weights:
            weights = self.prepare_weights(weights, self._model_id, self._strategy, self.context)
        elif isinstance(weights, str):
            weights = _resolve_model(self.context, weights)
        if weights is None:
            transport.send_model(self._source_tensors(), transport.select(worker_ids))
        elif isinstance(weights, nn.Module):
            self._sent = _tensors_of(weights, self._sent)
            transport.send_model(self._sent, transport.select(worker_ids))
        elif isinstance(weights, dict) and weights and all(isinstance(k, int) for k in weights):
            self._send_per_worker(transport, weights, worker_ids)
        else:
            transport.send_weights(weights, worker_ids)

    def _send_per_worker(
        self,
        transport: UniLabShmTransport,
        weights: Mapping[int, Weights],
        worker_ids: int | Sequence[int] | None,
    ) -> None:
        if not self.per_worker_weights:
            raise ValueError(
                f"cannot publish weights per worker: given for workers {sorted(weights)} "
                "(expected one set, as the workers share it). Use per_worker_weights=True."
            )
        if worker_ids is not None:
            ids = [worker_ids] if isinstance(worker_ids, int) else list(worker_ids)
            weights = {i: weights[i] for i in ids}
        transport.send_each({transport.cell(i): value for i, value in weights.items()})

    def _source_tensors(self) -> ModuleTensors:
        """Look up the scheme's own model, which the context may have replaced."""
        model = self._given
        if model is None and self.context is not None and self._model_id is not None:
            model = _model_of_context(self.context, self._model_id)
        if model is None:
            raise ValueError(
                "cannot publish weights: none given and the sender holds no model "
                "(expected one of them). Pass the weights, or a policy to the collector."
            )
        self._source = _tensors_of(_module(model, self._model_id or "model"), self._source)
        return self._source

    def _require_transport(self) -> UniLabShmTransport:
        if self._transport is None:
            raise RuntimeError(
                "cannot use the scheme: it was shut down or never initialised (expected "
                "init_on_sender). Build a new scheme."
            )
        return self._transport

    @property
    def version(self) -> int:
        """The newest published version; `first_version`, 0, is the initial weights.

        All workers share one count: a publish to some of them raises it too.
        """
        return self._require_transport().version

    @property
    def applied_versions(self) -> dict[int, int | None]:
        """For each worker, the version it acts with.

        None before it connected, and after it loaded weights that were not published
        (``collector.load_state_dict``), until the next publish.
        """
        cells = self._require_transport().cells
        return {worker: cell.applied(worker) for worker, cell in cells.items()}

    @property
    def lag(self) -> dict[int, int | None]:
        """For each worker, how many versions it is behind what was published to it.

        None before it connected, and while it acts with weights that were not published.
        """
        cells = self._require_transport().cells
        return {
            worker: None if (seen := cell.applied(worker)) is None else cell.version - seen
            for worker, cell in cells.items()
        }

    @property
    def statistics(self) -> dict[str, int]:
        """Totals: ``publishes`` and ``bytes`` written here, ``retries`` of overtaken readers."""
        transport = self._require_transport()
        return {
            "publishes": transport.publishes,
            "bytes": transport.published_nbytes,
            "retries": sum(cell.reader_overtaken(w) for w, cell in transport.cells.items()),
        }

    def wait_applied(
        self,
        version: int | None = None,
        worker_ids: int | Sequence[int] | None = None,
        timeout: float = 10.0,
    ) -> None:
        """Wait until workers act with what was published to them up to `version`, or newer.

        Workers pull when a rollout starts, or when they are asked for their state: an idle
        worker that nobody asks stays behind.

        Args:
            version: The version to wait for; the newest if not given. A worker that it was not
                published to needs the last before it.
            worker_ids: Which workers; all if not given.
            timeout: Seconds to wait.

        Raises:
            WaitTimeoutError: Some are still behind; names them and says which are dead.
        """
        transport = self._require_transport()
        ids = (
            list(transport.cells)
            if worker_ids is None
            else [worker_ids]
            if isinstance(worker_ids, int)
            else list(worker_ids)
        )
        deadline = time.monotonic() + timeout
        while True:
            behind = []
            for worker in ids:
                cell = transport.cell(worker)
                newest = cell.version
                wanted = newest if version is None or newest <= version <= self.version else version
                applied = cell.applied(worker)
                if applied is None or applied < wanted:
                    behind.append(worker)
            if not behind:
                return
            if time.monotonic() >= deadline:
                states = ", ".join(self._describe(transport.cell(w), w) for w in behind)
                raise WaitTimeoutError(
                    f"workers behind after {timeout:g} s: {states} (expected version "
                    f"{self.version if version is None else version}). "
                    "Check that they are collecting."
                )
            time.sleep(_POLL_SECONDS)

    def _describe(self, cell: SnapshotCell, worker: int) -> str:
        pid = cell.reader_pid(worker)
        if pid is None:
            return f"worker {worker} never connected"
        state = "alive" if cell.reader_is_alive(worker) else "dead"
        applied = cell.applied(worker)
        where = "with weights that it loaded itself" if applied is None else f"at version {applied}"
        return f"worker {worker} (pid {pid}, {state}) {where}"

    # Receiver

    def _init_on_receiver_impl(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        model: Any = None,
        worker_idx: int | None = None,
        **kwargs: Any,
    ) -> None:
        if context is not None:
            if model_id is None:
                raise ValueError("model_id is required when context is provided")
            if isinstance(context, _GivesModels):
                model = context.get_model(model_id)
            elif model is None:
                model = _model_of_context(context, model_id)
            if worker_idx is None:
                worker_idx = getattr(context, "worker_idx", None)
        self._model_id = model_id
        self.worker_idx = worker_idx
        if model is not None:
            self.model = model
        if context is not None:
            self.context = context

    def _setup_connection_and_weights_on_receiver_impl(
        self, *, worker_idx: int | None = None
    ) -> None:
        """Give the model private tensors and the newest weights."""
        worker_idx = self.worker_idx if worker_idx is None else worker_idx
        if worker_idx is None:
            raise RuntimeError(
                "cannot connect the receiver: no worker_idx (expected one at init_on_receiver "
                "or connect). Pass it."
            )
        self.worker_idx = worker_idx
        self._cell = self._require_transport().cell(worker_idx)
        self._pull(connecting=True)

    @property
    def context(self) -> Any | None:
        """The collector this scheme serves, if it is alive."""
        return self._context_ref() if self._context_ref is not None else None

    @context.setter
    def context(self, context: Any) -> None:
        self._context_ref = None if context is None else weakref.ref(context)
        if self._initialized_on_receiver and isinstance(context, Collector):
            pull_in_rollouts(context, self)
            if self._binding is not None:  # connected before there was one
                self._tell_context(self._binding)

    def pull(self) -> bool:
        """Apply the newest version if it is not applied yet; return whether it did.

        Raises:
            LayoutError: The model does not match the published layout.
            ContentionError: The writer overtook every bounded try; the model keeps
                its previous whole version.
        """
        return self._pull(connecting=False)

    def _pull(self, *, connecting: bool) -> bool:
        if (cell := self._cell) is None:
            return False
        model = self.model
        binding = self._binding
        if binding is None or binding.targets.module is not model:
            binding = self._binding = _Binding(cell, _module(model, self._model_id or "policy"))
            self._applied = -1  # this model has none yet, also if the copy below fails
        elif cell.version == self._applied:
            return False
        elif not binding.targets.is_current():
            binding = self._binding = _Binding(cell, model)
        with span("pull"):
            version = binding.apply(self._require_transport())
        self._applied = version
        assert self.worker_idx is not None
        cell.report_applied(self.worker_idx, version)
        self._tell_context(binding, connecting=connecting)
        return True

    @property
    def applied_version(self) -> int:
        """The version that this worker's model has; -1 before the first."""
        return self._applied

    def disown(self) -> None:
        """Record that the model has weights from elsewhere, until the next publish."""
        if self._cell is not None and self.worker_idx is not None:
            self._cell.report_applied(self.worker_idx, None)

    def _tell_context(self, binding: _Binding, *, connecting: bool = False) -> None:
        context = self.context
        if isinstance(context, Collector) and not context._weight_sync_schemes:
            if self._model_id in (None, "policy"):
                context._set_received_policy_version(self._applied)
        elif isinstance(context, BaseCollector) or (
            # An inference server has the initial weights in its model, and counts what it is
            # handed as updates; sub-collectors need the initial ones handed on too.
            isinstance(context, _TakesWeights) and not connecting
        ):
            context.update_policy_weights_(
                model_id=self._model_id or "policy",
                policy_or_weights=nested(binding.targets.as_dict()),
            )

    def receive(self, timeout: float | None = None) -> TensorDictBase | None:
        """Apply the newest version now, whatever `pull` says.

        Args:
            timeout: Seconds to wait for a version that is not applied yet. None looks once.

        Returns:
            The applied weights, or None if there was nothing new.
        """
        if not self._initialized_on_receiver:
            raise RuntimeError("Must be initialized on receiver before receiving weights")
        if not self.synchronized_on_receiver:
            raise RuntimeError("Must be synchronized on receiver before receiving weights")
        deadline = time.monotonic() + (timeout or 0.0)
        while not self.pull():
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_SECONDS)
        assert self._binding is not None, "a pull binds the model"
        return nested(self._binding.targets.as_dict())

    # Both

    @property
    def weights(self) -> TensorDictBase | None:
        """The newest published weights: this worker's, the first worker's on the sender.

        The model's if the scheme is shut down.
        """
        if self._transport is not None and self._transport.unique_cells:
            return nested((self._cell or self._transport.unique_cells[0]).read()[1])
        return WeightSyncScheme.weights.fget(self)

    def create_transport(self, **kwargs: Any) -> UniLabShmTransport:
        """Return the transport that sender and receivers share."""
        return self._require_transport()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        for name in ("_given", "_source", "_sent", "_cell", "_binding"):
            state[name] = None
        state["_applied"] = -1
        state["_worker_idx"] = None
        return state

    def shutdown(self) -> None:
        """Close the shared memory, which its sender creates. Idempotent.

        Workers keep the weights they have. A copy, or a receiver, only forgets the memory, which
        others of its process may use.
        """
        transport = self.__dict__.get("_transport")
        if transport is not None:
            if self._initialized_on_sender:
                transport.close()
            self._transport = None
            self._shared_transport = None
            self._clear_local()


@runtime_checkable
class _TakesWeights(Protocol):
    """A context that applies weights to what it holds."""

    def update_policy_weights_(self, *args: Any, **kwargs: Any) -> None:
        """Apply weights."""


@runtime_checkable
class _GivesModels(Protocol):
    """A context that finds its models itself."""

    def get_model(self, model_id: str) -> nn.Module:
        """Return the model of that name."""
        ...


class _Binding:
    """A worker's model, matched with the cell that its weights come from.

    Args:
        cell: Where weights come from.
        model: Where they go; gets private tensors.

    Raises:
        LayoutError: The model's keys, shapes or dtypes are not those of the cell.
    """

    def __init__(self, cell: SnapshotCell, model: nn.Module) -> None:
        self.cell = cell
        self.targets = ModuleTensors(model)
        index = {key: i for i, key in enumerate(cell.layout.keys)}
        self._extra = {key: i for key, i in index.items() if EXTRA_STATE in key}
        if set(self.targets.registered) != index.keys() - self._extra.keys():
            raise LayoutKeyError(
                f"cannot apply published weights: the model has keys "
                f"{sorted(self.targets.registered)} (expected {sorted(index)}). "
                "Use the same architecture on sender and worker."
            )
        self._fields = [index[key] for key in self.targets.registered]
        layout = cell.layout
        layout.check_fields(self._fields, self.targets.current_registered())
        self.targets.make_private()

    def apply(self, transport: UniLabShmTransport) -> int:
        """Copy the newest version into the model and return it."""
        version, values = self.cell.stage()
        targets = self.targets.current_registered()
        device = targets[0].device if targets else torch.device("cpu")
        with torch.no_grad():
            if device.type == "cpu":
                if targets:
                    torch._foreach_copy_(targets, [values[i] for i in self._fields])
            else:
                packer = transport.packer(self.cell, device)
                packer.scatter(self.cell.staging, targets, self._fields)
        if self._extra:
            self.targets.set_extra_state({key: values[i] for key, i in self._extra.items()})
        return version


def _refuse(given: Mapping[str, Any], reason: str) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} cannot be provided if {reason} is provided")


def _checked_params_map(params_map: Any) -> Mapping[int, Weights]:
    if (
        not isinstance(params_map, dict)
        or not all(isinstance(k, int) for k in params_map)
        or not all(isinstance(v, TensorDictBase) for v in params_map.values())
    ):
        raise ValueError("params_map must be a dict[int, TensorDictBase]")
    return params_map


def _num_workers(context: Any) -> int:
    devices = context.policy_device
    return len(devices) if isinstance(devices, (list, tuple)) else 1


def _model_of_context(context: Any, model_id: str) -> Any:
    """Return a collector's model by id or attribute path, or None for factories."""
    model = _resolve_model(context, model_id)
    if model is None and model_id == "policy":
        # A policy given beside a factory serves as the source of weights only.
        model = context.__dict__.get("_fallback_policy")
    return model


def _tensors_of(model: nn.Module, known: ModuleTensors | None) -> ModuleTensors:
    """Return `known` if it still tells a model's tensors, else look them up."""
    if known is not None and known.module is model and known.is_current():
        return known
    return ModuleTensors(model)


def _module(model: Any, model_id: str) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"UniLabShmScheme requires an nn.Module for {model_id!r}, got {type(model)}. "
            "Policies without weights (e.g. RandomPolicy) need no weight synchronization."
        )
    return model
