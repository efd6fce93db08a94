"""Transfer to devices: blocks, and the order of copies and work on a model of a device."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import random
import weakref
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from torchrl import logger as torchrl_logger

from torchrl_unilab.data import transfer
from torchrl_unilab.data.batch_blocks import contiguous_blocks, mirror, page_ranges
from torchrl_unilab.data.pipelines import DoubleBufferReplayPipeline, ReplaySnapshot
from torchrl_unilab.data.transfer import (
    CPUTransfer,
    CUDATransfer,
    NativeCopy,
    PortableTransfer,
    TransferBackend,
    make_transfer,
)
from torchrl_unilab.errors import ConfigError

CPU = torch.device("cpu")
COUNT = 6


class Seeds:
    """Rows that hold the seed they were drawn with."""

    def snapshot(self) -> ReplaySnapshot:
        return ReplaySnapshot(COUNT, COUNT)

    def empty_batch(
        self, count: int, *, pin_memory: bool = False, shared: bool = False
    ) -> TensorDict:
        pin_memory = pin_memory and torch.cuda.is_available()  # the model locks by itself
        rows = torch.full((count, 4), -1.0, pin_memory=pin_memory)
        if shared:
            rows.share_memory_()
        flags = torch.zeros(count, dtype=torch.uint8, pin_memory=pin_memory)
        fields = {"observation": rows[:, :3], "next": {"reward": rows[:, 3:]}}
        return TensorDict({**fields, "done": flags.view(torch.bool)}, [count])

    def sample(
        self,
        count: int,
        *,
        seed: int,
        snapshot: ReplaySnapshot | None = None,
        out: TensorDictBase | None = None,
    ) -> TensorDictBase:
        assert out is not None
        for leaf in out.values(True, True):
            leaf.fill_(seed)
        return out


# A model of a device that is as late as it is allowed to be


class Device:
    """Streams whose work is done in any order that they allow."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.streams: list[ModelStream] = []
        self.calls: list[str] = []
        self.events = 0
        self.learner = self.stream()
        self.pinned: list[int] = []

    def progress(self) -> bool:
        """Do a piece of work, if any can be done."""
        able = [stream for stream in self.streams if stream.work and stream.work[0][0]()]
        if able:
            self.random.choice(able).work.popleft()[1]()
        return bool(able)

    def run_until(self, happened: Callable[[], bool]) -> None:
        while not happened():
            assert self.progress(), "deadlock"

    # What the transfer needs

    def stream(self) -> ModelStream:
        self.streams.append(ModelStream(self, ["learner", "copier"][len(self.streams)]))
        return self.streams[-1]

    def current(self) -> ModelStream:
        return self.learner

    def event(self) -> ModelEvent:
        self.events += 1
        return ModelEvent(self, self.events)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: ModelStream) -> None:
        self.calls.append(f"{stream.name}: copy {source.numel()}")
        half = source.numel() // 2
        stream.ask(lambda: target[:half].copy_(source[:half]))
        stream.ask(lambda: target[half:].copy_(source[half:]))

    def keep(self, block: torch.Tensor, stream: ModelStream) -> None:
        self.calls.append(f"{stream.name}: keep {block.numel()}")

    def pin(self, address: int, size: int) -> Callable[[], None]:
        assert size % mmap.PAGESIZE == 0
        self.pinned.append(address)
        return lambda: self.pinned.remove(address)


class ModelStream:
    def __init__(self, device: Device, name: str) -> None:
        self.device = device
        self.name = name
        self.work: deque[tuple[Callable[[], bool], Callable[[], Any]]] = deque()

    def ask(self, work: Callable[[], Any], may: Callable[[], bool] = lambda: True) -> None:
        self.work.append((may, work))

    def wait_event(self, event: ModelEvent) -> None:
        self.device.calls.append(f"{self.name}: wait for {event.name}")
        passed = event.passed  # what was recorded last by now
        self.ask(lambda: None, lambda: all(passed))

    def synchronize(self) -> None:
        self.device.calls.append(f"{self.name}: synchronize")
        self.device.run_until(lambda: not self.work)


