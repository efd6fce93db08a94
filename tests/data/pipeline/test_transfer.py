"""Transfer to devices: blocks, and the order of copies and work on a model of ``torch.cuda``."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from torch.overrides import TorchFunctionMode

from torchrl_unilab.data import PackedReplayStorage
from torchrl_unilab.data.pipeline.pipeline import DoubleBufferReplayPipeline
from torchrl_unilab.data.pipeline.transfer import (
    CUDATransfer,
    HostTransfer,
    PortableTransfer,
    mirror,
    transfer_to,
)
from torchrl_unilab.data.replay.gather import ReplaySnapshot
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.runtime import trace

CPU = torch.device("cpu")
COUNT = 6


class Seeds(PackedReplayStorage):
    """Rows that hold the seed they were drawn with."""

    def snapshot(self) -> ReplaySnapshot:
        return ReplaySnapshot(COUNT, COUNT)

    def empty_batch(self, count: int, *, pin_memory: bool = False) -> TensorDict:
        rows = torch.full((count, 4), -1.0, pin_memory=pin_memory)
        flags = torch.zeros(count, dtype=torch.uint8, pin_memory=pin_memory)
        fields = {"observation": rows[:, :3], "next": {"reward": rows[:, 3:]}}
        return TensorDict({**fields, "done": flags.view(torch.bool)}, [count])

    def sample(self, count: int, *, seed: int, out: TensorDict, **_: object) -> TensorDict:
        for leaf in out.values(True, True):
            leaf.fill_(seed)
        return out


# A model of torch.cuda that is as late as it is allowed to be


class Cuda:
    """Streams whose work is done in any order that they allow."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.streams: list[ModelStream] = []
        self.calls: list[str] = []
        self.events = 0
        self.learner = self.Stream(CPU)

    def progress(self) -> bool:
        """Do a piece of work, if any can be done."""
        able = [stream for stream in self.streams if stream.work and stream.work[0][0]()]
        if able:
            self.random.choice(able).work.popleft()[1]()
        return bool(able)

    def run_until(self, happened: Callable[[], bool]) -> None:
        while not happened():
            assert self.progress(), "deadlock"

    def Stream(self, device: torch.device) -> ModelStream:  # noqa: N802  # torch.cuda's name
        self.streams.append(ModelStream(self, ["learner", "copier"][len(self.streams)]))
        return self.streams[-1]

    def Event(self, *, enable_timing: bool = False) -> ModelEvent:  # noqa: N802
        self.events += 1
        return ModelEvent(self, self.events, enable_timing)

    def current_stream(self, device: torch.device) -> ModelStream:
        return self.learner

    @contextlib.contextmanager
    def stream(self, stream: ModelStream) -> Iterator[None]:
        with CopiesOn(stream):
            yield


class ModelStream:
    def __init__(self, cuda: Cuda, name: str) -> None:
        self.cuda = cuda
        self.name = name
        self.work: deque[tuple[Callable[[], bool], Callable[[], Any]]] = deque()

    def ask(self, work: Callable[[], Any], may: Callable[[], bool] = lambda: True) -> None:
        self.work.append((may, work))

    def wait_event(self, event: ModelEvent) -> None:
        self.cuda.calls.append(f"{self.name}: wait for {event.name}")
        passed = event.passed  # what was recorded last by now
        self.ask(lambda: None, lambda: all(passed))

    def synchronize(self) -> None:
        self.cuda.calls.append(f"{self.name}: synchronize")
        self.cuda.run_until(lambda: not self.work)


class ModelEvent:
    def __init__(self, cuda: Cuda, number: int, timed: bool) -> None:
        self.cuda, self.timed = cuda, timed
        self.name = f"event {number}"
        self.passed: list[bool] = []

    def elapsed_time(self, end: ModelEvent) -> float:
        assert all(event.timed and event.query() for event in (self, end))
        return 1.5

    def record(self, stream: ModelStream) -> None:
        self.cuda.calls.append(f"{stream.name}: record {self.name}")
        passed = self.passed = [False]
        stream.ask(lambda: passed.__setitem__(0, True))

    def query(self) -> bool:
        return all(self.passed)

    def synchronize(self) -> None:
        self.cuda.calls.append(f"wait for {self.name}")
        self.cuda.run_until(self.query)


