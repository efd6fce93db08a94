"""Host batches on their way to the learner's device: one class per kind of device.

A slot is a host batch and its batch on the device. It goes round like this, and what each step
waits for is the whole protocol::

    wait       the last copy out of the host batch has ended, if any     (the packer waits)
    ...        the packer fills the host batch
    submit     copies it to the device, after the learner's work on the batch that was
               there                                                     (the device waits);
               without streams `acquire` copies, in the learner's thread
    acquire    the learner's work from here on comes after the copy      (the device waits)
    release    the next copy comes after the learner's work up to here

`DoubleBufferReplayPipeline` calls it: `acquire` and `release` in the learner's thread, whose
current stream they are about, the rest in any thread.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_unilab.errors import ConfigError
from torchrl_unilab.runtime import trace

_Blocks = list[tuple[torch.Tensor, torch.Tensor]]


class HostTransfer:
    """A learner on the processor: the host batch is the batch, nothing is copied.

    The learner has finished with a batch when it releases the slot.

    Args:
        hosts: The host batch of each slot.

    Attributes:
        submitter: What starts the copies: ``"none"``, ``"learner"`` (the thread that takes
            batches) or ``"torch"`` (the thread that packs them).
    """

    submitter = "none"

    def __init__(self, hosts: Sequence[TensorDictBase]) -> None:
        self._batches = list(hosts)

    def submit(self, slot: int) -> None:
        """Start to copy the host batch to the device."""

    def ready(self, slot: int) -> bool:
        """Return whether the copy has ended."""
        return True

    def wait(self, slot: int) -> None:
        """Wait until the last copy has ended: the host batch may be written then."""

    def acquire(self, slot: int) -> TensorDictBase:
        """Return the batch on the device, for the learner's work from here on."""
        return self._batches[slot]

    def release(self, slot: int) -> None:
        """Mark the end of the learner's work on the batch, which may still be under way."""

    def close(self) -> None:
        """Wait until no copy is under way. Idempotent."""


MakeTransfer = Callable[[Sequence[TensorDictBase]], HostTransfer]


class PortableTransfer(HostTransfer):
    """Any device: the learner's thread copies when it takes a batch, after its earlier work.

    Needs no streams or events of the device, and no other thread that uses it (MPS, XPU, ...).
    `ready` and `wait` know of no copy that is under way: there is none before `acquire`.

    Args:
        hosts: The host batch of each slot.
        device: The device.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_unilab.data.pipeline.transfer import PortableTransfer
        >>> host = TensorDict({"reward": torch.ones(3)}, [3])
        >>> transfer = PortableTransfer([host], torch.device("cpu"))
        >>> transfer.submit(0)
        >>> transfer.acquire(0)["reward"]
        tensor([1., 1., 1.])
    """

    submitter = "learner"

    def __init__(self, hosts: Sequence[TensorDictBase], device: torch.device) -> None:
        batches, self._blocks = zip(*(mirror(host, device) for host in hosts), strict=True)
        super().__init__(batches)
        self._pending: set[int] = set()

    def submit(self, slot: int) -> None:
        """Have the next `acquire` copy the host batch."""
        self._pending.add(slot)

    def acquire(self, slot: int) -> TensorDictBase:
        """Return the batch on the device; the first call after `submit` copies it, and waits."""
        if slot in self._pending:
            for target, source in self._blocks[slot]:
                target.copy_(source)
            self._pending.remove(slot)
        return super().acquire(slot)