class ModelEvent:
    def __init__(self, device: Device, number: int) -> None:
        self.device = device
        self.name = f"event {number}"
        self.passed: list[bool] = []

    def record(self, stream: ModelStream) -> None:
        self.device.calls.append(f"{stream.name}: record {self.name}")
        passed = self.passed = [False]
        stream.ask(lambda: passed.__setitem__(0, True))

    def query(self) -> bool:
        return all(self.passed)

    def synchronize(self) -> None:
        self.device.calls.append(f"wait for {self.name}")
        self.device.run_until(self.query)


def modelled(device: Device) -> CUDATransfer:
    return CUDATransfer(CPU, device, submitter="model", reason="a test")


def learn(device: Device, tick: int, batch: TensorDictBase, seen: list[tuple[int, float]]) -> None:
    """Ask the learner's stream to look at a batch twice."""
    for _ in range(2):
        for leaf in batch.values(True, True):
            device.learner.ask(lambda leaf=leaf: seen.extend((tick, x) for x in leaf.unique()))


@given(seed=st.integers(0, 2**32), early=st.lists(st.booleans(), min_size=8, max_size=8))
@settings(max_examples=150)
def test_however_late_the_device_is_the_learner_s_work_sees_its_own_tick_s_batch(seed, early):
    """A tick ends before the next one is prepared where `early` says so, else after that."""
    device, seen = Device(seed), []
    with DoubleBufferReplayPipeline(
        Seeds(), sample_count=COUNT, packer="inline", base_seed=1, transfer=modelled(device)
    ) as pipeline:
        for tick, before in enumerate(early):
            batch = pipeline.sample_large_batch(tick, COUNT)
            learn(device, tick, batch, seen)
            for _ in range(device.random.randrange(12)):
                device.progress()
            if before:
                pipeline.after_tick()
            if device.random.random() < 0.7:
                pipeline.start_prepare(tick + 1, COUNT)
            pipeline.after_tick()
        device.learner.synchronize()
    assert {tick for tick, _ in seen} == set(range(len(early)))
    for tick, value in seen:
        assert value in (tick + 1, True), f"tick {tick} saw {value}"


def test_each_step_of_a_slot_waits_for_what_it_must_and_for_nothing_else():
    device = Device()
    backend = modelled(device)
    host = Seeds().empty_batch(COUNT)
    slot = backend.slot(host)
    steps = {"made": list(device.calls)}
    for step in ("wait_writable", "submit", "acquire", "release", "wait"):
        device.calls.clear()
        getattr(slot, step)()
        steps[step] = list(device.calls)
    # event 1: the copy has ended; event 2: the learner has finished
    assert steps == {
        "made": ["learner: record event 2", "copier: keep 96", "copier: keep 6"],
        "wait_writable": ["wait for event 1"],
        "submit": [
            "copier: wait for event 2",
            "copier: copy 96",
            "copier: copy 6",
            "copier: record event 1",
        ],
        "acquire": ["learner: wait for event 1", "learner: keep 96", "learner: keep 6"],
        "release": ["learner: record event 2"],
        "wait": ["wait for event 1"],
    }
    blocks = contiguous_blocks(host).values()
    assert device.pinned == [start for start, _ in page_ranges(blocks)] != []
    backend.close()
    assert device.pinned == []


def test_a_slot_is_ready_once_its_copy_has_ended():
    device = Device()
    with DoubleBufferReplayPipeline(
        Seeds(), sample_count=COUNT, packer="inline", transfer=modelled(device)
    ) as pipeline:
        pipeline.start_prepare(7, COUNT)
        assert pipeline.batch_ready(7, COUNT) is False  # nobody let the device work
        assert pipeline.wait_until_ready(7, COUNT) is True
        assert pipeline.batch_ready(7, COUNT) is True
        pipeline.sample_large_batch(7, COUNT)
        assert pipeline.last_metadata.batch_host_slot == 0
        assert pipeline.last_metadata.batch_gpu_slot == 0
        assert pipeline.h2d_submitter == "model"
        assert pipeline.transfer_manifest["pinned"] is True


def test_memory_outlasts_the_copies_though_nobody_closed():
    device = Device()
    backend = modelled(device)
    host = Seeds().empty_batch(COUNT)
    slot = backend.slot(host)
    host["observation"].fill_(3.0)
    slot.submit()
    there = weakref.ref(backend._blocks[0][1])
    alive = []
    device.streams[1].ask(lambda: alive.append(there() is not None))
    del host, slot, backend
    gc.collect()
    assert alive == [True]  # the copies were waited for, with their memory there
    assert there() is None
    assert device.pinned == []


