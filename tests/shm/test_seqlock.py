from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.interrupts import each_interrupt
from tests.support.processes import DEADLINE, receive, shared_mappings, spawned, wait_for
from tests.support.striking import exit_code_of, forked
from tests.support.tearing import (
    count_torn,
    lapped_copy,
    make_cell,
    publish_and_die,
    publish_until_told,
    read,
)
from torchrl_unilab.errors import (
    ConfigError,
    ContentionError,
    LayoutError,
    LayoutShapeError,
    SegmentClosedError,
    SegmentError,
)
from torchrl_unilab.processes import this_process
from torchrl_unilab.shm import BlockLayout, SharedSegment, SnapshotCell, seqlock
from torchrl_unilab.shm.segment import named_directory
from torchrl_unilab.shm.seqlock import ReaderState, Snapshot

NAME = f"unilab-test-{os.getpid()}"


def _filled(value: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((5,), float(value)), "n": torch.tensor(value)}


def _read_one(pipe: Connection, cell: SnapshotCell) -> None:
    version, values = read(cell)
    pipe.send((version, {k: v.tolist() for k, v in values.items()}))


def _publish(cell: SnapshotCell, value: int, **kwargs: int) -> int:
    return cell.publish([*_filled(value).values()], **kwargs)


@given(st.integers(2, 5), st.lists(st.integers(0, 9), max_size=30))
def test_versions_that_skip_numbers_are_read_like_those_that_do_not(slots, versions):
    with SnapshotCell(_filled(0), slots=slots, first_version=3) as cell:
        newest = 3
        for least in versions:
            newest = max(newest + 1, least)
            assert _publish(cell, newest, version=least) == newest
            for _ in range(2):
                version, values = read(cell)
                assert version == cell.version == newest
                assert values["n"].item() == newest
                assert values["w"].tolist() == [newest] * 5


def test_each_dtype_and_shape_arrives_bit_for_bit():
    tensors = {
        "f32": torch.randn(3, 2),
        "bf16": torch.randn(4).bfloat16(),
        "f16": torch.randn(4).half(),
        "f64": torch.randn(2, dtype=torch.float64),
        "i64": torch.tensor(2**53 + 1),
        "bool": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "strided": torch.randn(4, 6).t()[::2],
    }
    initial = {key: torch.zeros_like(value) for key, value in tensors.items()}
    with SnapshotCell(initial) as cell:
        cell.publish([*tensors.values()])

        _, values = read(cell)

        assert {k: v.dtype for k, v in values.items()} == {k: v.dtype for k, v in tensors.items()}
        assert all(torch.equal(values[key], tensors[key]) for key in tensors)


@pytest.mark.parametrize("name", [None, NAME], ids=["anonymous", "named"])
def test_a_spawned_reader_gets_the_newest_version(name):
    with SnapshotCell(_filled(0), name=name) as cell:
        for value in (1, 2, 3, 4):
            _publish(cell, value)

        with spawned(_read_one, cell) as (_, pipe):
            assert receive(pipe) == (4, {"w": [4.0] * 5, "n": 4})


def test_a_reader_reports_the_version_it_applied_and_its_process():
    with SnapshotCell(_filled(0), readers=2) as cell:
        cell.become_reader(0)
        cell.report_applied(0, 0)

        reports = [cell.reader(0), cell.reader(1)]

        assert reports == [ReaderState(0, this_process(), 0), ReaderState(None, 0, 0)]


def test_a_reader_reports_that_it_has_no_published_version():
    with SnapshotCell(_filled(0), readers=1) as cell:
        cell.report_applied(0, 0)

        cell.report_applied(0, None)

        assert cell.reader(0).applied is None


def test_a_refused_publish_leaves_the_published_version_untouched():
    with SnapshotCell(_filled(7)) as cell:
        with pytest.raises(LayoutShapeError):
            cell.publish([torch.zeros(6), torch.tensor(0)])
        version, values = read(cell)
        assert (version, values["n"].item()) == (0, 7)


def test_a_writer_killed_in_the_middle_leaves_the_previous_version_whole_and_its_slot_to_another():
    with SnapshotCell(_filled(7), slots=2) as cell, spawned(publish_and_die, cell) as (writer, _):
        writer.join(DEADLINE)
        for value, version in ((7, 0), (2, 1)):
            found, values = read(cell)
            assert (found, values["w"].tolist()) == (version, [float(value)] * 5)
            _publish(cell, 2)


def _publish_and_stay(pipe: Connection, cell: SnapshotCell, value: int) -> None:
    pipe.send(_publish(cell, value))
    pipe.recv()
    cell.close()
    pipe.send("closed")
    pipe.recv()


