"""`NodeScheme`: what a node's collector publishes to its workers comes from the mailbox.

To its collector it is a `UniLabShmScheme`. It starts from the newest version that the mailbox has,
so a collector that is started again, on whichever machine, acts with that from its first step.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchrl.collectors import Collector

from torchrl_unilab.distributed.mailbox import load_ray
from torchrl_unilab.errors import ConfigError, WaitTimeoutError
from torchrl_unilab.shm import BlockLayout
from torchrl_unilab.shm.seqlock import DEFAULT_SLOTS
from torchrl_unilab.waits import deadline
from torchrl_unilab.weight_update import UniLabShmScheme
from torchrl_unilab.weight_update.initial_weights import InitialWeights
from torchrl_unilab.weight_update.module_weights import named_tensors
from torchrl_unilab.weight_update.scheme import PullAt

FIRST_SECONDS = 60.0
POLL_SECONDS = 0.5
SOON_SECONDS = 0.02
"""Seconds that a poll waits at most, and after a new version: workers may report that soon."""
_GRACE_SECONDS = 2.0  # that the answer to a poll may take beyond the poll's own wait
_END_SECONDS = 5.0  # to wait for the thread: as Ray ends, a call of it may never return


@dataclass(frozen=True)
class StoredWeights:
    """Weights as the object store has them.

    Attributes:
        version: Their number.
        layout: Where in the block each tensor is.
        block: uint8 [layout.nbytes].
    """

    version: int
    layout: BlockLayout
    block: npt.NDArray[np.uint8]


def check_collector_class(kind: type) -> None:
    """Refuse collectors without workers; a ConfigError."""
    if issubclass(kind, Collector):
        raise ConfigError(
            f"collector_class: {kind.__name__} (expected one with workers, which pull). Give "
            "RayCollector APPOCollector or MultiAsyncCollector."
        )


class NodeScheme(UniLabShmScheme):
    """Publishes the mailbox's versions, under their own numbers, to the workers of one node.

    `UniLabRayScheme.node` makes it, for the ``collector_kwargs`` of a `RayCollector`.

    Args:
        mailbox: The mailbox's name.
        pull: When a worker looks for a new version, as in `UniLabShmScheme`.
        slots: How many snapshots rotate, at least 2.
    """

    def __init__(
        self, mailbox: str, *, pull: PullAt = "rollout", slots: int = DEFAULT_SLOTS
    ) -> None:
        super().__init__(pull=pull, slots=slots)
        self._mailbox = mailbox
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._actor: Any = None

    def _initial_weights(self, **source: Any) -> InitialWeights:
        """Return the newest weights of the mailbox, for workers of the collector's policy.

        Raises:
            WaitTimeoutError: There are no weights in time.
            LayoutError: The weights are not of the collector's policy.
        """
        check_collector_class(type(source.get("context")))
        initial = super()._initial_weights(**source)
        if initial.per_worker:
            raise ConfigError(
                "weights of a node's workers: separate ones (expected one set, as the learner "
                "sends one). Give the collectors one policy."
            )
        snapshot = self._wait_for_first()
        for weights in initial.of_workers.values():
            snapshot.layout.select(named_tensors(weights))
        self.first_version = snapshot.version
        return replace(initial, of_workers=dict.fromkeys(initial.of_workers, _named(snapshot)))

    def _wait_for_first(self) -> StoredWeights:
        """Return the newest version, once the learner has opened the mailbox and posted one.

        Fetching a posted version has no time limit.
        """
        ray, end = load_ray(), deadline(FIRST_SECONDS)
        cause: Exception | None = None
        while time.monotonic() < end:
            try:
                self._actor = ray.get_actor(self._mailbox)
                if snapshot := self._poll(-1, POLL_SECONDS, None, {}):
                    return snapshot
            except (ValueError, ray.exceptions.RayError) as error:  # the former: no such actor
                cause = error
                time.sleep(SOON_SECONDS)
        raise WaitTimeoutError(
            f"mailbox {self._mailbox!r}: no weights within {FIRST_SECONDS:g} s (expected the "
            "learner's). Check that the learner is alive, and give RayCollector "
            "weight_sync_schemes={'policy': scheme}, the scheme whose node() its collectors have."
        ) from cause

    def send(self, *_: Any, **__: Any) -> None:
        """Refuse: it would publish the node's own weights under the learner's next version.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "node scheme: asked to send (expected to follow the mailbox alone). Publish by the "
            "learner's scheme, without update_at_each_batch on the nodes."
        )

    def _setup_connection_and_weights_on_sender_impl(self, **_: Any) -> None:
        """Follow the mailbox from now on."""
        assert self.context is not None, "a collector connects its scheme"
        node = self.context.worker_idx
        self._thread = threading.Thread(
            target=self._follow, args=(node,), name="mailbox", daemon=True
        )
        self._thread.start()

    def _follow(self, node: int) -> None:
        """Publish each posted version until the end, even if the mailbox is gone for a while."""
        transport = self._require_transport()
        errors = load_ray().exceptions
        seconds = SOON_SECONDS
        while not self._ended.is_set():
            try:
                snapshot = self._poll(transport.version, seconds, node, self.applied_versions)
            except errors.RayError:  # the mailbox, or the learner's machine, is gone
                self._ended.wait(POLL_SECONDS)
                continue
            if snapshot is not None and not self._ended.is_set():
                transport.send_weights(_named(snapshot), version=snapshot.version)
            seconds = min(2.0 * seconds, POLL_SECONDS) if snapshot is None else SOON_SECONDS

    def _poll(
        self, after: int, seconds: float, node: int | None, applied: dict[int, int | None]
    ) -> StoredWeights | None:
        """Return the weights that `Mailbox.poll` refers to; None if there are none.

        Also None once the scheme has ended.

        Raises:
            RayError: The mailbox does not answer, or the weights are lost.
        """
        ray = load_ray()
        answer = self._actor.poll.remote(after, seconds, node, applied)
        posted: list[Any] | None = ray.get(answer, timeout=seconds + _GRACE_SECONDS)
        if posted is None:
            return None
        # No `get` with a timeout: it would drop what a slow link has brought so far. If the learner
        # is lost, so are the weights, and the wait ends.
        while not ray.wait(posted, timeout=POLL_SECONDS)[0]:
            if self._ended.is_set():
                return None
        weights: StoredWeights = ray.get(posted[0])
        return weights

    def disconnect(self) -> None:
        """End the thread that follows the mailbox. Idempotent."""
        if (thread := self._thread) is not None:
            self._ended.set()
            if thread is not threading.current_thread():  # the collector may be collected there
                thread.join(_END_SECONDS)
            self._thread = None

    def shutdown(self) -> None:
        """Disconnect, then do as `UniLabShmScheme.shutdown`. Idempotent."""
        if "_thread" in self.__dict__:  # absent if the arguments were refused
            self.disconnect()
        super().shutdown()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_thread": None, "_ended": None, "_actor": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._ended = threading.Event()


def _named(snapshot: StoredWeights) -> dict[str, torch.Tensor]:
    """Return a copy of the tensors by dotted key: the store's memory is read-only."""
    return snapshot.layout.named_views(torch.from_numpy(snapshot.block.copy()))