# Blocks

DTYPES = [torch.float32, torch.float64, torch.int16, torch.uint8, torch.bool, torch.bfloat16]


@st.composite
def packed_batches(draw: st.DrawFn) -> TensorDict:
    """Fields side by side in rows, one table per dtype, in the middle of larger memory."""
    count = draw(st.integers(1, 5))
    fields: dict[str, torch.Tensor] = {}
    for dtype in draw(st.lists(st.sampled_from(DTYPES), min_size=1, unique=True)):
        widths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
        skipped = draw(st.integers(0, 3))
        table = torch.randint(0, 2, (count + skipped, sum(widths) + 1)).to(dtype)[skipped:]
        for index, column in enumerate(table[:, 1:].split(widths, dim=1)):
            fields[f"{dtype}-{index}"] = column
    return TensorDict(fields, [count])


@given(packed_batches())
@settings(max_examples=100)
def test_a_mirror_takes_one_copy_per_block_and_is_equal_afterwards(batch):
    there, pairs = mirror(batch, CPU)
    filled = [leaf for leaf in batch.values() if leaf.numel()]
    assert len(pairs) == len({leaf.untyped_storage().data_ptr() for leaf in filled})
    for target, source in pairs:
        target.copy_(source)
    assert set(there.keys()) == set(batch.keys())
    for key, leaf in batch.items():
        assert there[key].dtype == leaf.dtype
        assert there[key].stride() == leaf.stride()
        assert torch.equal(there[key], leaf)
        assert not leaf.numel() or there[key].data_ptr() != leaf.data_ptr()


