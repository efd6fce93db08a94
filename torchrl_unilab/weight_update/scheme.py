"""`UniLabShmScheme`: a TorchRL weight-sync scheme whose sender never waits.

This is TorchRL's surface, and the sender. After ``init_on_receiver`` a scheme pulls the weights
through a `WeightReceiver`. TorchRL's collectors call both initialisations, each in its process.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any, Literal, Self, get_args

from tensordict import TensorDictBase
from torch import nn
from torchrl.collectors import BaseCollector, Collector
from torchrl.weight_update import WeightSyncScheme
from torchrl.weight_update.utils import _resolve_model
from torchrl.weight_update.weight_sync_schemes import register_weight_sync_backend

from torchrl_unilab.checks import as_choice, as_indices, as_integer
from torchrl_unilab.errors import ConfigError, UsageError
from torchrl_unilab.runtime.trace import span
from torchrl_unilab.shm.seqlock import DEFAULT_SLOTS, SnapshotCell
from torchrl_unilab.waits import poll_while
from torchrl_unilab.weight_update.initial_weights import (
    NO_MODEL_ID,
    InitialWeights,
    checked_module,
    find_model,
    initial_weights,
)
from torchrl_unilab.weight_update.module_weights import Weights, nested
from torchrl_unilab.weight_update.receiver import (
    AcceptsWeights,
    ProvidesModels,
    WeightReceiver,
    pull_in_rollouts,
)
from torchrl_unilab.weight_update.transport import UniLabShmTransport, WorkerIds
from torchrl_unilab.weight_update.versions import POLL_SECONDS, WorkerVersions

_TOO_EARLY = "{0}: before {1} (expected it first). Give the scheme to a collector, or call {1}."

PullAt = Literal["rollout", "step", "manual"]


class UniLabShmScheme(WorkerVersions, WeightSyncScheme):
    """Publishes a policy's weights in shared memory; workers pull them as they act.

    ``send()`` copies the weights into the next slot of a versioned seqlock and returns. It does not
    depend on any worker being alive, awake or reading. A worker pulls in the thread that acts, so
    **a rollout that starts after** ``send()`` **returned acts with that version or a newer one,
    whole**. Workers own their weights, which change only by publishing. A tensor that a module
    keeps outside its parameters, buffers and extra state is not published. A drop-in for TorchRL's
    `SharedMemWeightSyncScheme`.

    Args:
        strategy: ``"tensordict"`` or ``"state_dict"``, as in TorchRL. Both publish the same
            snapshot; kept so that either works unchanged.
        sync: Accepted for drop-in use, without effect: there is no acknowledgement to wait for.
            `wait_applied` waits for workers.
        per_worker_weights: Publish separate weights to each worker. Set automatically for distinct
            policy factories.
        pull: When a worker looks for a new version: at the start of each ``"rollout"``, before each
            policy call (``"step"``), or only on `receive` (``"manual"``).
        slots: How many snapshots rotate, at least 2.
        first_version: Version of the initial weights, so that versions continue where those of a
            resumed run ended.

    Raises:
        ConfigError: `pull`, `slots` or `first_version` is not one of the above.

    Examples:
        >>> from functools import partial
        >>> from torchrl.collectors import MultiSyncCollector
        >>> from torchrl_unilab.envs import MujocoBatchEnv
        >>> from torchrl_unilab.modules import make_actor
        >>> from torchrl_unilab.weight_update import UniLabShmScheme
        >>> scheme = UniLabShmScheme()
        >>> collector = MultiSyncCollector(
        ...     [partial(MujocoBatchEnv, "Hopper-v5", 2, num_threads=1)] * 2,
        ...     make_actor(11, 3),
        ...     frames_per_batch=8,
        ...     total_frames=-1,
        ...     weight_sync_schemes={"policy": scheme},
        ... )
        >>> collector.update_policy_weights_()
        >>> scheme.version
        1
        >>> collector.shutdown()
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
        self.sync, self.per_worker_weights = sync, per_worker_weights
        remedy = "Leave it out to pull at the start of each rollout."
        self.pull_at: PullAt = as_choice("pull", pull, get_args(PullAt), remedy)
        self.slots = as_integer("slots", slots, "Leave it out for 3.", least=2)
        self.first_version = as_integer("first_version", first_version, "Use 0.", least=0)
        self._clear_local()

    def _clear_local(self) -> None:
        """Reset the attributes that are not sent to other processes."""
        self._initial_model: nn.Module | None = None  # sender: the model, if there is no context
        self._receiver: WeightReceiver | None = None

    # Sender

    def _init_on_sender_impl(
        self, *, model_id: str | None = None, context: Any = None, **source: Any
    ) -> None:
        """Create the cells, with what `initial_weights` finds as the first version."""
        initial = self._initial_weights(model_id=model_id, context=context, **source)
        self.per_worker_weights = initial.per_worker
        self._initial_model = initial.model
        self._shared_transport = UniLabShmTransport(
            initial.of_workers,
            slots=self.slots,
            first_version=self.first_version,
            casts=initial.casts,
        )
        self.model_id = model_id
        if context is not None:
            self.context = context

    def _initial_weights(self, **source: Any) -> InitialWeights:
        """Return what the cells start from."""
        return initial_weights(self.per_worker_weights, **source)

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any | None = None
    ) -> None:
        """Publish `weights` if given; the initial weights are in place already."""
        transport = self._require_transport()
        if weights is not None:
            transport.send_weights(weights)
        if isinstance(context := self.context, Collector):
            self._apply_here(transport.cell(0), context, own=weights is None)

    def _apply_here(self, cell: SnapshotCell, context: Collector, *, own: bool) -> None:
        """Apply the newest version to the policy of a collector in this process; `own`: it is."""
        if own:
            cell.become_reader(0, cell.version)
        else:
            receiver = WeightReceiver(cell, 0, private=False)
            receiver.pull(find_model(context, self.model_id))

    def send(
        self,
        weights: Weights | Mapping[int, Weights] | str | None = None,
        worker_ids: WorkerIds = None,
    ) -> None:
        """Publish weights and return, without waiting.

        TorchRL's `prepare_weights` runs only where a subclass overrides it.

        Args:
            weights: A module, TensorDict, (flattened) state dict, the name of a model in the
                context, or worker index -> weights for ``per_worker_weights``. The scheme's model
                if not given.
            worker_ids: With ``per_worker_weights``, which workers get them. Workers that share
                weights share what is published, as with the stock scheme.

        Raises:
            UsageError: Not initialised and connected on the sender, or shut down.
            ConfigError: Unknown worker, per-worker weights for shared ones, or no model.
            LayoutError: Keys, shapes or dtypes differ from the initial weights; nothing was
                published.
            SegmentError: Another living process publishes for this scheme.
        """
        if not self.synchronized_on_sender:
            first = "connect" if self.initialized_on_sender else "init_on_sender"
            raise UsageError(_TOO_EARLY.format("send", first))
        transport = self._shared_transport or self._require_transport()
        with span("publish"):
            own = weights is None
            weights = self._resolve_weights(weights)
            if (
                isinstance(weights, dict)
                and weights
                and all(isinstance(k, Integral) for k in weights)
            ):
                self._send_per_worker(transport, weights, worker_ids)
            else:
                transport.send_weights(weights, worker_ids)
            if isinstance(context := self.context, Collector):  # its policy acts in this process
                self._apply_here(transport.cell(0), context, own=own)

    def _resolve_weights(self, weights: Any) -> Any:
        """Return the weights that an argument of `send` stands for.

        The context's model is looked up each time, as the context may have replaced it.
        """
        context = self.context
        if type(self).prepare_weights is not WeightSyncScheme.prepare_weights:
            return self.prepare_weights(weights, self.model_id, self.strategy, context)
        if not (weights is None or isinstance(weights, str)):
            return weights
        if weights is None and self._initial_model is not None:
            return self._initial_model
        if context is None and self._context_ref is not None:
            raise UsageError(
                "cannot publish weights: the scheme's collector is gone (expected the one that it "
                "was given to). Give each collector a scheme of its own."
            )
        if context is None and weights is not None:
            raise ConfigError(
                f"cannot publish the model {weights!r}: the scheme has no collector (expected "
                "the one that holds it). Pass the model itself."
            )
        name, model = self.model_id if weights is None else weights, None
        if context is not None and name is not None:
            model = _resolve_model(context, name)
            if model is None and weights is None:  # a policy factory, and perhaps a policy, too
                model = find_model(context, name)
        if model is None:
            raise ConfigError(
                "cannot publish weights: none given and the sender holds no model "
                "(expected one of them). Pass the weights, or give the collector a policy: "
                "update_at_each_batch needs one."
            )
        return model

    def _send_per_worker(
        self, transport: UniLabShmTransport, weights: Mapping[int, Weights], worker_ids: WorkerIds
    ) -> None:
        if not self.per_worker_weights:
            raise ConfigError(
                f"cannot publish weights per worker: given for workers {sorted(weights)} "
                "(expected one set, as the workers share it). Use per_worker_weights=True."
            )
        ids = [*weights] if worker_ids is None else as_indices("worker_ids", worker_ids)
        if missing := [i for i in ids if i not in weights]:
            raise ConfigError(
                f"cannot publish weights per worker: none for workers {missing} (expected some for "
                f"all of {ids}). Pass theirs, too, or leave these workers out."
            )
        transport.send_each({transport.cell(i): weights[i] for i in ids})

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
                raise ConfigError(NO_MODEL_ID)
            if isinstance(context, ProvidesModels):
                model = context.get_model(model_id)
            elif model is None:
                model = _resolve_model(context, model_id)
            if worker_idx is None:
                worker_idx = getattr(context, "worker_idx", None)
        self.model_id, self.worker_idx = model_id, worker_idx
        if model is not None:
            self.model = model
        if context is not None:  # else the one that there is stays: an inference server's
            self.context = context

    def _setup_connection_and_weights_on_receiver_impl(
        self, *, worker_idx: int | None = None
    ) -> None:
        """Give the model private tensors and the newest weights."""
        worker_idx = self.worker_idx if worker_idx is None else worker_idx
        if worker_idx is None:
            raise UsageError(
                "cannot connect the receiver: no worker_idx (expected one at init_on_receiver "
                "or connect). Pass worker_idx to one of these."
            )
        self.worker_idx = worker_idx
        self._receiver = WeightReceiver(self._require_transport().cell(worker_idx), worker_idx)
        self._receiver.pull(checked_module(self.model, self.model_id or "policy"))
        # Sub-collectors need the initial weights forwarded. An inference server already has them,
        # and counts each forwarded version as an update.
        if isinstance(self.context, BaseCollector):
            self._forward_weights(self._receiver)

    @WeightSyncScheme.context.setter
    def context(self, context: Any) -> None:
        """Set the collector this scheme serves; one in a worker pulls from then on."""
        WeightSyncScheme.context.fset(self, context)
        if self.initialized_on_receiver and isinstance(context, Collector):
            pull_in_rollouts(context, self)
            if self._receiver is not None:  # the scheme was connected before it got a context
                self._forward_weights(self._receiver)

    def pull(self) -> bool:
        """Apply the newest version if it is not applied yet; return whether it did.

        Raises:
            LayoutError: The model does not match the published layout.
            ContentionError: The writer overtook every bounded try; the model keeps
                its previous whole version.
        """
        receiver = self._receiver
        if receiver is None or not receiver.pull(self.model):
            return False
        self._forward_weights(receiver)
        return True

    @property
    def applied_version(self) -> int:
        """The version that this worker's model has; -1 before the first."""
        applied = None if self._receiver is None else self._receiver.applied
        return -1 if applied is None else applied

    def invalidate(self) -> None:
        """Report that the model has weights from elsewhere, until the next publish."""
        if self._receiver is not None:
            self._receiver.invalidate()

    def _forward_weights(self, receiver: WeightReceiver) -> None:
        """Tell the context the applied version, or forward the weights themselves."""
        context = self.context
        if isinstance(context, Collector) and not context._weight_sync_schemes:
            if self.model_id in (None, "policy"):
                context._set_received_policy_version(receiver.applied)
        elif isinstance(context, AcceptsWeights):
            context.update_policy_weights_(
                model_id=self.model_id or "policy", policy_or_weights=receiver.weights()
            )

    def receive(self, timeout: float | None = None) -> TensorDictBase | None:
        """Apply the newest version now, whatever `pull` says.

        Args:
            timeout: Seconds to wait for a version that is not applied yet. None looks once.

        Returns:
            The applied weights, or None if there was nothing new.
        """
        if not self.synchronized_on_receiver:
            first = "connect" if self.initialized_on_receiver else "init_on_receiver"
            raise UsageError(_TOO_EARLY.format("receive", first))
        if poll_while(lambda: not self.pull(), timeout or 0.0, POLL_SECONDS):
            return None
        assert self._receiver is not None, "a pull needs one"
        return self._receiver.weights()

    # Both

    @property
    def weights(self) -> TensorDictBase | None:
        """The newest published weights: a worker's own, on the sender the first worker's."""
        transport = self._shared_transport
        if transport is None:
            return super().weights
        worker = min(transport.cells) if self._receiver is None else self.worker_idx
        assert worker is not None
        return nested(transport.newest(worker)[1])

    def create_transport(self, **kwargs: Any) -> UniLabShmTransport:
        """Return the transport that sender and receivers share."""
        return self._require_transport()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return state | dict.fromkeys(("_initial_model", "_receiver", "_worker_idx"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def disconnect(self) -> None:
        """Do nothing: only `send` publishes here. `NodeScheme` ends its thread."""

    def shutdown(self) -> None:
        """Close the shared memory, which its sender creates. Idempotent.

        Workers keep their weights. A copy, or a receiver, only forgets the memory.
        """
        if (transport := self.__dict__.get("_shared_transport")) is not None:
            if self.initialized_on_sender:
                transport.close()
            self._shared_transport = None
            self._clear_local()


# As a decorator it would hide the type from editors, which would see a `WeightSyncScheme`.
register_weight_sync_backend("unilab_shm")(UniLabShmScheme)
