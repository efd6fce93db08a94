"""Replay batches that are ready before the learner asks for them.

A learner that takes one large batch per tick names the next tick's batch while it works on
this one's. The batch is sampled meanwhile and taken to the learner's device
(`torchrl_unilab.data.pipeline.transfer`), in two slots that change places when the learner
samples::

    tick       0            1            2
    slot 0     pack, copy   learn        pack, copy
    slot 1                  pack, copy   learn

`OffPolicyTrainer` and `PrefetchReplay` call it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from tensordict import TensorDictBase

from torchrl_unilab.checks import as_choice, as_instance, as_integer, as_seconds
from torchrl_unilab.data.pipeline.transfer import MakeTransfer, transfer_to
from torchrl_unilab.data.replay.gather import ReplaySnapshot
from torchrl_unilab.data.replay.storage import PackedReplayStorage
from torchrl_unilab.errors import ConfigError, UsageError, WaitTimeoutError
from torchrl_unilab.owner import Owner, closed_error
from torchrl_unilab.runtime.trace import span
from torchrl_unilab.runtime.worker_thread import Task, WorkerThread

SLOTS = 2
"""Batches in memory: one that the learner uses, one that is packed."""

_POLL_SECONDS = 0.0005
"""Seconds between two counts of the rows, while `min_snapshot_ptr` is waited for."""


@dataclass(frozen=True)
class ReplayTickMetadata:
    """Where a tick's batch comes from.

    Attributes:
        tick_id: The tick.
        snapshot_ptr: Rows that had been written when it was drawn.
        snapshot_size: Rows that it was drawn from.
        sample_seed: Seed of the draw.
        sample_count: Rows of the batch.
        batch_host_slot: Which host batch it was packed into.
        batch_gpu_slot: Which batch of the device it was copied to; None if it was not.

    Examples:
        >>> from torchrl_unilab.data import ReplayTickMetadata
        >>> tick = ReplayTickMetadata(3, 612, 512, sample_seed=43, sample_count=64)
        >>> tick.snapshot_size
        512
    """

    tick_id: int
    snapshot_ptr: int
    snapshot_size: int
    sample_seed: int
    sample_count: int
    batch_host_slot: int | None = None
    batch_gpu_slot: int | None = None


class DoubleBufferReplayPipeline(Owner):
    """Prepares a tick's batch in one slot while the learner uses the other.

    The rows of a tick are drawn with the seed ``base_seed + tick``: from the same rows, the same
    tick gets the same batch, no matter when and in which thread it is packed. A batch lies in the
    pipeline's memory and is valid until `after_tick`; on a device with streams, for all work that
    was queued before that call.

    Use it in one thread; only `close` may be called from any. A script that ends without closing
    the pipeline waits at most `timeout` seconds for a batch that still needs rows. If a batch
    fails, the next call that needs it raises the error, and its tick may be prepared again.

    A trace (`torchrl_unilab.runtime.trace`) shows ``replay pack`` and ``replay submit`` in the
    thread that packs, ``replay wait`` in the learner's.

    Args:
        source: Rows to sample from.
        sample_count: Rows of a batch, of every tick.
        device: The learner's device.
        base_seed: Seed of tick 0.
        packer: Where batches are packed: ``"thread"``, in a thread in parallel with the learner's,
            or ``"inline"``, in the learner's when it starts to prepare.
        timeout: Seconds to wait for `min_snapshot_ptr`.
        transfer: Makes the object that copies host batches to the device; chosen by `device` if not
            given.

    Raises:
        ConfigError: A setting cannot work.

    Attributes:
        last_metadata: Where the last batch sampled came from; None before the first.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_unilab.data import DoubleBufferReplayPipeline, PackedReplayStorage
        >>> rows = PackedReplayStorage(100)
        >>> _ = rows.append(TensorDict(reward=torch.arange(100.0), batch_size=[100]))
        >>> with DoubleBufferReplayPipeline(rows, sample_count=8) as pipeline:
        ...     for tick in range(3):
        ...         batch = pipeline.sample_large_batch(tick, 8)
        ...         started = pipeline.start_prepare(tick + 1, 8)  # while the learner learns
        ...         total = batch["reward"].sum()
        ...         pipeline.after_tick()
        >>> started, pipeline.last_metadata.sample_seed
        (True, 2)
        >>> rows.close()
    """

    def __init__(
        self,
        source: PackedReplayStorage,
        *,
        sample_count: int,
        device: torch.device | str = "cpu",
        base_seed: int = 0,
        packer: Literal["thread", "inline"] = "thread",
        timeout: float = 60.0,
        transfer: MakeTransfer | None = None,
    ) -> None:
        sample_count = as_integer("replay pipeline sample_count", sample_count, "Use 1 or more.")
        base_seed = as_integer("replay pipeline base_seed", base_seed, "Use 0.", least=0)
        timeout = as_seconds("replay pipeline timeout", timeout)
        remedy = "Pass one, of a buffer as buffer.storage."
        as_instance("replay pipeline source", source, PackedReplayStorage, remedy)
        remedy = "Use 'thread' to pack while the learner learns."
        as_choice("replay pipeline packer", packer, ("thread", "inline"), remedy)
        try:
            self._device = torch.device(str(device))  # a number would be an accelerator's
        except RuntimeError as error:
            raise ConfigError(
                f"replay pipeline: device {device!r} (expected one of torch). Use 'cpu' or 'cuda'."
            ) from error
        make_transfer = transfer or transfer_to(self._device)
        pinned = self._device.type == "cuda"
        self._source = source
        self._hosts = [source.empty_batch(sample_count, pin_memory=pinned) for _ in range(SLOTS)]
        self._transfer = make_transfer(self._hosts)
        self._thread = WorkerThread("replay-packer") if packer == "thread" else None
        self._timeout, self._process = timeout, os.getpid()
        self._closing = self._dropping = False
        self._cold_slot = 0  # where the next batch is prepared; the other slot is hot
        self._cold_tick: int | None = None  # the tick that is prepared there, if one is
        self._prepared: Task[ReplayTickMetadata]  # its packing and submission
        self._hot_tick: int | None = None  # the tick that the learner is learning from, if any
        self.sample_count = sample_count
        self.base_seed = base_seed
        self.last_metadata: ReplayTickMetadata | None = None

    @property
    def h2d_submitter(self) -> str:
        """What starts the copies to the device: ``"none"``, ``"learner"`` or ``"torch"``."""
        return self._transfer.submitter

    @property
    def transfer_manifest(self) -> dict[str, Any]:
        """How batches get to the learner, for a log.

        ``device``, ``slots``, ``blocks`` (copies per batch), ``bytes`` (per batch),
        ``pinned``, ``submitter``, ``packer``.
        """
        leaves = list(self._hosts[0].values(include_nested=True, leaves_only=True))
        blocks = {leaf.untyped_storage().data_ptr(): leaf.untyped_storage() for leaf in leaves}
        return {
            "device": str(self._device),
            "slots": SLOTS,
            "blocks": len(blocks),
            "bytes": sum(block.nbytes() for block in blocks.values()),
            "pinned": all(leaf.is_pinned() for leaf in leaves),
            "submitter": self._transfer.submitter,
            "packer": "inline" if self._thread is None else "thread",
        }

    def start_prepare(
        self, tick_id: int, sample_count: int, min_snapshot_ptr: int | None = None
    ) -> bool:
        """Start to prepare a tick's batch in the cold slot.

        Args:
            tick_id: The tick, not negative.
            sample_count: Rows of the batch, the pipeline's.
            min_snapshot_ptr: Rows that must have been written before the batch is drawn, so
                that it may hold the tick's own data. Packing waits for them.

        Returns:
            True if this call started it, false if the tick is pending, prepared or in use.

        Raises:
            ConfigError: Another number of rows than the pipeline's, a negative tick, or a
                `min_snapshot_ptr` that counts no rows.
            UsageError: Another tick has not been sampled.
            SegmentClosedError: The pipeline is closed, before or meanwhile.
            Exception: Packing in the learner's thread failed.
        """
        tick_id = self._check(tick_id, sample_count)
        what, remedy = "replay pipeline min_snapshot_ptr", "Count rows from 0."
        rows = as_integer(what, min_snapshot_ptr or 0, remedy, least=0)
        if tick_id in (self._cold_tick, self._hot_tick):
            return False
        if self._cold_tick is not None:
            raise UsageError(
                f"cannot prepare tick {tick_id}: tick {self._cold_tick} has not been consumed "
                f"(expected it to be). Call sample_large_batch({self._cold_tick}, ...) first."
            )
        self._prepared = Task(partial(self._prepare, tick_id, rows))
        if self._thread is not None:
            self._thread.start(self._prepared)
        else:
            self._prepared.run()
            self._prepared.result()
        self._cold_tick = tick_id
        return True

    def batch_ready(self, tick_id: int, sample_count: int) -> bool:
        """Return whether a tick's batch is on the device, or being learnt from.

        On a device without streams (`PortableTransfer`) a batch counts as there once it is packed:
        `sample_large_batch` copies it.

        Raises as `start_prepare`, and what packing it failed with.
        """
        tick_id = self._check(tick_id, sample_count)
        if self._hot_tick == tick_id:
            return True
        if self._cold_tick != tick_id or not self._prepared.done():
            return False
        self._outcome()
        return self._transfer.ready(self._cold_slot)

    def wait_ready(self) -> None:
        """Wait until the batch that is being prepared, if one is, is on the device.

        What counts as there is what `batch_ready` says. Raises as it does.
        """
        self._check(0, self.sample_count)
        if self._cold_tick is not None:
            self._outcome()
            self._transfer.wait(self._cold_slot)

    def wait_until_ready(self, tick_id: int, sample_count: int) -> bool:
        """Wait until a tick's batch is on the device; prepare it if it has not been started.

        What counts as there is what `batch_ready` says. Returns true. Raises as it does.
        """
        self.start_prepare(tick_id, sample_count)
        if self._hot_tick != tick_id:
            self.wait_ready()
        return True

    def sample_large_batch(self, tick_id: int, sample_count: int) -> TensorDictBase:
        """Return a tick's batch to learn from: its slot is not written to until `after_tick`.

        Until then the same tick gets the same batch again. Prepares it first if that has not been
        started. Waits for packing, but not for pending work of the device, unless that is without
        streams.

        Returns:
            Batch [sample_count] on the device. Entries may be added to it; its tensors belong to
            the pipeline.

        Raises as `batch_ready`, and a UsageError if another tick is being learnt.
        """
        tick_id = self._check(tick_id, sample_count)
        if self._hot_tick is None:
            with span("sample"):
                self.start_prepare(tick_id, sample_count)
                with span("replay wait"):
                    self.last_metadata = self._outcome()
            self._cold_tick, self._hot_tick, self._cold_slot = None, tick_id, 1 - self._cold_slot
        if self._hot_tick != tick_id:
            raise UsageError(
                f"cannot sample tick {tick_id}: tick {self._hot_tick} is being learnt (expected "
                "it to be over). Call after_tick() first."
            )
        return self._transfer.acquire(1 - self._cold_slot).copy()

    def after_tick(self) -> None:
        """End the tick: the learner has queued all its work on the hot batch.

        Its slot is rewritten after that work. Does nothing if no tick is being learnt.
        """
        if self._hot_tick is not None:
            self._transfer.release(1 - self._cold_slot)
            self._hot_tick = None

    def state_dict(self) -> dict[str, int]:
        """Return the seed of tick 0, which, with the rows, determines what each tick draws."""
        return {"base_seed": self.base_seed}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Restore what `state_dict` returned; batches that were prepared before are dropped.

        Raises:
            ConfigError: The state has no seed; nothing was changed.
        """
        seed = state_dict.get("base_seed") if isinstance(state_dict, Mapping) else None
        remedy = "Load what `state_dict` of a pipeline returned."
        seed = as_integer("replay pipeline base_seed", seed, remedy, least=0)
        self.discard()
        self.base_seed = seed

    def discard(self) -> None:
        """End the tick, and drop the batch that is being prepared, also if that fails."""
        self.after_tick()
        if self._cold_tick is not None:
            self._dropping = True
            try:
                self._prepared.exception()  # waits for the packing, not for rows to come
            finally:
                self._dropping = False
            self._cold_tick = None

    def close(self) -> None:
        """End all waiting, in every thread, and free the memory. Idempotent."""
        self._closing = True
        if self._thread is not None:
            self._thread.close()
        self._transfer.close()

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError(  # a copy would end the thread when it goes
            f"cannot copy or pickle {type(self).__name__}: it has a thread (expected to stay where "
            "it is). Make another one of the same storage, and load this one's state_dict() there."
        )

    def _prepare(self, tick_id: int, min_ptr: int) -> ReplayTickMetadata:
        """Pack and submit the cold slot, in the thread that packs."""
        slot, count, seed = self._cold_slot, self.sample_count, self.base_seed + tick_id
        self._transfer.wait(slot)
        with span("replay pack"):
            snapshot = self._wait_for_rows(min_ptr)
            self._source.sample(count, seed=seed, snapshot=snapshot, out=self._hosts[slot])
        with span("replay submit"):
            self._transfer.submit(slot)
        copied = None if self._transfer.submitter == "none" else slot
        return ReplayTickMetadata(tick_id, snapshot.ptr, snapshot.size, seed, count, slot, copied)

    def _wait_for_rows(self, min_ptr: int) -> ReplaySnapshot:
        deadline = time.monotonic() + self._timeout
        while (snapshot := self._source.snapshot()).ptr < min_ptr:
            if time.monotonic() >= deadline:
                raise WaitTimeoutError(
                    f"replay batch: {snapshot.ptr} rows written within {self._timeout:g} s "
                    f"(expected {min_ptr}). See whether the collectors run, or ask for fewer."
                )
            if self._closing or self._dropping:
                raise closed_error("replay pipeline", "Make a new one.")
            time.sleep(_POLL_SECONDS)
        return snapshot

    def _outcome(self) -> ReplayTickMetadata:
        """Wait for the pending tick to be packed and submitted; forget it if that failed."""
        if self._prepared.exception() is not None:
            self._cold_tick = None
        return self._prepared.result()

    def _check(self, tick_id: int, sample_count: int) -> int:
        """Return the tick as an int; refuse a call that cannot be served."""
        if self._closing:
            raise closed_error("replay pipeline", "Make a new one.")
        if self._thread is not None and self._process != os.getpid():
            raise UsageError(
                "replay pipeline: in a forked process, without its thread (expected the process "
                "that made it). Make another one of the same storage here."
            )
        if sample_count != self.sample_count:
            raise ConfigError(
                f"replay batch of tick {tick_id}: {sample_count} rows (expected "
                f"{self.sample_count}). The batch size of a pipeline stays what it is; make "
                "another pipeline for another one."
            )
        return as_integer("replay pipeline tick", tick_id, "Count ticks from 0.", least=0)