def test_blocks_are_the_bytes_that_the_tensors_span_from_an_aligned_start():
    memory = torch.arange(64, dtype=torch.uint8)
    batch = TensorDict({"a": memory[20:24], "b": memory[30:34], "c": torch.zeros(4)}, [4])
    first, second = contiguous_blocks(batch).values()
    assert first.tolist() == list(range(16, 34))
    assert second.numel() == 16


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 30)), max_size=6))
@settings(max_examples=100)
def test_page_ranges_are_whole_pages_apart_and_just_those_that_blocks_lie_on(spans):
    memory = torch.zeros(300, dtype=torch.uint8)
    blocks = [memory[start : start + size] for start, size in spans]
    ranges = page_ranges(blocks, page=16)
    found = [page for start, size in ranges for page in range(start // 16, (start + size) // 16)]
    touched = {(block.data_ptr() + i) // 16 for block in blocks for i in range(block.numel())}
    assert found == sorted(touched)  # each once
    assert all(start % 16 == size % 16 == 0 for start, size in ranges)
    ends = [start + size for start, size in ranges]
    assert all(end < start for end, (start, _) in zip(ends, ranges[1:], strict=False))


# Without streams


def test_on_the_processor_the_host_batch_is_the_batch():
    host = Seeds().empty_batch(COUNT)
    backend: TransferBackend = CPUTransfer()
    slot = backend.slot(host)
    slot.wait_writable()
    slot.submit()
    slot.wait()
    assert slot.ready()
    assert slot.acquire() is host
    slot.release()
    backend.close()


def test_the_portable_copy_comes_after_the_device_s_work_and_is_waited_for():
    log = []
    host = Seeds().empty_batch(COUNT)
    backend = PortableTransfer(
        CPU, synchronize=lambda: log.append(float(slot.acquire()["next", "reward"][0]))
    )
    slot = backend.slot(host)
    for leaf in slot.acquire().values(True, True):
        leaf.fill_(5)
    host["next", "reward"].fill_(8.0)
    slot.submit()
    assert log == [5.0, 8.0]
    assert slot.ready()
    assert slot.acquire()["observation"].tolist() == [[-1.0] * 3] * COUNT
    backend.close()


def test_a_pipeline_over_the_portable_copy_says_where_its_batches_are():
    backend = PortableTransfer(CPU, synchronize=lambda: None)
    with DoubleBufferReplayPipeline(Seeds(), sample_count=COUNT, transfer=backend) as pipeline:
        for tick in range(5):
            batch = pipeline.sample_large_batch(tick, COUNT)
            pipeline.start_prepare(tick + 1, COUNT)
            pipeline.wait_ready()
            assert bool((batch["observation"] == tick).all())
            assert pipeline.last_metadata.batch_gpu_slot == tick % 2
            pipeline.after_tick()
        assert pipeline.h2d_submitter == "torch"


# Which backend


def test_a_device_that_is_not_there_is_refused():
    there = torch.accelerator.current_accelerator(check_available=True)
    absent = "mps" if there is None or there.type != "mps" else "cuda"
    with pytest.raises(ConfigError, match=rf"to {absent}: .* \(expected {absent}\)\. Use device="):
        make_transfer(absent)


def _library(code: int) -> SimpleNamespace:
    """A runtime whose copies are done at once and end with `code`."""
    pointer = ctypes.c_void_p
    kind = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, ctypes.c_size_t, ctypes.c_int, pointer)

    def copy(target: int, source: int, size: int, direction: int, stream: int | None) -> int:
        assert direction == 1  # to the device
        assert stream == 77
        ctypes.memmove(target, source, size)
        return code

    return SimpleNamespace(cudaMemcpyAsync=kind(copy))


def test_a_native_copy_copies_the_bytes_and_says_what_the_runtime_refused():
    source, target = torch.arange(40, dtype=torch.uint8), torch.zeros(48, dtype=torch.uint8)
    NativeCopy(_library(0))(target, source, 77)
    assert target.tolist() == [*range(40), *[0] * 8]
    with pytest.raises(OSError, match=r"cudaMemcpyAsync of 40 bytes: error 11 \(expected 0\)"):
        NativeCopy(_library(11))(target, source, 77)


@pytest.mark.parametrize(
    ("version", "reason"), [(None, "built without CUDA"), ("0.1", "libcudart.so.0")]
)
def test_without_the_cuda_runtime_there_is_no_native_copy(version, reason):
    with pytest.raises(OSError, match=reason):
        NativeCopy.load(version)


def test_why_there_is_no_native_copy_is_kept_and_logged_once(monkeypatch):
    def load() -> NativeCopy:
        raise OSError("this is a test")

    monkeypatch.setattr(NativeCopy, "load", load)
    streams = SimpleNamespace(native=None)
    reason = transfer._try_native(streams, CPU)
    assert reason == "no native copy: this is a test"
    assert streams.native is None

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    torchrl_logger.addHandler(handler)
    try:
        transfer._log_once(reason)
        transfer._log_once(reason)
    finally:
        torchrl_logger.removeHandler(handler)
    assert lines == ["replay transfer: no native copy: this is a test"]


# Real CUDA


@pytest.mark.gpu
@pytest.mark.parametrize("native_h2d", ["auto", "off"])
@pytest.mark.parametrize("packer", ["thread", "inline"])
def test_on_cuda_late_work_sees_its_own_tick_s_batch(packer, native_h2d):
    count, seen = 50_000, []
    with DoubleBufferReplayPipeline(
        Seeds(), sample_count=count, device="cuda", packer=packer, native_h2d=native_h2d
    ) as pipeline:
        assert pipeline.transfer_manifest["pinned"] is True
        assert pipeline.h2d_submitter == ("torch" if native_h2d == "off" else "native")
        for tick in range(30):
            batch = pipeline.sample_large_batch(tick, count)
            assert batch.device.type == "cuda"
            torch.cuda._sleep(2_000_000)  # the learner is late
            rows = batch["observation"]
            seen.append(torch.stack([rows.min(), rows.max(), batch["next", "reward"].mean()]))
            pipeline.after_tick()
            pipeline.start_prepare(tick + 1, count)
        torch.cuda.synchronize()
    assert torch.stack(seen).cpu().tolist() == [[tick] * 3 for tick in range(30)]


@pytest.mark.gpu
def test_on_cuda_shared_host_memory_is_page_locked_and_unlocked():
    device = torch.device("cuda", torch.cuda.current_device())
    host = Seeds().empty_batch(COUNT, shared=True)
    backend = make_transfer(device)
    slot = backend.slot(host)
    assert host["observation"].is_pinned()
    slot.submit()
    assert torch.equal(slot.acquire()["observation"].cpu(), host["observation"])
    backend.close()
    backend.close()
    assert not host["observation"].is_pinned()
