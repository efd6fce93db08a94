"""`UniLabRayScheme`: the learner's side of weight sync with collectors on other machines.

The learner puts each version into Ray's object store and posts it to one mailbox; nodes take it
from there (`torchrl_unilab.distributed.node`) and publish it to their workers by a seqlock each.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
import weakref
from collections.abc import Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import nn
from torchrl.weight_update import WeightSyncScheme
from torchrl.weight_update.weight_sync_schemes import register_weight_sync_backend

from torchrl_unilab.checks import as_instance, as_integer
from torchrl_unilab.distributed.mailbox import Reports, load_ray, open_mailbox, session
from torchrl_unilab.distributed.node import (
    POLL_SECONDS,
    NodeScheme,
    StoredWeights,
    check_collector_class,
)
from torchrl_unilab.errors import ConfigError, UsageError, WaitTimeoutError
from torchrl_unilab.runtime.trace import span
from torchrl_unilab.shm import BlockLayout
from torchrl_unilab.shm.seqlock import DEFAULT_SLOTS
from torchrl_unilab.waits import poll_while
from torchrl_unilab.weight_update.module_weights import ModuleWeights, Weights, named_tensors
from torchrl_unilab.weight_update.scheme import PullAt

_ANSWER_SECONDS = 2.0  # to wait for the mailbox's answer
_FOLLOW_SECONDS = 10.0  # to wait until all collectors poll the mailbox


class UniLabRayScheme(WeightSyncScheme):
    """Publishes a policy's weights to the nodes of a Ray cluster, without waiting for any.

    `send` makes one copy into the object store and one call without waiting for the reply, whatever
    the number of nodes and workers, and whether they are alive, stopped or lost. A machine fetches
    a version once; the workers of its nodes pull it as with `UniLabShmScheme`. Version numbers are
    the learner's everywhere: in ``("next", "policy_version")``, and in what workers apply.

    Pass this scheme to `RayCollector`, and its `node` to the collectors that `RayCollector`
    creates: a collector that Ray has restarted then begins with the newest version.

    Args:
        policy: The policy to publish, where `RayCollector` is given a ``policy_factory`` and no
            policy. Ray cannot restart a collector whose policy takes more than 100 KB, because it
            keeps no argument of that size. A factory is small.
        first_version: Version of the initial weights, so that versions continue where those of a
            resumed run ended.

    Attributes:
        version: The newest published version; `first_version` is the initial weights.
        skipped: Versions that were not posted at once, because the mailbox did not answer in time.
            The newest is posted when it answers.

    Raises:
        ConfigError: Ray is not installed, `first_version` is below 0, or `policy` is no module.

    Examples:
        >>> from torchrl_unilab.distributed import UniLabRayScheme
        >>> scheme = UniLabRayScheme()
        >>> settings = {
        ...     "weight_sync_schemes": {"policy": scheme},
        ...     "collector_kwargs": {"weight_sync_schemes": {"policy": scheme.node(pull="step")}},
        ... }  # of RayCollector(..., collector_class=APPOCollector, **settings)
        >>> scheme.version
        0
    """

    def __init__(self, policy: nn.Module | None = None, *, first_version: int = 0) -> None:
        load_ray()
        if policy is not None:
            remedy = "Give what the policy_factory makes."
            as_instance("UniLabRayScheme policy", policy, nn.Module, remedy)
        super().__init__()
        self.version = as_integer("first_version", first_version, "Use 0.", least=0)
        self.skipped, self._policy = 0, policy
        self._posted: tuple[int, list[Any]] = -1, []  # the newest version, and its weights
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._sending = threading.Lock()
        self._last_reports: Reports = {}
        self._name = f"unilab-mailbox-{uuid.uuid4().hex}"
        self._mailbox: Any = None
        self._session: tuple[str, str] | None = None
        self._nodes = 0

    def node(self, *, pull: PullAt = "rollout", slots: int = DEFAULT_SLOTS) -> NodeScheme:
        """Return the scheme for the collectors on the nodes; arguments as `UniLabShmScheme`."""
        return NodeScheme(self._name, pull=pull, slots=slots)

    # Sender

    def init_on_sender(self, *args: Any, **kwargs: Any) -> None:
        """Serve a `RayCollector`.

        Raises:
            UsageError: The scheme has served a collector before.
            ConfigError: No `RayCollector` calls, or it has no policy, or no workers.
        """
        if self.initialized_on_sender:  # before TorchRL's own, which a refusal resets
            raise UsageError(
                "weight_sync_schemes: a UniLabRayScheme that has a collector (expected a new one, "
                "as a scheme serves one collector). Give each its own."
            )
        super().init_on_sender(*args, **kwargs)

    def _init_on_sender_impl(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        model: nn.Module | None = None,
        remote_collectors: Sequence[Any] | None = None,
        **_: Any,
    ) -> None:
        """Open the mailbox, with the model's weights: the nodes' collectors wait for it."""
        model = model if self._policy is None else self._policy
        if remote_collectors is None or model is None:
            raise ConfigError(
                "UniLabRayScheme: a collector without remote collectors, or without a policy "
                "(expected a RayCollector with one). Use UniLabShmScheme on one machine; beside a "
                "policy_factory make UniLabRayScheme(policy)."
            )
        if context is not None:  # a RayCollector, whose collectors would fail in their own words
            check_collector_class(context.collector_class)
            self.context = context
        self.model_id, self.model = model_id, model
        self._nodes = len(remote_collectors)
        tensors = named_tensors(model)
        self._layout = BlockLayout.of(tensors)
        self._optional = ModuleWeights(model).optional
        self._mailbox = open_mailbox(self._name)
        self._session = session()
        self._post(self._mailbox, tensors, self.version)
        self._thread = threading.Thread(
            target=_post_again, args=(weakref.ref(self), self._ended), name="mailbox", daemon=True
        )
        self._thread.start()

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any | None = None
    ) -> None:
        """Check that all collectors follow the mailbox; publish `weights` if given.

        Raises:
            ConfigError: Collectors have another scheme.
        """

        def find_silent() -> set[int]:
            return {*range(self._nodes)} - self._reports().keys()

        # Each polls once it has begun.
        if silent := poll_while(find_silent, _FOLLOW_SECONDS, POLL_SECONDS / 10):
            raise ConfigError(
                f"collectors {sorted(silent)}: they do not follow the mailbox (expected all to). "
                "Give RayCollector collector_kwargs={'weight_sync_schemes': "
                "{'policy': scheme.node()}}, of this scheme; if it has that, they may still be "
                "starting."
            )
        if weights is not None:
            self.send(weights)

    def send(self, weights: Weights | None = None, worker_ids: Any = None) -> None:
        """Post weights under the next version and return, without waiting for any node.

        Args:
            weights: A module, TensorDict or state dict; the policy if not given.
            worker_ids: Accepted, as `RayCollector` gives it: all nodes get them.

        Raises:
            UsageError: The scheme has no collector yet, or is shut down, or Ray is.
            ConfigError: `weights` are no weights.
            LayoutError: Keys, shapes or dtypes differ from the policy's; nothing was posted.
        """
        mailbox = self._checked_mailbox()
        with span("publish"):
            tensors = named_tensors(self.model if weights is None else weights)
            if absent := self._optional - tensors.keys():  # RayCollector leaves out extra state
                own = named_tensors(self.model)
                tensors |= {key: own[key] for key in absent}
            with self._sending:  # any thread may: each takes a number of its own
                self._post(mailbox, tensors, self.version + 1)

    def _post(self, mailbox: Any, tensors: dict[str, torch.Tensor], version: int) -> None:
        """Post tensors as a version."""
        ray, layout = load_ray(), self._layout
        ordered = layout.select(tensors)
        block = torch.empty(layout.nbytes, dtype=torch.uint8)
        with torch.no_grad():
            torch._foreach_copy_(layout.views(block), ordered)
        stored = ray.put(StoredWeights(version, layout, block.numpy()))
        self.version = version  # counts before it is posted: a version is never used twice
        self._posted = version, [stored]
        try:
            mailbox.post.remote(*self._posted)
        except ray.exceptions.PendingCallsLimitExceeded:
            self.skipped += 1

    def _repost(self) -> None:
        """Post the newest version again; the mailbox may be stopped, or being restarted."""
        if session() == self._session:
            with contextlib.suppress(load_ray().exceptions.RayError):
                self._mailbox.post.remote(*self._posted)

    def _checked_mailbox(self) -> Any:
        """Return the mailbox; refuse one that is gone, as a call to it would start Ray anew."""
        mailbox = self._mailbox  # another thread may shut the scheme down from here on
        if mailbox is None:
            raise UsageError(
                "UniLabRayScheme: no mailbox (expected one: RayCollector makes it at its start, "
                "and its shutdown, at the end of its loop, ends it). Use the scheme between."
            )
        if (found := session()) != self._session:
            raise UsageError(
                f"Ray: {'not running' if found is None else 'started again'} (expected the one "
                "that the scheme's mailbox is in). Make the collector and its scheme again."
            )
        return mailbox

    # What the nodes report

    @property
    def applied_versions(self) -> dict[tuple[int, int], int | None]:
        """For each (node, worker), the version that it acts with, as last reported.

        Nodes report at least twice a second. None before a worker has applied one.
        """
        reports = self._reports()
        return {(node, w): v for node in sorted(reports) for w, v in reports[node].items()}

    @property
    def lag(self) -> dict[tuple[int, int], int | None]:
        """For each (node, worker), how many versions it is behind; None before its first."""
        newest = self.version
        return {k: None if v is None else newest - v for k, v in self.applied_versions.items()}

    def wait_applied(self, version: int | None = None, timeout: float = 10.0) -> None:
        """Wait until all workers of all nodes act with a version, or a newer one.

        Args:
            version: The newest if not given.
            timeout: Seconds to wait.

        Raises:
            WaitTimeoutError: Workers are still behind; names them.
            ConfigError: `version` is no number of one, or there is no `timeout`, which would wait
                for a dead worker without end.
        """
        wanted = self.version if version is None else version
        as_integer("version", wanted, "Take `scheme.version`.", least=0)
        as_instance("timeout", timeout, Real, "Use 10.0, for example.")
        if behind := poll_while(partial(self._behind, wanted), timeout, POLL_SECONDS / 10):
            raise WaitTimeoutError(
                f"workers behind after {timeout:g} s: {behind} (expected version {wanted}). "
                "Check that they are collecting, and that Ray's nodes are alive."
            )

    def _behind(self, wanted: int) -> list[str]:
        """Return which workers have yet to apply a version, in words."""
        reports = self._reports()
        silent = [f"node {node} has not reported" for node in {*range(self._nodes)} - {*reports}]
        return silent + [
            f"node {node} worker {worker} at {version}"
            for node, found in sorted(reports.items())
            for worker, version in found.items()
            if version is None or version < wanted
        ]

    def _reports(self) -> Reports:
        """Return what nodes reported; the last reports known if the mailbox does not answer."""
        mailbox, ray = self._checked_mailbox(), load_ray()
        try:
            reports: Reports = ray.get(mailbox.reports.remote(), timeout=_ANSWER_SECONDS)
        except ray.exceptions.RayError:  # it is stopped, or being started again
            return self._last_reports
        self._last_reports = self._last_reports | reports
        return self._last_reports

    # Receiver: `RayCollector` registers the scheme with its collectors, which follow by `node`.

    def _init_on_receiver_impl(self, **_: Any) -> None:
        """Do nothing."""

    def _setup_connection_and_weights_on_receiver_impl(self, **_: Any) -> None:
        """Do nothing."""

    # Both

    def create_transport(self, **_: Any) -> Any:
        """Refuse: the mailbox is no transport of TorchRL's."""
        raise NotImplementedError(
            "create_transport: UniLabRayScheme has a mailbox in place of transports (expected "
            "`send` and `receive`). Call these."
        )

    def __getstate__(self) -> dict[str, Any]:
        own = ("_mailbox", "_policy", "_posted", "_thread", "_ended", "_sending")
        return {**super().__getstate__(), **dict.fromkeys(own)}

    def shutdown(self) -> None:
        """End the mailbox. Idempotent; a copy on a node ends nothing."""
        mailbox = self.__dict__.get("_mailbox")
        if mailbox is not None:
            self._ended.set()
            if self._thread not in (None, threading.current_thread()):  # `__del__` may run there
                self._thread.join()
            self._mailbox = None
            if session() == self._session:  # else it ended with its Ray cluster
                load_ray().kill(mailbox)


def _post_again(scheme: weakref.ref[UniLabRayScheme], ended: threading.Event) -> None:
    """Post the newest version now and then, until the end: a restarted mailbox has none."""
    while not ended.wait(POLL_SECONDS) and (living := scheme()) is not None:
        living._repost()
        del living  # the last reference to a scheme ends its mailbox


# As a decorator it would hide the type from editors, which would see a `WeightSyncScheme`.
register_weight_sync_backend("unilab_ray")(UniLabRayScheme)
