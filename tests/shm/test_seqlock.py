from __future__ import annotations

import os
import signal
import threading
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.processes import DEADLINE, receive, spawned
from tests.support.tearing import count_torn, lapped_copy, make_cell, publish_until_told
from torchrl_unilab.errors import (
    ConfigError,
    ContentionError,
    LayoutError,
    LayoutShapeError,
    SegmentClosedError,
    SegmentError,
)
from torchrl_unilab.shm import BlockLayout, SeqLock, SharedSegment, SnapshotCell, seqlock
from torchrl_unilab.shm.segment import named_directory

CHECKSUM = pytest.mark.parametrize("checksum", [False, True])


def _filled(value: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((5,), float(value)), "n": torch.tensor(value)}


def _read_one(pipe: Connection, cell: SnapshotCell) -> None:
    version, values = cell.read()
    cell.report_applied(0, version)
    pipe.send((version, {k: v.tolist() for k, v in values.items()}))


def _begin_and_die(pipe: Connection, cell: SnapshotCell) -> None:
    slot = cell._lock.begin()
    cell._lock.payloads[slot][:] = 255
    os.kill(os.getpid(), signal.SIGKILL)


def _publish_and_die(pipe: Connection, cell: SnapshotCell) -> None:
    cell.publish(_filled(1))
    cell.publish_by(lambda payload: os.kill(os.getpid(), signal.SIGKILL))


@given(st.integers(2, 5), st.lists(st.integers(0, 9), max_size=30))
def test_versions_that_skip_numbers_are_read_like_those_that_do_not(slots, versions):
    with SnapshotCell(_filled(0), slots=slots, first_version=3) as cell:
        newest = 3
        for least in versions:
            newest = max(newest + 1, least)
            assert cell.publish_checked([*_filled(newest).values()], version=least) == newest
            version, values = cell.read()
            assert (version, values["n"].item()) == (newest, newest)


@CHECKSUM
@given(st.integers(2, 5), st.lists(st.booleans(), max_size=30))
def test_a_reader_sees_what_a_serial_oracle_holds(checksum, slots, actions):
    published = 0
    with SnapshotCell(_filled(0), slots=slots, checksum=checksum) as cell:
        for publish in actions:
            if publish:
                published += 1
                assert cell.publish(_filled(published)) == published
            version, values = cell.read()
            assert version == cell.version == published
            assert values["n"].item() == published
            assert values["w"].tolist() == [published] * 5


@CHECKSUM
def test_each_dtype_and_shape_arrives_bit_for_bit(checksum):
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
    with SnapshotCell(tensors, checksum=checksum) as cell:
        other = {k: (v * 2 if v.dtype is not torch.bool else ~v) for k, v in tensors.items()}
        for expected in (tensors, other):
            if expected is other:
                cell.publish(other)
            _, values = cell.read()
            for key, value in expected.items():
                assert values[key].dtype is value.dtype
                assert torch.equal(values[key], value)


@pytest.mark.parametrize("kind", ["anonymous", "named"])
@CHECKSUM
def test_a_spawned_reader_gets_the_newest_version_and_reports_it(kind, checksum):
    with SnapshotCell(_filled(0), readers=2, kind=kind, checksum=checksum) as cell:
        for value in (1, 2, 3, 4):
            cell.publish(_filled(value))
        assert cell.applied(0) is None
        with spawned(_read_one, cell) as (process, pipe):
            assert receive(pipe) == (4, {"w": [4.0] * 5, "n": 4})
            assert cell.reader_pid(0) == process.pid
        assert (cell.applied(0), cell.applied(1)) == (4, None)


def test_a_refused_publish_leaves_the_published_version_untouched():
    with SnapshotCell(_filled(7)) as cell:
        with pytest.raises(LayoutShapeError):
            cell.publish({"w": torch.zeros(6), "n": torch.tensor(0)})
        version, values = cell.read()
        assert (version, values["n"].item()) == (0, 7)


def test_a_writer_killed_in_the_middle_leaves_the_previous_version_whole():
    with SnapshotCell(_filled(0), slots=2) as cell:
        cell.publish(_filled(1))
        with spawned(_begin_and_die, cell) as (process, _):
            process.join(DEADLINE)
            assert process.exitcode == -signal.SIGKILL
        version, values = cell.read()
        assert (version, values["w"].tolist()) == (1, [1.0] * 5)
        assert cell.publish(_filled(2)) == 2
        assert cell.read()[1]["n"].item() == 2


def _publish_and_stay(pipe: Connection, cell: SnapshotCell, value: int) -> None:
    pipe.send(cell.publish(_filled(value)))
    pipe.recv()
    cell.close()
    pipe.send("closed")
    pipe.recv()


def test_a_second_living_writer_is_refused_with_the_pid_of_the_first():
    with (
        SnapshotCell(_filled(0)) as cell,
        spawned(_publish_and_stay, cell, 1) as (writer, pipe),
    ):
        assert receive(pipe) == 1

        with pytest.raises(SegmentError, match=rf"process {writer.pid} publishes"):
            cell.publish(_filled(2))

        assert cell.read()[1]["n"].item() == 1


def test_another_process_publishes_once_the_writer_has_closed():
    with (
        SnapshotCell(_filled(0)) as cell,
        spawned(_publish_and_stay, cell, 1) as (_, pipe),
    ):
        receive(pipe)
        pipe.send("close")
        assert receive(pipe) == "closed"

        assert cell.publish(_filled(2)) == 2


