from __future__ import annotations

import contextlib
import gc
import multiprocessing as mp
import os
import pickle
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.processes import DEADLINE, receive, spawned
from tests.support.rings import (
    hold_one,
    make_ring,
    stamp,
    stamped,
    write_half,
    write_one_each,
    write_to_order,
    write_until_refused,
)
from torchrl_unilab.errors import (
    ConfigError,
    LayoutDigestError,
    LayoutDtypeError,
    LayoutKeyError,
    LayoutShapeError,
    PeerGoneError,
    RingTimeoutError,
    SegmentClosedError,
    SegmentError,
    SegmentSpaceError,
)
from torchrl_unilab.shm import RolloutRing, SharedSegment
from torchrl_unilab.shm import ring as ring_module
from torchrl_unilab.shm.ring import RolloutBlock
from torchrl_unilab.shm.segment import named_directory

OVERFLOW = pytest.mark.parametrize("overflow", ["overwrite", "block"])
NAME = f"unilab-test-{os.getpid()}-ring"


def _files() -> set[str]:
    return {name for name in os.listdir(named_directory()) if name.startswith(NAME)}


def _descriptors() -> int:
    """How many descriptors this process holds, without those of garbage."""
    gc.collect()
    return psutil.Process().num_fds()


def _one(value: float) -> dict[str, torch.Tensor]:
    return {"x": torch.full((3,), float(value))}


class Oracle:
    """What a ring is to do, in deques."""

    def __init__(self, slots: int, writers: int, overflow: str) -> None:
        self.free = deque(range(slots))
        self.ready: deque[tuple[int, int, int]] = deque()  # slot, writer, sequence
        self.claimed: list[int | None] = [None] * writers
        self.written, self.dropped, self.read = [0] * writers, [0] * writers, 0
        self.overwrites = overflow == "overwrite"
        self.awaited: tuple[int, int, int] | None = None
        self.current: tuple[int, int, int] | None = None

    def claim(self, writer: int) -> int | None:
        if self.claimed[writer] is None:
            if self.free:
                self.claimed[writer] = self.free.popleft()
            elif self.overwrites and self.ready:
                self.claimed[writer], robbed, _ = self.ready.popleft()
                self.dropped[robbed] += 1
        return self.claimed[writer]

    def commit(self, writer: int) -> int:
        self.written[writer] += 1
        self.ready.append((self.claimed[writer], writer, self.written[writer]))
        self.claimed[writer] = None
        return self.written[writer]

    def acquire(self) -> tuple[int, int, int] | None:
        if self.awaited is not None:
            taken, self.awaited = self.awaited, None
            return taken
        return self.ready.popleft() if self.ready else None

    def release(self, taken: tuple[int, int, int]) -> None:
        self.free.append(taken[0])
        self.read += 1


_KINDS = ["claim", "write", "write", "commit", "abandon"]
_KINDS += ["acquire", "release", "wait", "read", "advance"]
ACTIONS = st.tuples(st.sampled_from(_KINDS), st.integers(0, 2))


def _value(writer: int, sequence: int) -> float:
    return 1000.0 * writer + sequence