class CopiesOn(TorchFunctionMode):
    """Copies between tensors are work of a stream, done in two halves."""

    def __init__(self, stream: ModelStream) -> None:
        super().__init__()
        self.on = stream

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not torch.Tensor.copy_:
            return func(*args, **(kwargs or {}))
        target, source = args
        assert kwargs == {"non_blocking": True}
        self.on.cuda.calls.append(f"{self.on.name}: copy {source.numel()}")
        for part in (slice(0, source.numel() // 2), slice(source.numel() // 2, None)):
            self.on.ask(partial(self.now, target[part], source[part]))
        return target

    @staticmethod
    def now(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)


def pipeline_on(cuda: Cuda, **settings: Any) -> DoubleBufferReplayPipeline:
    transfer = partial(CUDATransfer, device=CPU, cuda=cuda)
    return DoubleBufferReplayPipeline(
        Seeds(COUNT), sample_count=COUNT, packer="inline", transfer=transfer, **settings
    )


def learn(cuda: Cuda, tick: int, batch: TensorDictBase, seen: list[tuple[int, float]]) -> None:
    """Ask the learner's stream to look at a batch twice."""
    for _ in range(2):
        for leaf in batch.values(True, True):
            cuda.learner.ask(lambda leaf=leaf: seen.extend((tick, x) for x in leaf.unique()))


@given(seed=st.integers(0, 2**32), early=st.lists(st.booleans(), min_size=8, max_size=8))
def test_however_late_the_device_is_the_learner_s_work_sees_its_own_tick_s_batch(seed, early):
    """A tick ends before the next one is prepared where `early` says so, else after that."""
    cuda, seen = Cuda(seed), []
    with pipeline_on(cuda, base_seed=1) as pipeline:
        for tick, before in enumerate(early):
            batch = pipeline.sample_large_batch(tick, COUNT)
            learn(cuda, tick, batch, seen)
            for _ in range(cuda.random.randrange(12)):
                cuda.progress()
            if before:
                pipeline.after_tick()
            if cuda.random.random() < 0.7:
                pipeline.start_prepare(tick + 1, COUNT)
            pipeline.after_tick()
        cuda.learner.synchronize()
    assert {tick for tick, _ in seen} == set(range(len(early)))
    assert [pair for pair in seen if pair[1] not in (pair[0] + 1, True)] == []


def test_each_step_of_a_slot_waits_for_what_it_must_and_for_nothing_else():
    cuda = Cuda()
    transfer = CUDATransfer([Seeds(COUNT).empty_batch(COUNT)], CPU, cuda=cuda)
    steps = {"made": list(cuda.calls)}
    for step in ("wait", "submit", "acquire", "release"):
        cuda.calls.clear()
        getattr(transfer, step)(0)
        steps[step] = list(cuda.calls)
    # event 1: the copy has ended; event 2: the learner has finished
    assert steps == {
        "made": ["learner: record event 2"],
        "wait": ["wait for event 1"],
        "submit": [
            "copier: wait for event 2",
            "copier: copy 96",
            "copier: copy 6",
            "copier: record event 1",
        ],
        "acquire": ["learner: wait for event 1"],
        "release": ["learner: record event 2"],
    }


def test_a_trace_has_the_time_of_each_copy_from_the_end_of_the_learner_s_work_on(tmp_path):
    cuda = Cuda()
    transfer = CUDATransfer([Seeds(COUNT).empty_batch(COUNT)], CPU, cuda=cuda)
    transfer.submit(0)  # before the trace
    trace.start(tmp_path / "trace.json")
    transfer.wait(0)
    cuda.calls.clear()
    transfer.submit(0)
    assert cuda.calls[:2] == ["copier: wait for event 2", "copier: record event 3"]
    for _ in range(2):
        transfer.wait(0)
    events = json.loads(trace.stop().read_text())["traceEvents"]
    copies = [event["args"]["value"] for event in events if event["name"] == "replay_copy_ms"]
    assert copies == [1.5]


def test_a_tick_is_ready_once_its_copy_has_ended():
    with pipeline_on(Cuda()) as pipeline:
        pipeline.start_prepare(7, COUNT)
        assert pipeline.batch_ready(7, COUNT) is False  # the device has not worked yet
        assert pipeline.wait_until_ready(7, COUNT) is True
        assert pipeline.batch_ready(7, COUNT) is True


def test_sampling_does_not_wait_for_the_device():
    cuda = Cuda()
    with pipeline_on(cuda) as pipeline:
        pipeline.sample_large_batch(7, COUNT)
        assert pipeline._transfer.ready(0) is False


def test_memory_outlasts_the_copies_without_a_close():
    cuda = Cuda()
    host = Seeds(COUNT).empty_batch(COUNT)
    transfer = CUDATransfer([host], CPU, cuda=cuda)
    transfer.submit(0)
    there = weakref.ref(transfer._blocks[0][0][0])
    alive: list[bool] = []
    cuda.streams[1].ask(lambda: alive.append(there() is not None))

    del host, transfer
    gc.collect()

    assert alive == [True]  # the copies were waited for, with their memory there
    assert there() is None


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
def test_a_mirror_takes_one_copy_per_block_and_is_equal_afterwards(batch):
    there, blocks = mirror(batch, CPU)
    assert len(blocks) == len({leaf.untyped_storage().data_ptr() for leaf in batch.values()})
    for target, source in blocks:
        target.copy_(source)
    assert set(there.keys()) == set(batch.keys())
    for key, leaf in batch.items():
        assert there[key].dtype == leaf.dtype
        assert there[key].stride() == leaf.stride()
        assert torch.equal(there[key], leaf)
        assert not leaf.numel() or there[key].data_ptr() != leaf.data_ptr()


# Without streams


def test_on_the_processor_the_host_batch_is_the_batch():
    host = Seeds(COUNT).empty_batch(COUNT)
    transfer = HostTransfer([host])
    transfer.submit(0)
    assert transfer.ready(0)
    assert transfer.acquire(0) is host


def test_the_portable_copy_is_made_once_by_the_thread_that_takes_the_batch():
    host = Seeds(COUNT).empty_batch(COUNT)
    transfer = PortableTransfer([host], CPU)
    there = transfer.acquire(0)
    there["next", "reward"].fill_(5.0)
    host["next", "reward"].fill_(8.0)

    transfer.submit(0)
    assert bool((there["next", "reward"] == 5.0).all())
    assert bool((transfer.acquire(0)["next", "reward"] == 8.0).all())

    host["next", "reward"].fill_(9.0)
    assert bool((transfer.acquire(0)["next", "reward"] == 8.0).all())


@pytest.mark.parametrize("packer", ["thread", "inline"])
def test_a_pipeline_over_the_portable_copy_says_where_its_batches_are(packer):
    transfer = partial(PortableTransfer, device=CPU)
    with DoubleBufferReplayPipeline(
        Seeds(COUNT), sample_count=COUNT, transfer=transfer, packer=packer
    ) as pipeline:
        for tick in range(5):
            batch = pipeline.sample_large_batch(tick, COUNT)
            pipeline.start_prepare(tick + 1, COUNT)
            pipeline.wait_ready()
            assert bool((batch["observation"] == tick).all())
            assert pipeline.last_metadata.batch_gpu_slot == tick % 2
            pipeline.after_tick()
        assert pipeline.h2d_submitter == "learner"


def test_a_device_that_is_not_there_is_refused():
    there = torch.accelerator.current_accelerator(check_available=True)
    absent = "mps" if there is None or there.type != "mps" else "cuda"
    with pytest.raises(ConfigError, match=rf"to {absent}: .* \(expected {absent}\)\. Use device="):
        transfer_to(torch.device(absent))


@pytest.mark.parametrize(("device", "index"), [("cuda", 1), ("cuda:0", 0)])
def test_a_gpu_without_a_number_is_the_current_one(device, index, monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert transfer_to(torch.device(device)).keywords["device"] == torch.device("cuda", index)


# Real CUDA


@pytest.mark.gpu
@pytest.mark.parametrize("packer", ["thread", "inline"])
def test_on_cuda_late_work_sees_its_own_tick_s_batch(packer):
    count, seen = 50_000, []
    with DoubleBufferReplayPipeline(
        Seeds(COUNT), sample_count=count, device="cuda", packer=packer
    ) as pipeline:
        assert pipeline.transfer_manifest["pinned"] is True
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