def test_another_process_publishes_once_the_writer_has_died():
    with SnapshotCell(_filled(0)) as cell:
        with spawned(_publish_and_stay, cell, 1) as (_, pipe):
            receive(pipe)

        assert cell.publish(_filled(2)) == 2


@pytest.mark.parametrize("extra", [-64, 64])
def test_a_named_cell_of_another_size_than_its_layouts_is_refused(extra):
    with SnapshotCell(_filled(0), name=f"unilab-test-{os.getpid()}") as cell:
        path = named_directory() / cell.name
        os.truncate(path, path.stat().st_size + extra)
        with pytest.raises(LayoutError, match=r"\d+ bytes \(expected \d+"):
            SnapshotCell.attach(cell.name, cell.layout)
        os.truncate(path, path.stat().st_size - extra)


def test_a_publish_that_its_writer_did_not_survive_is_told_from_one_under_way():
    with SnapshotCell(_filled(0)) as cell:
        assert not cell.publish_cut_off
        with spawned(_publish_and_die, cell) as (process, _):
            process.join(DEADLINE)
        assert cell.publish_cut_off
        assert cell.read()[1]["n"].item() == 1
        cell.publish(_filled(2))
        assert not cell.publish_cut_off


def test_a_reader_that_is_always_overtaken_says_so_after_bounded_tries():
    buffer = np.zeros(4096, np.uint8)
    lock = SeqLock(buffer, 0, 64, slots=2, checksum=False)
    lock._announced[0] = 3 * 2 + 1  # version 3 in slot 1, which still holds an older one
    with pytest.raises(ContentionError, match="6 tries, last at version 3"):
        lock.read(np.empty(64, np.uint8), retries=5)


def test_a_changed_payload_fails_the_checksum():
    buffer = np.zeros(4096, np.uint8)
    lock = SeqLock(buffer, 0, 64, slots=2, checksum=True)
    lock.seal_initial()
    out = np.empty(64, np.uint8)
    assert lock.try_read(out) == 0
    lock.payloads[0][5] ^= 1
    assert lock.try_read(out) is None


@pytest.mark.parametrize("slots", [1, 0, -1])
def test_fewer_than_two_slots_are_refused(slots):
    with pytest.raises(ConfigError, match="expected at least 2"):
        SnapshotCell(_filled(0), slots=slots)
    with pytest.raises(ConfigError, match="expected at least 2"):
        SeqLock(np.zeros(4096, np.uint8), 0, 64, slots=slots, checksum=False)


def test_a_closed_cell_refuses_every_use():
    cell = SnapshotCell(_filled(0))
    cell.close()
    cell.close()
    assert cell.closed
    for use in (cell.read, lambda: cell.version, lambda: cell.publish(_filled(1))):
        with pytest.raises(SegmentClosedError):
            use()


def test_a_cell_is_attached_by_name_only_with_its_own_layout():
    name = f"unilab-test-{os.getpid()}"
    layout = BlockLayout.of(_filled(0))
    with SnapshotCell(_filled(3), name=name, slots=4) as cell:
        attached = SnapshotCell.attach(name, layout)
        cell.publish(_filled(8))
        assert attached.read()[1]["n"].item() == 8
        attached.close()
        with pytest.raises(LayoutError, match="expected"):
            SnapshotCell.attach(name, BlockLayout.of({"w": torch.zeros(1)}))


def test_a_foreign_segment_is_not_taken_for_a_cell():
    name = f"unilab-test-{os.getpid()}"
    with (
        SharedSegment(1024, name=name),
        pytest.raises(LayoutError, match="not a complete snapshot cell"),
    ):
        SnapshotCell.attach(name, BlockLayout.of(_filled(0)))


def test_threads_of_one_process_publish_one_after_the_other():
    with make_cell(slots=2, elements=256) as cell:

        def publish(values: range) -> None:
            for value in values:
                half, other = (
                    torch.full(f.shape, value, dtype=f.dtype) for f in cell.layout.fields
                )
                cell.publish_ordered([half, other])

        threads = [threading.Thread(target=publish, args=(range(i, 2000, 4),)) for i in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert count_torn(cell, 50, checked=True)[0] == 0
        assert cell.version == 2000


@pytest.mark.parametrize(("slots", "checksum"), [(2, False), (3, False), (2, True)])
def test_no_read_is_torn_under_continuous_publishing(slots, checksum):
    with make_cell(slots=slots, checksum=checksum) as cell:
        with spawned(publish_until_told, cell) as (_, pipe):
            receive(pipe)
            torn, _ = count_torn(cell, 3_000, checked=True)
            pipe.send("stop")
            versions = receive(pipe)
        assert torn == 0
        assert versions > 100


@pytest.mark.parametrize("slots", [2, 3])
def test_a_reader_that_is_lapped_in_mid_copy_is_told_so(slots, monkeypatch):
    with make_cell(slots=slots) as cell, spawned(publish_until_told, cell) as (_, pipe):
        receive(pipe)
        torn = []
        copy = lapped_copy(cell, torn)
        monkeypatch.setattr(seqlock.np, "copyto", copy)
        out = np.empty_like(cell._lock.payloads[0])
        tries = [cell._lock.try_read(out) for _ in range(20)]
        monkeypatch.undo()
        pipe.send("stop")
        receive(pipe)
    assert tries == [None] * 20
    # Without the check these copies would have gone through, each a mix of versions.
    assert torn
    assert all(torn)
