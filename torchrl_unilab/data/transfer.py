"""Batches on their way from host memory to the learner's device.

A `TransferBackend` makes one `TransferSlot` for each host batch that a packer fills. A slot
goes round like this, and what each step waits for is all there is to know about it::

    wait_writable   the last copy out of the host batch has ended     (the packer waits)
    ...             the packer fills the host batch
    submit          copies it to the device, after the learner's work on the batch that
                    was there                                         (the device waits)
    acquire         the learner's work from here on comes after the copy (the device waits)
    release         the learner's work up to here is what the next copy comes after

On the processor the host batch is the batch. CUDA copies on a stream of its own, ordered by
events, so that neither the packer nor the learner waits for the other. Any other device gets
a plain copy.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from tensordict import TensorDictBase
from torchrl import logger as torchrl_logger

from torchrl_unilab.data.batch_blocks import mirror, page_ranges
from torchrl_unilab.errors import ConfigError

__all__ = [
    "CPUTransfer",
    "CUDATransfer",
    "Event",
    "NativeCopy",
    "NativeH2D",
    "PortableTransfer",
    "Stream",
    "Streams",
    "TransferBackend",
    "TransferSlot",
    "make_transfer",
]

NativeH2D = Literal["auto", "off"]


class TransferSlot(Protocol):
    """A host batch and its place on the device, see the module's text for the order of calls.

    `wait_writable`, `submit`, `ready` and `wait` may be called in any thread; `acquire` and
    `release` are called in the learner's, whose current stream they are about.
    """

    def wait_writable(self) -> None:
        """Wait until the host batch may be written."""

    def submit(self) -> None:
        """Start to copy the host batch to the device."""

    def ready(self) -> bool:
        """Return whether the copy has ended."""

    def wait(self) -> None:
        """Wait until the copy has ended."""

    def acquire(self) -> TensorDictBase:
        """Return the batch on the device, for the learner's work from here on."""

    def release(self) -> None:
        """Say that the learner has asked for all its work on the batch."""


class TransferBackend(Protocol):
    """How batches reach a device."""

    @property
    def device(self) -> torch.device:
        """The device."""

    @property
    def pinned(self) -> bool:
        """Whether host batches are to be page-locked."""

    @property
    def submitter(self) -> str:
        """What starts the copies: ``"none"``, ``"torch"`` or ``"native"``."""

    @property
    def reason(self) -> str:
        """Why that one."""

    def slot(self, host: TensorDictBase) -> TransferSlot:
        """Make the slot of a host batch."""

    def close(self) -> None:
        """Wait until no copy is under way and let go of the memory. Idempotent."""


# The processor


class CPUTransfer:
    """The host batch is the batch: nothing is copied.

    A learner on the processor has finished with a batch when it asks for the next one.
    """

    device = torch.device("cpu")
    pinned = False
    submitter = "none"
    reason = "the learner reads host memory"

    def slot(self, host: TensorDictBase) -> TransferSlot:
        """Return the slot."""
        return _HostSlot(host)

    def close(self) -> None:
        """Do nothing."""


class _HostSlot:
    def __init__(self, host: TensorDictBase) -> None:
        self._host = host

    def wait_writable(self) -> None: ...

    def submit(self) -> None: ...

    def ready(self) -> bool:
        return True

    def wait(self) -> None: ...

    def acquire(self) -> TensorDictBase:
        return self._host

    def release(self) -> None: ...


# Any device


class PortableTransfer:
    """A copy that the packing thread waits for, after all that the device was asked to do.

    Needs no streams or events of the device, and so works on all (MPS, XPU, ...).

    Args:
        device: The device.
        synchronize: Waits until the device has done what it was asked to;
            ``torch.accelerator.synchronize`` if not given.

    Example:
        >>> from tensordict import TensorDict
        >>> host = TensorDict({"reward": torch.ones(3)}, [3])
        >>> slot = PortableTransfer(torch.device("cpu"), synchronize=lambda: None).slot(host)
        >>> slot.submit()
        >>> slot.acquire()["reward"]
        tensor([1., 1., 1.])
    """

    pinned = False
    submitter = "torch"
    reason = "this device is copied to without streams"

    def __init__(
        self, device: torch.device, *, synchronize: Callable[[], None] | None = None
    ) -> None:
        self.device = device
        self._synchronize = synchronize or functools.partial(torch.accelerator.synchronize, device)

    def slot(self, host: TensorDictBase) -> TransferSlot:
        """Return the slot."""
        return _PortableSlot(host, self.device, self._synchronize)

    def close(self) -> None:
        """Do nothing: no copy outlasts its call."""