@OVERFLOW
@settings(max_examples=60)
@given(st.integers(1, 4), st.integers(1, 3), st.lists(ACTIONS, max_size=40))
def test_a_ring_does_what_a_serial_oracle_does(overflow, slots, writers, actions):
    oracle = Oracle(slots, writers, overflow)
    leases: list[tuple[object, tuple[int, int, int]]] = []
    with contextlib.ExitStack() as stack:
        new = RolloutRing(_one(0), slots=slots, writers=writers, overflow=overflow, name=NAME)
        ring = stack.enter_context(new)
        ends = [stack.enter_context(RolloutRing.attach(NAME, _one(0))) for _ in range(writers)]
        for writer, end in enumerate(ends):
            end.use_writer(writer)
        for action, which in actions:
            writer = which % writers
            end = ends[writer]
            if action in ("claim", "write"):
                assert end.claim(timeout=0) == oracle.claim(writer)
            if action in ("write", "commit"):
                if oracle.claimed[writer] is not None:
                    end.write_buffer["x"].fill_(_value(writer, oracle.written[writer] + 1))
                    assert end.signal_write_done() == oracle.commit(writer)
                elif action == "write":
                    assert not end.write(_one(0), timeout=0)
                else:
                    with pytest.raises(RuntimeError, match="no slot is claimed"):
                        end.signal_write_done()
            elif action == "abandon":
                end.abandon_write()
                if oracle.claimed[writer] is not None:
                    oracle.free.append(oracle.claimed[writer])
                    oracle.claimed[writer] = None
            elif action == "acquire":
                lease, taken = ring.acquire(), oracle.acquire()
                assert (lease and tuple(lease.token[:3])) == taken
                if lease is not None:
                    leases.append((lease, taken))
            elif action == "release" and leases:
                lease, taken = leases.pop(which % len(leases))
                assert lease.views["x"].tolist() == [_value(*taken[1:])] * 3
                ring.release(lease)
                oracle.release(taken)
            elif action == "wait":
                oracle.awaited = oracle.acquire()
                assert ring.wait_for_data(timeout=0) == (oracle.awaited is not None)
            elif action == "read":
                oracle.current = oracle.current or oracle.acquire()
                if oracle.current is None:
                    with pytest.raises(RingTimeoutError, match="no rollout is ready"):
                        ring.read()
                else:
                    assert ring.read_slot == oracle.current[0]
                    assert ring.read()["x"].tolist() == [_value(*oracle.current[1:])] * 3
            elif action == "advance":
                if oracle.current is None:
                    with pytest.raises(RuntimeError, match="no slot is being read"):
                        ring.advance_read()
                else:
                    ring.advance_read()
                    oracle.release(oracle.current)
                    oracle.current = None
            assert ring.available() == len(oracle.ready) + (oracle.awaited is not None)
            assert ring.written == tuple(oracle.written)
            assert ring.write_count == sum(oracle.written)
            assert ring.read_count == oracle.read
            assert ring.dropped == tuple(oracle.dropped)


def test_each_dtype_and_nested_key_arrives_bit_for_bit():
    rollout = {
        "observation": torch.randn(4, 3, dtype=torch.float64),
        "next.done": torch.tensor([[True], [False], [True]]),
        "next.agents.count": torch.tensor([2**53 + 1, -1]),
        "action.loc": torch.randn(5).bfloat16(),
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 3),
        "strided": torch.randn(4, 6).t()[::2],
    }
    with RolloutRing(rollout) as ring:
        assert ring.slot_shapes == {key: tuple(value.shape) for key, value in rollout.items()}
        ring.write(rollout)
        read = ring.read(device="cpu")
        assert list(read) == list(rollout)
        copied = {key: torch.zeros_like(value) for key, value in rollout.items()}
        ring.copy_read_slot_to(copied)
        for key, value in rollout.items():
            for arrived in (read[key], copied[key]):
                assert arrived.dtype is value.dtype
                assert torch.equal(arrived, value)


def test_a_slot_is_filled_in_place_committed_read_and_given_back():
    with make_ring(slots=2) as ring:
        slot = ring.write_slot
        assert ring.write_slot == slot
        for key, tensor in ring.write_buffer.items():
            tensor.copy_(stamped(0, 1)[key])
        assert ring.available() == 0
        assert ring.signal_write_done() == 1
        assert ring.available() == 1
        assert ring.wait_for_data(timeout=0)
        assert ring.read_slot == slot
        with ring.read_views() as views:
            assert stamp(views) == (0, 1)
            assert views["first"].data_ptr() == ring._tensors[slot][0].data_ptr()
        ring.advance_read()
        assert (ring.write_count, ring.read_count, ring.available()) == (1, 1, 0)


def test_a_copy_that_was_read_does_not_change_when_its_slot_is_filled_again():
    with RolloutRing(_one(0), slots=1) as ring:
        ring.write(_one(1))
        read = ring.read()
        ring.advance_read()
        ring.write(_one(2))
        assert read["x"].tolist() == [1.0] * 3


def filled(ring: RolloutRing, sequence: int) -> RolloutBlock:
    block = ring.blank()
    for key, tensor in stamped(0, sequence).items():
        block[key].copy_(tensor)
    return block


