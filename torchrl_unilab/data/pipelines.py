"""Replay batches that are ready before the learner asks for them.

A learner that takes one large batch per tick names the next tick's batch while it works on
this one's. A packer samples it meanwhile (`torchrl_unilab.data.packers`), and a transfer
takes it to the learner's device (`torchrl_unilab.data.transfer`), in two slots that change
places when the learner consumes::

    tick       0            1            2
    slot 0     pack, copy   learn        pack, copy
    slot 1                  pack, copy   learn
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol

import torch
from tensordict import TensorDictBase

from torchrl_unilab.data.batch_blocks import contiguous_blocks
from torchrl_unilab.data.packers import (
    SLOTS,
    PackOrder,
    ReplayPacker,
    ReplaySnapshot,
    ReplaySource,
    SourcePacker,
)
from torchrl_unilab.data.transfer import (
    NativeH2D,
    TransferBackend,
    TransferSlot,
    make_transfer,
)
from torchrl_unilab.errors import ConfigError, SegmentClosedError, WorkerError
from torchrl_unilab.runtime.trace import span

__all__ = [
    "DoubleBufferReplayPipeline",
    "ReplayPipeline",
    "ReplaySnapshot",
    "ReplaySource",
    "ReplayTickMetadata",
    "Trace",
]

Trace = Callable[[str, float, float], None]
"""Notes a span of time: its name, its begin and its end by ``time.perf_counter``, s."""


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
    """

    tick_id: int
    snapshot_ptr: int
    snapshot_size: int
    sample_seed: int
    sample_count: int
    batch_host_slot: int | None = None
    batch_gpu_slot: int | None = None


class ReplayPipeline(Protocol):
    """What a learner needs of whatever prepares its batches, one for each tick."""

    def start_prepare(
        self, tick_id: int, sample_count: int, min_snapshot_ptr: int | None = None
    ) -> bool:
        """Start to prepare a tick's batch; return whether there was anything to start."""

    def batch_ready(self, tick_id: int, sample_count: int) -> bool:
        """Return whether a tick's batch could be had without waiting."""

    def wait_ready(self) -> None:
        """Wait for the batch that is being prepared, if one is."""

    def wait_until_ready(self, tick_id: int, sample_count: int) -> bool:
        """Wait for a tick's batch, which is prepared if it has not been; return true."""

    def sample_large_batch(self, tick_id: int, sample_count: int) -> TensorDictBase:
        """Return a tick's batch on the learner's device, [sample_count], to learn from.

        Until `after_tick` the same tick gets the same batch, and no other tick gets one.
        """

    def after_tick(self) -> None:
        """End the tick: the learner has asked for all its work on the batch."""

    def close(self) -> None:
        """End all waiting and let go of the memory. Idempotent."""