class _PortableSlot(_HostSlot):
    def __init__(
        self, host: TensorDictBase, device: torch.device, synchronize: Callable[[], None]
    ) -> None:
        super().__init__(host)
        self._batch, self._pairs = mirror(host, device)
        self._synchronize = synchronize

    def submit(self) -> None:
        self._synchronize()  # the learner may not have read yet what is overwritten here
        for target, source in self._pairs:
            target.copy_(source)
        self._synchronize()

    def acquire(self) -> TensorDictBase:
        return self._batch


# CUDA


class Event(Protocol):
    """A point in a stream's work. One that was never recorded has passed."""

    def record(self, stream: Any, /) -> None:
        """Be the point after all that `stream` was asked to do by now."""

    def query(self) -> bool:
        """Return whether the point has passed."""

    def synchronize(self) -> None:
        """Wait until the point has passed."""


class Stream(Protocol):
    """Work that a device does in order."""

    def wait_event(self, event: Any, /) -> None:
        """Do what is asked for from here on after `event`."""

    def synchronize(self) -> None:
        """Wait until all that was asked for is done."""


class Streams(Protocol):
    """What `CUDATransfer` needs of a device: CUDA, or a model of it in a test."""

    def stream(self) -> Stream:
        """Make a stream."""

    def current(self) -> Stream:
        """Return the stream that this thread's work goes to."""

    def event(self) -> Event:
        """Make an event."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Ask `stream` to copy a block of bytes."""

    def keep(self, block: torch.Tensor, stream: Any) -> None:
        """See to it that a device block, once freed, is not reused while `stream` is busy."""

    def pin(self, address: int, size: int) -> Callable[[], None]:
        """Page-lock pages of host memory, bytes; return what undoes it."""


class CUDATransfer:
    """Copies on a stream of its own, ordered by events.

    A slot has two events: its copy has ended, and the learner has finished with its batch.
    The learner's stream waits for the first, the copy stream for the second, and of the
    threads only the packing one ever waits, until the last copy out of the host batch has
    ended.

    Args:
        device: The device, with its index.
        streams: Streams and events of the device.
        submitter: What `streams` copies by.
        reason: Why.
    """

    pinned = True

    def __init__(
        self, device: torch.device, streams: Streams, *, submitter: str, reason: str
    ) -> None:
        self.device = device
        self.submitter = submitter
        self.reason = reason
        self._streams = streams
        self._stream = streams.stream()
        self._pins: list[Callable[[], None]] = []
        self._blocks: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Also if nobody closes: memory outlasts the copies, which torch may not know of.
        self._finalize = weakref.finalize(self, _end_copies, self._stream, self._pins, self._blocks)
        self._finalize.atexit = False  # the driver lets go of everything by itself

    def slot(self, host: TensorDictBase) -> TransferSlot:
        """Return the slot; page-lock the host batch if it is not."""
        batch, pairs = mirror(host, self.device)
        self._blocks += pairs
        loose = [source for _, source in pairs if not source.is_pinned()]
        for start, size in page_ranges(loose):
            self._pins.append(self._streams.pin(start, size))
        return _StreamSlot(batch, pairs, self._stream, self._streams, self)

    def close(self) -> None:
        """Wait until no copy is under way and unlock memory that was locked here."""
        self._finalize()


def _end_copies(stream: Stream, pins: list[Callable[[], None]], blocks: list[Any]) -> None:
    stream.synchronize()
    while pins:
        pins.pop()()
    blocks.clear()


class _StreamSlot:
    def __init__(
        self,
        batch: TensorDictBase,
        pairs: list[tuple[torch.Tensor, torch.Tensor]],
        stream: Stream,
        streams: Streams,
        owner: CUDATransfer,
    ) -> None:
        self._batch = batch
        self._pairs = pairs
        self._stream = stream
        self._streams = streams
        self._owner = owner  # ends the copies before this slot's memory goes
        self._copied = streams.event()
        self._consumed = streams.event()
        # The memory may be what earlier work on this thread's stream still reads.
        self._consumed.record(streams.current())
        self._keep(stream)

    def _keep(self, stream: Stream) -> None:
        for block, _ in self._pairs:
            self._streams.keep(block, stream)

    def wait_writable(self) -> None:
        self._copied.synchronize()

    def submit(self) -> None:
        self._stream.wait_event(self._consumed)
        for target, source in self._pairs:
            self._streams.copy(target, source, self._stream)
        self._copied.record(self._stream)

    def ready(self) -> bool:
        return self._copied.query()

    def wait(self) -> None:
        self._copied.synchronize()

    def acquire(self) -> TensorDictBase:
        current = self._streams.current()
        current.wait_event(self._copied)
        self._keep(current)
        return self._batch

    def release(self) -> None:
        self._consumed.record(self._streams.current())