class CUDATransfer(HostTransfer):
    """CUDA: copies on a separate stream, ordered by two events per slot.

    The learner's stream waits for the end of the copy, the copy stream for the end of the
    learner's work. Of the threads only the packing one waits, until the last copy out of the
    host batch has ended. A trace has the time of each copy on the device, `replay_copy_ms`.

    Args:
        hosts: The host batch of each slot, page-locked.
        device: The device, with its index.
        cuda: ``torch.cuda``, or what has its ``Stream``, ``Event``, ``current_stream`` and
            ``stream``.
    """

    submitter = "torch"

    def __init__(
        self, hosts: Sequence[TensorDictBase], device: torch.device, *, cuda: Any = torch.cuda
    ) -> None:
        batches, self._blocks = zip(*(mirror(host, device) for host in hosts), strict=True)
        super().__init__(batches)
        self._device, self._cuda = device, cuda
        self._stream = cuda.Stream(device)
        self._copied = [cuda.Event(enable_timing=True) for _ in hosts]
        self._consumed = [cuda.Event() for _ in hosts]
        self._begun: dict[int, Any] = {}  # where a traced copy that was not waited for began
        for slot in range(len(hosts)):
            self.release(slot)  # the memory may be what earlier work of this stream still reads
        # Also without a close(): no copy outlasts the memory it writes.
        self._finish = weakref.finalize(self, self._stream.synchronize)
        self._finish.atexit = False

    def submit(self, slot: int) -> None:
        """Copy after the learner's work on the batch that was there."""
        self._stream.wait_event(self._consumed[slot])
        if trace.settings() is not None:
            begun = self._begun[slot] = self._cuda.Event(enable_timing=True)
            begun.record(self._stream)
        with self._cuda.stream(self._stream):
            for target, source in self._blocks[slot]:
                target.copy_(source, non_blocking=True)
        self._copied[slot].record(self._stream)

    def ready(self, slot: int) -> bool:
        """Return whether the copy has ended."""
        return bool(self._copied[slot].query())

    def wait(self, slot: int) -> None:
        """Wait until the copy has ended."""
        self._copied[slot].synchronize()
        if (begun := self._begun.pop(slot, None)) is not None:
            trace.counter("replay_copy_ms", begun.elapsed_time(self._copied[slot]))

    def acquire(self, slot: int) -> TensorDictBase:
        """Return the batch; the current stream waits for its copy."""
        self._cuda.current_stream(self._device).wait_event(self._copied[slot])
        return super().acquire(slot)

    def release(self, slot: int) -> None:
        """Let the next copy wait for all work that the current stream has queued so far."""
        self._consumed[slot].record(self._cuda.current_stream(self._device))

    def close(self) -> None:
        """Wait until no copy is under way. Idempotent."""
        self._finish()


def mirror(batch: TensorDictBase, device: torch.device) -> tuple[TensorDictBase, _Blocks]:
    """Make room for a batch on a device, so that it takes one copy per block of memory.

    Args:
        batch: Tensors in host memory: views of few blocks, which hold nothing else.
        device: Where to make room.

    Returns:
        A batch of equal keys, shapes, dtypes and strides, uninitialised, and for each block of
        bytes (target on the device, source on the host).
    """
    blocks: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def place(leaf: torch.Tensor) -> torch.Tensor:
        storage = leaf.untyped_storage()
        if storage.data_ptr() not in blocks:
            source = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
            blocks[storage.data_ptr()] = torch.empty_like(source, device=device), source
        target, _ = blocks[storage.data_ptr()]
        return torch.empty(0, dtype=leaf.dtype, device=device).set_(
            target.untyped_storage(), leaf.storage_offset(), leaf.shape, leaf.stride()
        )

    there: TensorDictBase = batch.apply(place, device=device)
    return there, list(blocks.values())


def transfer_to(device: torch.device) -> MakeTransfer:
    """Return what makes the transfer to a device from its host batches.

    Raises:
        ConfigError: There is no such device here.

    Examples:
        >>> import torch
        >>> from torchrl_unilab.data.pipeline.transfer import transfer_to
        >>> transfer_to(torch.device("cpu"))([]).submitter
        'none'
    """
    if device.type == "cpu":
        return HostTransfer
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != device.type:
        raise ConfigError(
            f"replay transfer to {device}: this machine's accelerator is {found} (expected "
            f"{device.type}). Use device='cpu', or a PyTorch built for it."
        )
    if device.type != "cuda":
        return functools.partial(PortableTransfer, device=device)
    if device.index is None:  # threads differ in which one is current
        device = torch.device("cuda", torch.cuda.current_device())
    return functools.partial(CUDATransfer, device=device)
