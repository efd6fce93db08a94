"""The mailbox of a Ray cluster: it holds the newest weights, and the reports of the nodes.

The mailbox is an actor on the learner's machine. The learner posts versions and does not wait. It
also posts the newest version again twice a second, because a restarted mailbox is empty. Each node
polls by one call at a time, which returns when there is a newer version, or after a timeout. So the
mailbox keeps no list of nodes: nodes may stop, be lost or be added at any time. The weights are in
Ray's object store: a machine fetches each version once, however many of its nodes take it.

Imports no torch, so that a mailbox that was lost restarts in a second and takes little memory.
"""

from __future__ import annotations

import asyncio
from typing import Any

from torchrl_unilab.errors import ConfigError

_PENDING = 8  # posts that may wait for a mailbox that is stopped: each keeps its weights alive

Reports = dict[int, dict[int, int | None]]
"""Node to the version that each of its workers acts with, or None."""


class Mailbox:
    """Holds the newest version for nodes that poll. An asynchronous Ray actor.

    It has the reference to the weights in a list, so that Ray does not resolve it in a call.
    """

    def __init__(self) -> None:
        self._version = -1  # below any version that a node polls for
        self._weights: list[Any] = []
        self._posted = asyncio.Condition()
        self._reports: Reports = {}

    async def post(self, version: int, weights: list[Any]) -> None:
        """Keep a version if it is newer, and wake the nodes."""
        async with self._posted:
            if version > self._version:
                self._version, self._weights = version, weights
                self._posted.notify_all()

    async def poll(
        self, after: int, seconds: float, node: int | None, applied: dict[int, int | None]
    ) -> list[Any] | None:
        """Return the newest weights once they are above version `after`; None after `seconds`.

        Args:
            after: The version that the node has.
            seconds: How long to wait.
            node: The node, whose report replaces its last; None if it has nothing to report.
            applied: Its report.
        """
        if node is not None:
            self._reports[node] = applied
        async with self._posted:
            try:
                newer = self._posted.wait_for(lambda: self._version > after)
                await asyncio.wait_for(newer, seconds)
            except TimeoutError:
                return None
            return self._weights

    async def reports(self) -> Reports:
        """Return what each node reported last."""
        return self._reports


def load_ray() -> Any:
    """Import Ray on first use, and return it.

    Raises:
        ConfigError: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "Ray: not installed (expected for collectors on other machines). "
            "pip install 'torchrl-unilab[ray]'."
        ) from error
    return ray


def session() -> tuple[str, str] | None:
    """Return ids of the Ray node and job that this process is connected to; None without any."""
    ray = load_ray()
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()  # each cluster counts its jobs from 1


def open_mailbox(name: str) -> Any:
    """Return a new mailbox on this machine, which ends with its learner."""
    ray = load_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(Mailbox).options(
        name=name,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,  # a call that comes twice does no harm
        max_pending_calls=_PENDING,
        scheduling_strategy=here,
    )
    return actor.remote()