def test_a_second_living_writer_is_refused_with_the_pid_of_the_first():
    with SnapshotCell(_filled(0)) as cell, spawned(_publish_and_stay, cell, 1) as (writer, pipe):
        assert receive(pipe) == 1

        with pytest.raises(SegmentError, match=rf"process {writer.pid} publishes"):
            _publish(cell, 2)

        assert read(cell)[1]["n"].item() == 1


def test_another_process_publishes_once_the_writer_has_closed():
    with SnapshotCell(_filled(0)) as cell, spawned(_publish_and_stay, cell, 1) as (_, pipe):
        receive(pipe)
        pipe.send("close")
        assert receive(pipe) == "closed"

        assert _publish(cell, 2) == 2


def test_another_process_publishes_once_a_writer_that_was_interrupted_has_closed():
    for interrupt in each_interrupt(seqlock):
        with SnapshotCell(_filled(0), name=NAME) as cell:
            with SnapshotCell.attach(NAME, cell.layout) as writer:
                interrupt.during(partial(_publish, writer, 1))
            assert exit_code_of(partial(_publish, cell, 2)) == 0


def test_an_attachment_publishes_no_more_once_another_was_closed_and_a_process_writes():
    with SnapshotCell(_filled(0), name=NAME) as cell:
        with SnapshotCell.attach(cell.name, cell.layout) as other:
            _publish(other, 1)
            _publish(cell, 2)
        with spawned(_publish_and_stay, cell, 3) as (writer, pipe):
            assert receive(pipe) == 3

            with pytest.raises(SegmentError, match=rf"process {writer.pid} publishes"):
                _publish(cell, 4)


def test_an_attachment_that_is_closed_leaves_the_process_that_has_come_to_write():
    with SnapshotCell(_filled(0), name=NAME) as cell:
        attached = [SnapshotCell.attach(cell.name, cell.layout) for _ in range(2)]
        for value, one in enumerate(attached, 1):
            _publish(one, value)
        attached[1].close()
        with spawned(_publish_and_stay, cell, 3) as (writer, pipe):
            assert receive(pipe) == 3
            attached[0].close()
            with pytest.raises(SegmentError, match=rf"process {writer.pid} publishes"):
                _publish(cell, 4)


def test_a_publish_that_has_begun_is_refused_if_another_process_comes_to_write_before_it_writes():
    with SnapshotCell(_filled(0), name=NAME) as cell, contextlib.ExitStack() as stack:
        other = SnapshotCell.attach(NAME, cell.layout)
        _publish(other, 1)
        _publish(cell, 2)

        @contextlib.contextmanager
        def late() -> Iterator[None]:
            """Be the lock, for which the publish waits too long."""
            other.close()  # gives up the process's right to publish
            _, pipe = stack.enter_context(spawned(_publish_and_stay, cell, 3))
            assert receive(pipe) == 3
            yield

        cell._publishing = late()
        with pytest.raises(SegmentError, match="publishes here"):
            _publish(cell, 4)
        assert cell.version == 3


@pytest.mark.parametrize("extra", [-64, 64])
def test_a_named_cell_of_another_size_than_its_layouts_is_refused(extra):
    with SnapshotCell(_filled(0), name=NAME) as cell:
        path = named_directory() / cell.name
        os.truncate(path, path.stat().st_size + extra)
        with pytest.raises(LayoutError, match=r"\d+ bytes \(expected \d+"):
            SnapshotCell.attach(cell.name, cell.layout)
        os.truncate(path, path.stat().st_size - extra)


def test_a_reader_that_is_always_overtaken_says_so_after_bounded_tries():
    with SnapshotCell(_filled(0), slots=2, readers=1) as cell:
        cell._words[seqlock._ANNOUNCED] = 3 * 2 + 1  # version 3 in slot 1, which holds none

        cell.become_reader(0)

        with pytest.raises(ContentionError, match="6 tries, last at version 3"):
            cell.read(Snapshot(cell.layout), retries=5)

        cell.report_applied(0, 0)
        assert cell.reader(0).overtaken == 6


@pytest.mark.parametrize("slots", [1, 0, -1, 3.0, True])
def test_fewer_than_two_slots_are_refused(slots):
    with pytest.raises(ConfigError, match="expected an integer of at least 2"):
        SnapshotCell(_filled(0), slots=slots)


@pytest.mark.parametrize("count", ["readers", "first_version"])
@pytest.mark.parametrize("value", [-1, 1.0, True, "1"])
def test_readers_and_versions_that_cannot_be_are_refused_before_memory_is_taken(
    count, value, monkeypatch
):
    monkeypatch.delattr("torchrl_unilab.shm.seqlock.SharedSegment")
    with pytest.raises(ConfigError, match=f"{count}: .* .expected an integer of (at least )?0"):
        SnapshotCell(_filled(0), **{count: value})


@pytest.mark.parametrize("slots", [2, 7])
def test_a_version_that_does_not_fit_its_word_is_refused(slots):
    with pytest.raises(ConfigError, match=r"first_version: .* .expected an integer of 0 to"):
        SnapshotCell(_filled(0), slots=slots, first_version=2**63 - 1)