class DoubleBufferReplayPipeline:
    """Prepares a tick's batch in one slot while the learner uses the other.

    The rows of a tick are drawn with the seed ``base_seed + tick``: from the same rows, the
    same tick gets the same batch, whoever packs it and whenever. A batch is the pipeline's
    memory: valid until `after_tick`, and on a device with streams for all work asked for until
    then, done or not.

    One thread learns; `close` may be called in any. Whatever a batch fails with is raised by
    the next call that needs the batch, and the tick is forgotten.

    Args:
        source: Rows to sample from.
        sample_count: Rows of a batch, of every tick.
        device: The learner's device.
        base_seed: Seed of tick 0.
        packer: Who packs: ``"thread"``, a thread of its own; ``"inline"``, the learner's
            thread when it starts to prepare; or a packer (`ProcessPacker`), which is closed
            with the pipeline.
        trace: Told how long batches took, in the thread that packs (``"replay pack"``,
            ``"replay submit"``) and in the learner's (``"replay wait"``).
        native_h2d: See `make_transfer`.
        timeout: How long a packer waits for `min_snapshot_ptr` or another process, s.
        transfer: How batches reach the device, in place of `device` and `native_h2d`; closed
            with the pipeline.

    Raises:
        ConfigError: A setting cannot work.

    Attributes:
        last_metadata: Where the last batch consumed came from; None before the first.

    Example:
        >>> from tensordict import TensorDict
        >>> class Rows:
        ...     rows = TensorDict({"reward": torch.arange(100.0)}, [100])
        ...     def snapshot(self):
        ...         return ReplaySnapshot(ptr=100, size=100)
        ...     def empty_batch(self, count, *, pin_memory=False, shared=False):
        ...         return TensorDict({"reward": torch.empty(count)}, [count])
        ...     def sample(self, count, *, seed, snapshot=None, out=None):
        ...         generator = torch.Generator().manual_seed(seed)
        ...         index = torch.randint(snapshot.size, (count,), generator=generator)
        ...         return out.update_(self.rows[index])
        >>> with DoubleBufferReplayPipeline(Rows(), sample_count=8) as pipeline:
        ...     for tick in range(3):
        ...         batch = pipeline.sample_large_batch(tick, 8)
        ...         started = pipeline.start_prepare(tick + 1, 8)  # while the learner learns
        ...         total = batch["reward"].sum()
        ...         pipeline.after_tick()
        >>> started, pipeline.last_metadata.sample_seed
        (True, 2)
    """

    def __init__(
        self,
        source: ReplaySource,
        *,
        sample_count: int,
        device: torch.device | str = "cpu",
        base_seed: int = 0,
        packer: Literal["thread", "inline"] | ReplayPacker = "thread",
        trace: Trace | None = None,
        native_h2d: NativeH2D = "auto",
        timeout: float = 60.0,
        transfer: TransferBackend | None = None,
    ) -> None:
        if sample_count < 1 or timeout <= 0 or base_seed < 0:
            raise ConfigError(
                f"replay pipeline: batches of {sample_count} rows, {timeout:g} s to wait, seed "
                f"{base_seed} (expected at least 1 row, some time, no negative seed). Check the "
                "settings."
            )
        if isinstance(packer, str):
            if packer not in ("thread", "inline"):
                raise ConfigError(
                    f"replay pipeline: packer {packer!r} (expected 'thread', 'inline' or a "
                    "packer). Use 'thread' to pack while the learner learns."
                )
            packer = SourcePacker(source, background=packer == "thread")
        self._transfer = transfer or make_transfer(device, native_h2d=native_h2d)
        self._packer = packer
        hosts = packer.host_batches(sample_count, pin_memory=self._transfer.pinned)
        sizes = [tuple(host.batch_size) for host in hosts]
        if sizes != [(sample_count,)] * SLOTS:
            raise ConfigError(
                f"replay pipeline: host batches {sizes} (expected {SLOTS} of {(sample_count,)}). "
                "Make the packer for the pipeline's sample_count."
            )
        self._blocks = [block.numel() for block in contiguous_blocks(hosts[0]).values()]
        self._slots = [self._transfer.slot(host) for host in hosts]
        self._thread = ThreadPoolExecutor(1, "replay-packer") if packer.background else None
        self._trace = trace
        self._timeout = timeout
        self._closed = False
        self._cold = 0  # the slot that is prepared next, or now
        self._hot: TransferSlot | None = None  # what the learner has not finished with
        self._hot_tick: int | None = None
        self._tick: int | None = None  # being prepared, or prepared and not consumed
        self._prepared: Future[ReplayTickMetadata] = Future()  # that tick's
        self.sample_count = sample_count
        self.base_seed = base_seed
        self.last_metadata: ReplayTickMetadata | None = None

    def __enter__(self) -> DoubleBufferReplayPipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def h2d_submitter(self) -> str:
        """What starts the copies to the device: ``"none"``, ``"torch"`` or ``"native"``."""
        return self._transfer.submitter

    @property
    def transfer_manifest(self) -> dict[str, Any]:
        """How batches get to the learner, for a log.

        ``device``, ``slots``, ``blocks`` (copies per batch), ``bytes`` (per batch),
        ``pinned``, ``submitter`` and its ``reason``, ``packer``.
        """
        return {
            "device": str(self._transfer.device),
            "slots": SLOTS,
            "blocks": len(self._blocks),
            "bytes": sum(self._blocks),
            "pinned": self._transfer.pinned,
            "submitter": self._transfer.submitter,
            "reason": self._transfer.reason,
            "packer": self._packer.name,
        }

    def start_prepare(
        self, tick_id: int, sample_count: int, min_snapshot_ptr: int | None = None
    ) -> bool:
        """Start to prepare a tick's batch in the cold slot.

        Args:
            tick_id: The tick, not negative.
            sample_count: Rows of the batch, the pipeline's.
            min_snapshot_ptr: Rows that must have been written before the batch is drawn, so
                that it may hold the tick's own data. The packer waits for them.

        Returns:
            True if this call started it, false if the tick is pending, prepared or being learnt.

        Raises:
            ConfigError: Another number of rows than the pipeline's, or a negative tick.
            RuntimeError: Another tick has not been consumed.
            SegmentClosedError: The pipeline is closed.
            Exception: An inline packer failed.
        """
        self._check(tick_id, sample_count)
        if tick_id in (self._tick, self._hot_tick):
            return False
        if self._tick is not None:
            raise RuntimeError(
                f"cannot prepare tick {tick_id}: tick {self._tick} has not been consumed "
                f"(expected it to be). Call sample_large_batch({self._tick}, ...) first."
            )
        order = PackOrder(
            self._cold, sample_count, self.base_seed + tick_id, min_snapshot_ptr or 0, self._timeout
        )
        if self._thread is not None:
            self._prepared = self._thread.submit(self._prepare, tick_id, order)
        else:
            self._prepared = Future()
            self._prepared.set_result(self._prepare(tick_id, order))
        self._tick = tick_id
        return True

    def batch_ready(self, tick_id: int, sample_count: int) -> bool:
        """Return whether a tick's batch is on the device, or being learnt from.

        Raises:
            ConfigError: Another number of rows than the pipeline's, or a negative tick.
            SegmentClosedError: The pipeline is closed.
            Exception: What packing it failed with.
        """
        self._check(tick_id, sample_count)
        if self._hot_tick == tick_id:
            return True
        if self._tick != tick_id or not self._prepared.done():
            return False
        self._outcome()
        return self._slots[self._cold].ready()

    def wait_ready(self) -> None:
        """Wait until the batch that is being prepared, if one is, is on the device.

        Raises:
            SegmentClosedError: The pipeline is closed, before or meanwhile.
            Exception: What packing it failed with.
        """
        self._check(0, self.sample_count)
        if self._tick is not None:
            self._outcome()
            self._slots[self._cold].wait()

    def wait_until_ready(self, tick_id: int, sample_count: int) -> bool:
        """Wait until a tick's batch is on the device; prepare it if it has not been started.

        Returns:
            True.

        Raises:
            ConfigError: Another number of rows than the pipeline's, or a negative tick.
            RuntimeError: Another tick has not been consumed.
            SegmentClosedError: The pipeline is closed, before or meanwhile.
            Exception: What packing it failed with.
        """
        self.start_prepare(tick_id, sample_count)
        if self._hot_tick != tick_id:
            self.wait_ready()
        return True

    def sample_large_batch(self, tick_id: int, sample_count: int) -> TensorDictBase:
        """Return a tick's batch to learn from: its slot is not written to until `after_tick`.

        Until then the same tick gets the same batch again. Prepares it first if that has not
        been started. Waits for packing, and for nothing that the device still has to do.

        Returns:
            Batch [sample_count] on the device. Entries may be added to it; its tensors are
            the pipeline's.

        Raises:
            ConfigError: Another number of rows than the pipeline's, or a negative tick.
            RuntimeError: Another tick has not been consumed, or is being learnt.
            SegmentClosedError: The pipeline is closed, before or meanwhile.
            Exception: What packing it failed with.
        """
        self._check(tick_id, sample_count)
        if self._hot_tick not in (None, tick_id):
            raise RuntimeError(
                f"cannot sample tick {tick_id}: tick {self._hot_tick} is being learnt (expected it "
                "to be over). Call after_tick() first."
            )
        if self._hot is None:
            with span("sample"):
                self.start_prepare(tick_id, sample_count)
                with self._span("replay wait"):
                    self.last_metadata = self._outcome()
            self._hot, self._hot_tick = self._slots[self._cold], tick_id
            self._cold = (self._cold + 1) % SLOTS
            self._tick = None
        batch: TensorDictBase = self._hot.acquire().copy()
        return batch

    def after_tick(self) -> None:
        """End the tick: the learner has asked for all its work on the hot batch.

        Its slot is rewritten after that work. Does nothing if no tick is being learnt.
        """
        if self._hot is not None:
            self._hot.release()
        self._hot, self._hot_tick = None, None

    def state_dict(self) -> dict[str, int]:
        """Return the seed of tick 0: what a tick draws follows from it and from the rows."""
        return {"base_seed": self.base_seed}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Restore what `state_dict` returned; no batch of before is used."""
        self.after_tick()
        if self._tick is not None:
            self.sample_large_batch(self._tick, self.sample_count)
            self.after_tick()
        self.base_seed = state_dict["base_seed"]

    def close(self) -> None:
        """End all waiting, in every thread, and let go of the memory. Idempotent."""
        self._closed = True
        self._packer.close()
        if self._thread is not None:
            self._thread.shutdown()
        self._transfer.close()

    def _prepare(self, tick_id: int, order: PackOrder) -> ReplayTickMetadata:
        """Pack and submit, in whichever thread that is."""
        slot = self._slots[order.slot]
        slot.wait_writable()
        with self._span("replay pack"):
            snapshot = self._packer.pack(order)
        with self._span("replay submit"):
            slot.submit()
        return ReplayTickMetadata(
            tick_id,
            *snapshot,
            sample_seed=order.seed,
            sample_count=order.count,
            batch_host_slot=order.slot,
            batch_gpu_slot=None if self._transfer.submitter == "none" else order.slot,
        )

    def _outcome(self) -> ReplayTickMetadata:
        """Wait for the pending tick to be packed and submitted; forget it if that failed."""
        error = self._prepared.exception()
        if error is None:
            return self._prepared.result()
        self._tick = None
        if isinstance(error, WorkerError):
            self._packer.check()  # who started the process may know what it died of
        raise error

    def _check(self, tick_id: int, sample_count: int) -> None:
        if self._closed:
            raise SegmentClosedError(
                "replay pipeline: used after close() (expected to be open). Make a new one."
            )
        if sample_count != self.sample_count or tick_id < 0:
            raise ConfigError(
                f"replay batch of tick {tick_id}: {sample_count} rows (expected "
                f"{self.sample_count}, of a tick that is not negative). The batch size of a "
                "pipeline stays what it is; make another pipeline for another one."
            )

    @contextlib.contextmanager
    def _span(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        with span(name):
            yield
        if self._trace is not None:
            self._trace(name, begin, time.perf_counter())