def test_a_block_moves_in_one_copy_and_equals_what_its_tensors_would_have_been(monkeypatch):
    with make_ring(slots=2) as ring:
        first, second, out = filled(ring, 1), stamped(0, 2), ring.blank()
        ring.write(first)
        ring.write(second)
        with monkeypatch.context() as patch:
            patch.delattr(torch, "_foreach_copy_")
            ring.copy_read_slot_to(out)
        assert stamp(out) == (0, 1)
        assert set(out) == set(second)
        ring.advance_read()
        ring.copy_read_slot_to(out)
        assert stamp(out) == (0, 2)
        first["first"][0] = 7  # private: no slot shows it
        assert stamp(ring.read()) == (0, 2)


def test_a_block_of_another_ring_is_taken_if_its_layout_is_equal_and_refused_else():
    with make_ring() as ring, make_ring() as equal, RolloutRing({"x": torch.zeros(1)}) as other:
        assert equal.write(filled(ring, 1))
        assert stamp(equal.read()) == (0, 1)
        with pytest.raises(LayoutKeyError, match="missing"):
            equal.write(other.blank())
        with pytest.raises(LayoutKeyError, match="destination"):
            equal.copy_read_slot_to(other.blank())
        assert equal.write_count == 1


def test_tensors_that_require_a_gradient_are_written_as_plain_values():
    with RolloutRing(_one(0)) as ring:
        ring.write({"x": torch.ones(3, requires_grad=True)})
        assert not ring.read()["x"].requires_grad


def test_waiting_in_vain_ends_in_time():
    with make_ring() as ring:
        started = time.monotonic()
        assert not ring.wait_for_data(timeout=0.25)
        assert 0.25 <= time.monotonic() - started < 5.0


@pytest.mark.parametrize("timeout", [DEADLINE, None])
def test_waiting_ends_when_a_rollout_is_committed(timeout):
    with (
        make_ring(name=NAME) as ring,
        RolloutRing.attach(NAME, stamped(0, 0)) as end,
        ThreadPoolExecutor(1) as pool,
    ):
        waited = pool.submit(ring.wait_for_data, timeout)
        end.write(stamped(0, 1))
        assert waited.result(DEADLINE)
        assert stamp(ring.read()) == (0, 1)


def test_a_blocked_write_ends_when_a_slot_is_released():
    with (
        make_ring(slots=1, overflow="block", name=NAME) as ring,
        RolloutRing.attach(NAME, stamped(0, 0)) as end,
        ThreadPoolExecutor(1) as pool,
    ):
        end.write(stamped(0, 1))
        assert not end.write(stamped(0, 2), timeout=0)
        written = pool.submit(end.write, stamped(0, 2), DEADLINE)
        assert stamp(ring.read()) == (0, 1)
        ring.advance_read()
        assert written.result(DEADLINE)
        assert stamp(ring.read()) == (0, 2)


def test_a_rollout_that_was_waited_for_is_not_overwritten_before_it_is_read():
    with make_ring(slots=2) as ring:
        ring.write(stamped(0, 1))
        assert ring.wait_for_data(timeout=0)
        for sequence in (2, 3, 4):
            assert ring.write(stamped(0, sequence), timeout=0)
        assert ring.available() == 2
        assert stamp(ring.read()) == (0, 1)
        ring.advance_read()
        assert stamp(ring.read()) == (0, 4)
        assert ring.dropped == (2,)


def test_the_descriptor_is_readable_while_a_rollout_is_ready():
    with make_ring() as ring:
        assert mp.connection.wait([ring], timeout=0) == []
        ring.write(stamped(0, 1))
        assert mp.connection.wait([ring], timeout=DEADLINE) == [ring]


def test_borrowed_views_are_not_given_back():
    with make_ring() as ring:
        ring.write(stamped(0, 1))
        with ring.read_views():
            ring.copy_read_slot_to(stamped(0, 0))  # a borrow within the borrow
            with pytest.raises(RuntimeError, match="its views are borrowed"):
                ring.advance_read()
        ring.advance_read()
        assert ring.read_count == 1


def test_an_error_within_a_borrow_passes_and_ends_it():
    with make_ring() as ring:
        ring.write(stamped(0, 1))
        with pytest.raises(ZeroDivisionError), ring.read_views():
            _ = 1 / 0
        assert stamp(ring.read()) == (0, 1)
        ring.advance_read()