@pytest.mark.parametrize(
    "use",
    [
        read,
        lambda cell: cell.version,
        lambda cell: _publish(cell, 1),
        lambda cell: cell.report_applied(0, 0),
        lambda cell: cell.reader(0),
    ],
)
def test_a_closed_cell_refuses_every_use(use):
    cell = SnapshotCell(_filled(0), readers=1)
    cell.close()
    cell.close()

    with pytest.raises(SegmentClosedError):
        use(cell)

    assert cell.closed


def test_a_close_that_was_interrupted_is_completed_by_the_next_one():
    for interrupt in each_interrupt(seqlock):
        cell = SnapshotCell(_filled(0))
        _publish(cell, 1)
        interrupt.during(cell.close)
        cell.close()
        assert cell.closed


def test_a_cell_made_in_inference_mode_is_written_outside_it():
    with torch.inference_mode():
        cell = SnapshotCell(_filled(0))
    with cell:
        assert _publish(cell, 1) == 1
        assert read(cell)[1]["n"].item() == 1


def test_a_closed_cell_holds_no_shared_memory():
    before = shared_mappings()
    cell = SnapshotCell(_filled(0))
    assert shared_mappings() == before + 1

    cell.close()

    assert shared_mappings() == before
    assert cell.closed


def test_a_cell_is_attached_by_name_only_with_its_own_layout():
    layout = BlockLayout.of(_filled(0))
    with SnapshotCell(_filled(3), name=NAME, slots=4) as cell:
        attached = SnapshotCell.attach(NAME, layout)
        _publish(cell, 8)
        assert read(attached)[1]["n"].item() == 8
        attached.close()
        with pytest.raises(LayoutError, match="expected"):
            SnapshotCell.attach(NAME, BlockLayout.of({"w": torch.zeros(1)}))


def test_a_foreign_segment_is_not_taken_for_a_cell():
    message = "not a complete snapshot cell"
    with SharedSegment(1024, name=NAME), pytest.raises(LayoutError, match=message):
        SnapshotCell.attach(NAME, BlockLayout.of(_filled(0)))


def test_threads_of_one_process_publish_one_after_the_other():
    with make_cell(slots=2, elements=256) as cell:

        def publish(values: range) -> None:
            for value in values:
                fields = cell.layout.fields
                cell.publish([torch.full(f.shape, value, dtype=f.dtype) for f in fields])

        with ThreadPoolExecutor(4) as threads:
            publishing = [threads.submit(publish, range(i, 2000, 4)) for i in range(4)]
            while not all(one.done() for one in publishing):
                assert count_torn(cell, 50, checked=True)[0] == 0
        assert cell.version == 2000


@pytest.mark.parametrize("slots", [2, 3])
def test_no_read_is_torn_under_continuous_publishing(slots):
    with make_cell(slots=slots) as cell, spawned(publish_until_told, cell) as (_, pipe):
        receive(pipe)

        torn, _ = count_torn(cell, 3_000, checked=True)
        while cell.version <= 100:  # the writer may have been kept from its work
            torn += count_torn(cell, 100, checked=True)[0]

        pipe.send("stop")
        assert torn == 0
        assert receive(pipe) > 100


@pytest.mark.parametrize("slots", [2, 3])
def test_a_reader_that_is_lapped_in_mid_copy_raises(slots, monkeypatch):
    with make_cell(slots=slots) as cell, spawned(publish_until_told, cell) as (_, pipe):
        receive(pipe)
        torn: list[bool] = []
        monkeypatch.setattr(seqlock.np, "copyto", lapped_copy(cell, torn))

        with pytest.raises(ContentionError):
            cell.read(Snapshot(cell.layout), retries=19)

        monkeypatch.undo()
        pipe.send("stop")
        receive(pipe)
    # Without the check these copies would have gone through, each a mix of versions.
    assert torn
    assert all(torn)


def test_a_child_that_is_forked_during_a_publish_is_refused_at_once():
    def publish() -> None:
        with pytest.raises(SegmentError):
            _publish(cell, 2)

    with SnapshotCell(_filled(0)) as cell, ThreadPoolExecutor(1) as other:
        _publish(cell, 1)
        other.submit(cell._publishing.__enter__).result()
        with forked(publish) as child:
            wait_for(lambda: os.waitpid(child, os.WNOHANG) == (child, 0))
        other.submit(cell._publishing.__exit__, None, None, None).result()


def test_a_parameter_that_was_published_is_not_kept():
    with SnapshotCell({"w": torch.zeros(3)}) as cell:
        parameter = torch.ones(3, requires_grad=True)
        known = weakref.ref(parameter)
        cell.publish([parameter])
        del parameter
        assert known() is None