class _CUDAStreams:
    """The real ones, of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.native: NativeCopy | None = None

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        with torch.cuda.stream(stream):
            if self.native is not None:
                self.native(target, source, stream.cuda_stream)
            else:
                target.copy_(source, non_blocking=True)

    def keep(self, block: torch.Tensor, stream: Any) -> None:
        block.record_stream(stream)

    def pin(self, address: int, size: int) -> Callable[[], None]:
        runtime = torch.cuda.cudart()
        with torch.cuda.device(self._device):
            torch.cuda.check_error(runtime.cudaHostRegister(address, size, 0))
        return lambda: torch.cuda.check_error(runtime.cudaHostUnregister(address))


class NativeCopy:
    """``cudaMemcpyAsync``, called without PyTorch in between.

    Saves the tens of microseconds that a copy through a tensor's method takes to be asked
    for, not the copy's own time.

    Args:
        library: The CUDA runtime, or what has its ``cudaMemcpyAsync``.
    """

    _HOST_TO_DEVICE = 1

    def __init__(self, library: Any) -> None:
        self._copy = library.cudaMemcpyAsync
        pointer = ctypes.c_void_p
        self._copy.argtypes = [pointer, pointer, ctypes.c_size_t, ctypes.c_int, pointer]
        self._copy.restype = ctypes.c_int

    @classmethod
    def load(cls, cuda_version: str | None = torch.version.cuda) -> NativeCopy:
        """Find the CUDA runtime that PyTorch runs on.

        Raises:
            OSError: There is none.
        """
        if cuda_version is None:
            raise OSError("this PyTorch is built without CUDA")
        return cls(ctypes.CDLL(f"libcudart.so.{cuda_version.split('.')[0]}"))

    def __call__(self, target: torch.Tensor, source: torch.Tensor, stream: int) -> None:
        """Ask a stream to copy `source` to `target`, as many bytes on the device.

        Args:
            target: Bytes on the device, which is the current one.
            source: As many bytes of page-locked host memory. Both stay until the copy ends.
            stream: Handle of the stream.

        Raises:
            OSError: The runtime refused.
        """
        size = source.numel() * source.element_size()
        code = self._copy(target.data_ptr(), source.data_ptr(), size, self._HOST_TO_DEVICE, stream)
        if code != 0:
            raise OSError(
                f"cudaMemcpyAsync of {size} bytes: error {code} (expected 0). "
                "Use native_h2d='off', or look for an earlier error of the device."
            )


def _try_native(streams: _CUDAStreams, device: torch.device) -> str:
    """Let `streams` copy natively if that works here; return why, or why not."""
    try:
        streams.native = NativeCopy.load()
        source = torch.arange(64, dtype=torch.uint8).pin_memory()
        target = torch.zeros_like(source, device=device)
        stream = streams.stream()
        stream.wait_stream(streams.current())
        streams.copy(target, source, stream)
        stream.synchronize()
        if not torch.equal(target.cpu(), source):
            raise OSError("a copy by it did not arrive")
    except OSError as error:
        streams.native = None
        return f"no native copy: {error}"
    return "cudaMemcpyAsync works here"


@functools.cache
def _log_once(text: str) -> None:
    torchrl_logger.info("replay transfer: %s", text)


# Which one


def make_transfer(device: torch.device | str, *, native_h2d: NativeH2D = "auto") -> TransferBackend:
    """Choose how batches reach a device.

    Args:
        device: The learner's device.
        native_h2d: On CUDA, ``"auto"`` starts copies by the CUDA runtime itself where that
            works, and says once in the log why where it does not; ``"off"`` by PyTorch.

    Raises:
        ConfigError: There is no such device here, or `native_h2d` is neither.

    Example:
        >>> make_transfer("cpu").submitter
        'none'
    """
    device = torch.device(device)
    if native_h2d not in ("auto", "off"):
        raise ConfigError(
            f"native_h2d: {native_h2d!r} (expected 'auto' or 'off'). Use 'off' if copies fail."
        )
    if device.type == "cpu":
        return CPUTransfer()
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != device.type:
        raise ConfigError(
            f"replay transfer to {device}: this machine's accelerator is {found} (expected "
            f"{device.type}). Use device='cpu', or a PyTorch built for it."
        )
    if device.type != "cuda":
        return PortableTransfer(device)
    if device.index is None:  # threads differ in which one is current
        device = torch.device("cuda", torch.cuda.current_device())
    streams = _CUDAStreams(device)
    reason = "native_h2d='off'" if native_h2d == "off" else _try_native(streams, device)
    if streams.native is None:
        _log_once(reason)
    submitter = "torch" if streams.native is None else "native"
    return CUDATransfer(device, streams, submitter=submitter, reason=reason)