@pytest.mark.parametrize(
    ("change", "error", "builtin"),
    [
        (lambda d: d.pop("first"), LayoutKeyError, KeyError),
        (lambda d: d.update(first=torch.zeros(3, dtype=torch.int64)), LayoutShapeError, ValueError),
        (lambda d: d.update(first=d["first"].double()), LayoutDtypeError, TypeError),
    ],
)
def test_a_destination_that_does_not_fit_is_refused_and_nothing_is_lost(change, error, builtin):
    with make_ring() as ring:
        ring.write(stamped(0, 5))
        destination = stamped(0, 0)
        change(destination)
        with pytest.raises(error) as refused:
            ring.copy_read_slot_to(destination)
        assert isinstance(refused.value, builtin)
        assert "first" in str(refused.value)
        assert not destination["next.last"].any()
        assert ring.available() == 1
        whole = stamped(0, 0) | {"of no field": torch.zeros(1)}
        ring.copy_read_slot_to(whole)
        assert stamp(whole) == (0, 5)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda d: d.pop("first"), LayoutKeyError),
        (lambda d: d.update(other=torch.zeros(1)), LayoutKeyError),
        (lambda d: d.update(first=torch.zeros(3, dtype=torch.int64)), LayoutShapeError),
        (lambda d: d.update(first=d["first"].double()), LayoutDtypeError),
    ],
)
def test_a_rollout_that_does_not_fit_is_refused_and_nothing_is_claimed_or_lost(change, error):
    with make_ring(slots=1) as ring:
        ring.write(stamped(0, 5))
        rollout = stamped(0, 6)
        change(rollout)
        with pytest.raises(error):
            ring.write(rollout)
        assert (ring.write_count, ring.dropped, ring.available()) == (1, (0,), 1)
        ring.use_writer(0)  # refused if a slot were claimed
        assert stamp(ring.read()) == (0, 5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slots": 0}, "slots: 0 .*expected 1 to"),
        ({"slots": 100_000}, "slots: 100000 .*expected 1 to"),
        ({"writers": 0}, "writers: 0 .*expected 1 to"),
        ({"overflow": "wait"}, "overflow: 'wait' .*'overwrite', 'block'"),
        ({"kind": "anonymous", "name": NAME}, "anonymous segment"),
        ({"name": "a/b"}, "plain file name"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    before = _descriptors()
    with pytest.raises(ConfigError, match=message):
        RolloutRing(_one(0), **settings)
    assert _descriptors() == before
    assert not _files()


def test_as_many_slots_as_are_allowed_fit_the_pipes():
    with RolloutRing(_one(0), slots=ring_module.MAX_SLOTS) as ring:
        for lap in range(3):
            for value in range(ring_module.MAX_SLOTS):
                ring.write(_one(value))
            assert ring.available() == ring_module.MAX_SLOTS
            for value in range(100 * lap):
                assert ring.read()["x"][0].item() == value
                ring.advance_read()
            ring.write(_one(0), timeout=0)


@pytest.mark.parametrize("kind", ["anonymous", "named"])
def test_a_ring_larger_than_shared_memory_is_refused_and_says_what_would_fit(kind, monkeypatch):
    rollout, asked = stamped(0, 0), []
    layout = ring_module.BlockLayout.of(rollout)
    room = ring_module.ring_nbytes(layout, 3, 2)

    def free_bytes(kind: str) -> int:
        asked.append(kind)
        return room

    monkeypatch.setattr(ring_module, "free_bytes", free_bytes)
    RolloutRing(rollout, slots=3, writers=2, kind=kind).close()
    monkeypatch.setattr(ring_module, "SharedSegment", pytest.fail)
    with pytest.raises(SegmentSpaceError, match=rf"a ring of 4 slots.*at most {room}.*3 slots of"):
        RolloutRing(rollout, slots=4, writers=2, kind=kind)
    room -= 1
    with pytest.raises(SegmentSpaceError, match=r"a ring of 3 slots.*holds 2 slots of"):
        RolloutRing(rollout, slots=3, writers=2, kind=kind)
    room = 10  # not even the words
    with pytest.raises(SegmentSpaceError, match="holds 0 slots"):
        RolloutRing(rollout, kind=kind)
    assert set(asked) == {kind}


@pytest.mark.parametrize("writer", [-1, 2])
def test_an_unknown_writer_is_refused(writer):
    with make_ring(writers=2) as ring, pytest.raises(ConfigError, match="expected 0 to 1"):
        ring.use_writer(writer)


def test_a_writer_is_not_changed_while_a_slot_is_claimed():
    with make_ring(writers=2) as ring:
        ring.claim()
        with pytest.raises(RuntimeError, match="is being written"):
            ring.use_writer(1)
        ring.abandon_write()
        ring.use_writer(1)
        ring.write(stamped(1, 1))
        assert ring.written == (0, 1)


@pytest.mark.parametrize("named", [False, True])
def test_a_closed_ring_refuses_every_use_and_leaves_nothing(named):
    before = _descriptors()
    ring = make_ring(name=NAME if named else None)
    assert len(_files()) == (3 if named else 0)
    assert not ring.closed
    ring.close()
    ring.close()
    ring.cleanup()
    assert ring.closed
    assert not _files()
    assert _descriptors() == before
    for use in (
        lambda: ring.claim(),
        lambda: ring.write_slot,
        lambda: ring.write_buffer,
        lambda: ring.signal_write_done(),
        lambda: ring.abandon_write(),
        lambda: ring.write(stamped(0, 1)),
        lambda: ring.use_writer(0),
        lambda: ring.recover(0),
        lambda: ring.available(),
        lambda: ring.fileno(),
        lambda: ring.wait_for_data(0),
        lambda: ring.acquire(),
        lambda: ring.read_slot,
        lambda: ring.read_views().__enter__(),
        lambda: ring.copy_read_slot_to(stamped(0, 0)),
        lambda: ring.read(),
        lambda: ring.advance_read(),
        lambda: ring.write_count,
        lambda: ring.written,
        lambda: ring.read_count,
        lambda: ring.dropped,
        lambda: pickle.dumps(ring),
    ):
        with pytest.raises(SegmentClosedError):
            use()


def test_a_ring_that_is_forgotten_leaves_nothing():
    before = _descriptors()
    make_ring(name=NAME)
    make_ring()
    assert _descriptors() == before
    assert not _files()


def test_a_borrowed_view_stays_readable_after_the_close():
    ring = make_ring()
    ring.write(stamped(0, 3))
    with ring.read_views() as views:
        pass
    ring.close()
    assert stamp(views) == (0, 3)


def test_a_ring_that_is_closed_while_it_is_borrowed_says_so_at_the_end():
    with make_ring() as ring:
        ring.write(stamped(0, 3))
        borrow = ring.read_views()
        views = borrow.__enter__()
        ring.close()
        assert stamp(views) == (0, 3)
        with pytest.raises(SegmentClosedError):
            borrow.__exit__(None, None, None)


def test_only_the_creator_removes_the_files():
    with make_ring(name=NAME):
        RolloutRing.attach(NAME, stamped(0, 0)).close()
        assert len(_files()) == 3
    assert not _files()


def test_a_ring_is_attached_by_name_only_if_it_is_one_of_that_layout():
    before = _descriptors()
    with pytest.raises(SegmentError, match="no segment"):
        RolloutRing.attach(NAME, _one(0))
    with make_ring(name=NAME) as ring:
        with pytest.raises(LayoutDigestError, match="layout digest"):
            RolloutRing.attach(NAME, stamped(0, 0, elements=4))
        ring._header[ring_module.READY] = 0  # as before its creator has finished it
        with pytest.raises(LayoutDigestError, match="not a complete rollout ring"):
            RolloutRing.attach(NAME, stamped(0, 0))
    for nbytes in (64, 4096):
        with (
            SharedSegment(nbytes, name=NAME),  # zero-filled, and no ring
            pytest.raises(LayoutDigestError, match="not a complete rollout ring"),
        ):
            RolloutRing.attach(NAME, stamped(0, 0))
    assert _descriptors() == before


@pytest.mark.parametrize("taken", ["", ".free", ".ready"])
def test_a_name_that_is_taken_is_refused_and_nothing_is_left(taken):
    path = named_directory() / (NAME + taken)
    path.touch()
    try:
        before = _descriptors()
        with pytest.raises(SegmentError, match="expected a new name"):
            make_ring(name=NAME)
        assert _descriptors() == before
        assert _files() == {path.name}
    finally:
        path.unlink()


SHAPES = {"first": (2048,), "next.last": (1024, 2)}


def test_another_process_shares_a_ring_that_it_is_given_or_attaches_by_name():
    settings = {"slots": 3, "writers": 2, "overflow": "block"}
    with (
        make_ring(kind="anonymous", **settings) as anonymous,
        make_ring(kind="named", **settings) as generated,
        make_ring(name=NAME, **settings) as named,
    ):
        rings = (anonymous, generated, named)
        assert anonymous.name is None
        assert generated.name not in (None, NAME)
        with spawned(write_one_each, [anonymous, generated, NAME]) as (_, pipe):
            for ring in rings:
                assert receive(pipe) == (3, 2, "block", ring.name, SHAPES)
                assert ring.wait_for_data(DEADLINE)
                assert stamp(ring.read()) == (1, 7)
                ring.advance_read()
                assert ring.written == (0, 1)
        # It has ended, but it had closed the rings: nobody misses it as a dead writer.
        assert not any(ring.wait_for_data(0) for ring in rings)
        assert len(_files()) == 3
    assert not (named_directory() / generated.name).exists()


@pytest.mark.parametrize("named", [False, True])
def test_a_forked_child_that_ends_leaves_its_parents_ring_as_it_is(named):
    with make_ring(slots=1, overflow="block", name=NAME if named else None) as ring:
        ring.write(stamped(0, 1))
        assert ring.wait_for_data(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
            child = mp.get_context("fork").Process(target=ring.close)
            child.start()
        child.join(DEADLINE)
        assert child.exitcode == 0
        child.close()
        assert len(_files()) == (3 if named else 0)
        assert not ring.write(stamped(0, 2), timeout=0)  # its reader is not taken for gone
        assert stamp(ring.read()) == (0, 1)
        ring.advance_read()
        assert ring.write(stamped(0, 2), timeout=0)


# Slots that are written while the reader holds them


def _write_astray(ring: RolloutRing, slot: int, *, to_the_end: bool) -> None:
    """Fill a slot as a writer does, but without its token."""
    ring._generations[slot] = (ring._generations[slot] + 1) | 1
    ring._tensors[slot][0].fill_(9)
    if to_the_end:
        ring._generations[slot] += 1


@contextlib.contextmanager
def _nothing_borrowed(ring: RolloutRing) -> Iterator[None]:
    yield
    ring.advance_read()


@pytest.mark.parametrize("to_the_end", [False, True])
@pytest.mark.parametrize("borrow", [RolloutRing.read_views, _nothing_borrowed])
def test_a_slot_that_is_written_while_it_is_read_is_noticed(borrow, to_the_end):
    with make_ring() as ring:
        ring.write(stamped(0, 1))
        slot = ring.read_slot
        with (
            pytest.raises(SegmentError, match=rf"slot {slot}: .*written without a claim"),
            borrow(ring),
        ):
            _write_astray(ring, slot, to_the_end=to_the_end)


@pytest.mark.parametrize(
    "read",
    [
        RolloutRing.read,
        lambda r: r.copy_read_slot_to(stamped(0, 0)),
        lambda r: r.copy_read_slot_to(r.blank()),
    ],
)
def test_a_slot_that_is_written_while_it_is_copied_is_noticed(read, monkeypatch):
    with make_ring() as ring:
        ring.write(stamped(0, 1))
        slot, copies = ring.read_slot, []

        def copy(*_: object, **__: object) -> None:
            _write_astray(ring, slot, to_the_end=False)
            copies.append(None)

        monkeypatch.setattr(torch.Tensor, "to", copy)
        monkeypatch.setattr(torch.Tensor, "copy_", copy)
        monkeypatch.setattr(torch, "_foreach_copy_", copy)
        with pytest.raises(SegmentError, match="written without a claim"):
            read(ring)
        assert copies


def test_a_slot_that_is_written_after_its_commit_is_noticed_before_it_is_read():
    with make_ring() as ring:
        slot = ring.write_slot
        ring.write(stamped(0, 1))
        _write_astray(ring, slot, to_the_end=True)
        with pytest.raises(SegmentError, match=r"generation 4 \(expected 2, as writer 0"):
            ring.acquire()


# Writers and readers at the same time

WRITERS, EACH = 3, 250


@pytest.fixture(scope="module")
def crew() -> Iterator[tuple[dict[str, RolloutRing], list]]:
    """Three writing processes that share four rings, one for each case."""
    with contextlib.ExitStack() as stack:
        rings = {
            f"{overflow} {pace}": stack.enter_context(
                make_ring(slots=WRITERS + 2, writers=WRITERS, overflow=overflow)
            )
            for overflow in ("block", "overwrite")
            for pace in ("fast", "slow")
        }
        helpers = [
            stack.enter_context(spawned(write_to_order, rings, writer)) for writer in range(WRITERS)
        ]
        for _, pipe in helpers:
            assert receive(pipe) == "ready"
        yield rings, [pipe for _, pipe in helpers]


@pytest.mark.parametrize("pace", ["fast", "slow"])
@OVERFLOW
def test_concurrent_rollouts_are_whole_in_order_and_all_accounted_for(crew, overflow, pace):
    rings, pipes = crew
    ring = rings[f"{overflow} {pace}"]
    seen: list[list[int]] = [[] for _ in range(WRITERS)]
    copies, looks = [stamped(0, 0), ring.blank()], 20 if pace == "slow" else 1
    for pipe in pipes:
        pipe.send((f"{overflow} {pace}", EACH))
    until = time.monotonic() + 60
    while ring.wait_for_data(0.2) or ring.read_count + sum(ring.dropped) < WRITERS * EACH:
        assert time.monotonic() < until, f"written {ring.written}, read {ring.read_count}"
        if not ring.available():
            continue
        with ring.read_views() as views:
            marks = {stamp(views) for _ in range(looks)}  # the slower, the more it looks
        copies.reverse()  # field by field and at once, in turn
        ring.copy_read_slot_to(copies[0])
        assert marks == {stamp(copies[0])}
        ring.advance_read()
        ((writer, sequence),) = marks
        seen[writer].append(sequence)
    for pipe in pipes:
        assert receive(pipe) == EACH
    assert ring.written == (EACH,) * WRITERS
    assert ring.read_count == sum(map(len, seen))
    for writer in range(WRITERS):
        assert seen[writer] == sorted(set(seen[writer]))
        assert len(seen[writer]) + ring.dropped[writer] == EACH
        if overflow == "block":
            assert seen[writer] == list(range(1, EACH + 1))
    if (overflow, pace) == ("overwrite", "slow"):
        assert sum(ring.dropped) > 0


# Processes that are killed or stopped


def _goes_on(ring: RolloutRing, rounds: int = 20) -> None:
    """This process writes as writer 1 and reads, and nothing stands in its way."""
    ring.use_writer(1)
    for sequence in range(1, rounds + 1):
        assert ring.write(stamped(1, sequence), timeout=1.0)
        assert ring.wait_for_data(timeout=1.0)
        assert stamp(ring.read()) == (1, sequence)
        ring.advance_read()


def _kill(process) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.join(DEADLINE)
    assert process.exitcode == -signal.SIGKILL


def test_a_writer_killed_while_it_writes_is_named_and_its_slot_recovered():
    with make_ring(slots=3, writers=2, overflow="block") as ring:
        with spawned(write_half, ring, 0) as (process, pipe):
            slot = receive(pipe)
            with pytest.raises(RuntimeError, match=f"process {process.pid} is alive"):
                ring.recover(0)
            dead = process.pid
            _kill(process)
        _goes_on(ring)
        started = time.monotonic()
        with pytest.raises(PeerGoneError, match=f"writer 0, process {dead}, has died"):
            ring.wait_for_data(timeout=DEADLINE)
        assert time.monotonic() - started < 2.0
        room = 0
        while ring.write(stamped(1, 1), timeout=0):
            room += 1
        assert room == 2
        assert ring.recover(0)
        assert not ring.recover(0)
        assert ring.claim(timeout=0) == slot
        for key, tensor in ring.write_buffer.items():
            tensor.copy_(stamped(1, 2)[key])
        ring.signal_write_done()
        assert not ring.write(stamped(1, 3), timeout=0)
        for sequence in (1, 1, 2):
            assert stamp(ring.read()) == (1, sequence)
            ring.advance_read()
        assert not ring.wait_for_data(timeout=0)
        assert ring.written == (0, 23)
        assert ring.read_count == 23


def test_what_a_writer_commits_in_its_last_moment_is_not_missed(monkeypatch):
    with make_ring() as ring:
        ring.use_writer(0)

        def dies_once_it_has_committed(pid: int) -> bool:
            ring.write(stamped(0, 1))
            return False

        monkeypatch.setattr(ring_module, "process_is_alive", dies_once_it_has_committed)
        assert ring.wait_for_data(timeout=0)
        assert stamp(ring.read()) == (0, 1)


def test_a_stopped_writer_holds_up_nobody_goes_on_where_it_was_and_is_read_after_its_death():
    with (
        make_ring(slots=3, writers=2, overflow="block") as ring,
        spawned(write_half, ring, 0) as (process, pipe),
    ):
        receive(pipe)
        os.kill(process.pid, signal.SIGSTOP)
        pipe.send("go on")
        _goes_on(ring)
        assert not ring.wait_for_data(timeout=0.5)  # stopped is not dead
        with pytest.raises(RuntimeError, match="is alive"):
            ring.recover(0)
        os.kill(process.pid, signal.SIGCONT)
        assert receive(pipe) == 1
        _kill(process)
        assert ring.wait_for_data(timeout=DEADLINE)
        assert stamp(ring.read()) == (0, 1)
        ring.advance_read()
        with pytest.raises(PeerGoneError, match="has died"):
            ring.wait_for_data(timeout=DEADLINE)
        assert not ring.recover(0)  # it held none


def test_a_writer_that_waits_for_a_killed_reader_is_told_so():
    with (
        make_ring(slots=2, overflow="block") as ring,
        spawned(hold_one, ring) as (process, pipe),
        ThreadPoolExecutor(1) as pool,
    ):
        ring.write(stamped(0, 1))
        assert receive(pipe) == 1
        ring.write(stamped(0, 2))
        assert not ring.write(stamped(0, 3), timeout=0)
        written = pool.submit(ring.write, stamped(0, 3), DEADLINE)
        _kill(process)
        started = time.monotonic()
        with pytest.raises(PeerGoneError, match=f"the reader, process {process.pid}, is gone"):
            written.result(DEADLINE)
        assert time.monotonic() - started < 2.0


def test_a_writer_that_may_overwrite_never_waits_for_a_stopped_reader():
    with make_ring(slots=3) as ring, spawned(hold_one, ring) as (process, pipe):
        ring.write(stamped(0, 1))
        assert receive(pipe) == 1
        os.kill(process.pid, signal.SIGSTOP)
        pipe.send("release")
        for sequence in range(2, 102):
            assert ring.write(stamped(0, sequence), timeout=0)
        assert (ring.write_count, ring.read_count, ring.dropped) == (101, 0, (98,))
        os.kill(process.pid, signal.SIGCONT)
        assert receive(pipe) == "released"  # and what it held was whole
        assert ring.write_count == ring.read_count + sum(ring.dropped) + ring.available()


def test_a_reader_that_closes_wakes_the_writers_that_wait():
    with make_ring(slots=2, overflow="block") as ring:
        assert not ring.wait_for_data(timeout=0)  # this process is the reader
        with spawned(write_until_refused, ring) as (_, pipe):
            assert receive(pipe) == 2
            ring.close()
            expected = f"the reader, process {os.getpid()}, is gone"
            assert expected in receive(pipe)


def test_a_reader_that_closed_may_come_back():
    with make_ring(slots=1, overflow="block", name=NAME) as ring:
        with RolloutRing.attach(NAME, stamped(0, 0)) as reader:
            assert not reader.wait_for_data(timeout=0)
        assert ring.write(stamped(0, 1), timeout=0)
        with pytest.raises(PeerGoneError, match="is gone"):
            ring.write(stamped(0, 2), timeout=0)
        with RolloutRing.attach(NAME, stamped(0, 0)) as reader:
            assert reader.wait_for_data(timeout=0)
            assert not ring.write(stamped(0, 2), timeout=0)  # it waits for the reader again
            assert stamp(reader.read()) == (0, 1)
            reader.advance_read()
            assert ring.write(stamped(0, 2), timeout=0)


def test_the_name_of_a_ring_goes_with_the_process_that_made_it_though_nobody_used_it():
    with spawned(make_named_ring) as (process, pipe):
        name = receive(pipe)
        pipe.send("end")
        process.join(DEADLINE)
        assert process.exitcode == 0
        assert not [path for path in named_directory().iterdir() if name in path.name]


def make_named_ring(pipe) -> None:
    """Make a ring that a thread keeps, and return."""
    ring = RolloutRing({"x": torch.zeros(3)}, slots=2, kind="named")
    threading.Thread(
        target=lambda kept: threading.Event().wait(), args=(ring,), daemon=True
    ).start()
    pipe.send(ring.name)
    pipe.recv()
