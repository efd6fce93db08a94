from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import gc
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import torch

from tests.support.descriptors import descriptors, may_open
from tests.support.interrupts import each_interrupt
from tests.support.processes import DEADLINE, receive, spawned
from tests.support.rings import attached
from tests.support.striking import exit_code_of
from torchrl_unilab.errors import ConfigError, SegmentClosedError, SegmentError, SegmentSpaceError
from torchrl_unilab.shm import segment as segment_module
from torchrl_unilab.shm.layout import BlockLayout
from torchrl_unilab.shm.ring import RolloutRing
from torchrl_unilab.shm.segment import SharedSegment, named_directory

NAME = f"unilab-test-{os.getpid()}"
NAMES = pytest.mark.parametrize("name", [None, NAME], ids=["anonymous", "named"])


@pytest.fixture(autouse=True)
def _no_garbage() -> None:
    """What other tests left is not closed while a test counts descriptors."""
    gc.collect()


def _add_one(pipe: Connection, segment: SharedSegment) -> None:
    segment.buffer[:] += 1
    pipe.send(segment.nbytes)
    segment.close()


def _create_and_wait(pipe: Connection) -> None:
    segment = SharedSegment(4096)
    pipe.send(segment.nbytes)
    threading.Event().wait()


@NAMES
def test_a_new_segment_is_zero_filled(name):
    with SharedSegment(1000, name=name) as segment:
        assert segment.buffer.nbytes == segment.nbytes == 1000
        assert not segment.buffer.any()


@NAMES
def test_a_spawned_process_shares_the_bytes_but_does_not_own_them(name):
    with SharedSegment(64, name=name) as segment:
        with spawned(_add_one, segment) as (_, pipe):
            assert receive(pipe) == 64
        assert name is None or (named_directory() / name).exists()
        assert segment.buffer.tolist() == [1] * 64


def test_a_named_segment_is_attached_by_name_and_unlinked_by_its_creator_alone(tmp_path):
    segment = SharedSegment(64, name=NAME)
    path = named_directory() / segment.name
    attached = SharedSegment.attach(segment.name)
    attached.buffer[3] = 9
    assert segment.buffer[3] == 9
    attached.close()
    assert path.exists()
    segment.close()
    assert not path.exists()


def _is_locked_for_others(segment: SharedSegment) -> bool:
    """Whether another process cannot lock the segment."""
    lock = partial(fcntl.lockf, segment.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
    return exit_code_of(lock) != 0


@NAMES
def test_closing_another_attachment_of_this_process_ends_none_of_its_locks(name):
    with SharedSegment(64, name=name) as segment:
        fcntl.lockf(segment.descriptor, fcntl.LOCK_EX, 1)
        attached(segment).close()
        assert _is_locked_for_others(segment)
        fcntl.lockf(segment.descriptor, fcntl.LOCK_UN, 1)
        assert not _is_locked_for_others(segment)


@NAMES
def test_the_last_attachment_closes_all_descriptors(name):
    before = psutil.Process().num_fds()
    with SharedSegment(64, name=name) as segment, attached(segment):
        pass
    assert psutil.Process().num_fds() == before


def test_a_named_segment_is_attached_again_and_again_by_one_descriptor():
    with SharedSegment(64, name=NAME) as segment:
        before = psutil.Process().num_fds()
        for _ in range(3):
            with SharedSegment.attach(NAME) as again:
                again.buffer[0] += 1
        assert psutil.Process().num_fds() == before
        assert segment.buffer[0] == 3


def test_a_segment_that_has_the_name_of_one_that_is_gone_is_another():
    with SharedSegment(64, name=NAME) as gone:
        (named_directory() / NAME).unlink()
        with SharedSegment(64, name=NAME), SharedSegment.attach(NAME) as other:
            other.buffer[0] = 1
        assert gone.buffer[0] == 0


def test_attaching_an_unknown_name_says_so():
    with pytest.raises(SegmentError, match="no segment 'unilab-nobody'"):
        SharedSegment.attach("unilab-nobody")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Path.touch, "is empty"),
        (lambda path: path.symlink_to("/etc/hostname"), "symbolic link"),
        (os.mkfifo, "not a regular file"),
    ],
    ids=["empty", "link", "fifo"],
)
def test_what_no_creator_made_is_not_attached_and_no_descriptor_is_lost(make, message):
    path = named_directory() / NAME
    make(path)
    try:
        before = psutil.Process().num_fds()
        for _ in range(5):
            with pytest.raises(SegmentError, match=message):
                SharedSegment.attach(path.name)
        assert psutil.Process().num_fds() == before
    finally:
        path.unlink()


def test_a_taken_name_is_refused():
    with SharedSegment(64, name=NAME), pytest.raises(SegmentError, match="is taken"):
        SharedSegment(64, name=NAME)


def test_a_segment_of_another_user_is_refused(monkeypatch):
    with SharedSegment(64, name=NAME) as segment:
        before = psutil.Process().num_fds()
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(SegmentError, match=rf"owned by user {os.getuid()} \(expected user"):
            SharedSegment.attach(segment.name)
        assert psutil.Process().num_fds() == before


def test_the_room_of_an_anonymous_segment_is_what_the_control_group_leaves(monkeypatch):
    monkeypatch.setattr("torchrl_unilab.limits.cgroup_headroom", lambda: 1000)
    assert segment_module.free_bytes(named=False) == 1000
    with pytest.raises(SegmentSpaceError, match="at most 1000"):
        SharedSegment(1001)


@pytest.mark.parametrize("name", ["", "a/b", "../x", "..", "a\0b", 3])
@pytest.mark.parametrize("use", [SharedSegment.attach, lambda name: SharedSegment(64, name=name)])
def test_what_is_no_plain_file_name_is_refused(use, name):
    with pytest.raises(ConfigError, match="plain file name"):
        use(name)


def test_a_name_is_gone_wherever_a_close_was_interrupted_once_it_is_repeated():
    for interrupt in each_interrupt(segment_module):
        segment = SharedSegment(100, name=NAME)
        interrupt.during(segment.close)
        segment.close()
        assert not (named_directory() / segment.name).exists()


@NAMES
def test_use_after_close_is_an_error_and_a_borrowed_view_stays_readable(name):
    segment = SharedSegment(64, name=name)
    view = segment.buffer
    view[0] = 5
    segment.close()
    segment.close()
    assert segment.closed
    with pytest.raises(SegmentClosedError):
        _ = segment.buffer
    assert view[0] == 5


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_size_below_one_is_refused(nbytes):
    with pytest.raises(ConfigError, match=rf"segment: {nbytes} \(expected an integer"):
        SharedSegment(nbytes)


@NAMES
def test_a_segment_that_does_not_fit_is_refused_before_allocation(name, monkeypatch):
    monkeypatch.setattr(segment_module, "free_bytes", lambda named: 1023)
    monkeypatch.setattr(segment_module, "_create", pytest.fail)
    where = "memory" if name is None else "shared-memory mount"
    expected = rf"1024 bytes do not fit .*at most 1023 bytes, free in {where}"
    with pytest.raises(SegmentSpaceError, match=expected):
        SharedSegment(1024, name=name)


def test_the_room_of_a_named_segment_is_that_of_its_mount(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHRL_UNILAB_SHM_DIR", str(tmp_path))
    stat, asked = os.statvfs(tmp_path), []  # once: others write there meanwhile
    monkeypatch.setattr(os, "statvfs", lambda path: asked.append(Path(path)) or stat)
    assert segment_module.free_bytes(named=True) == stat.f_bavail * stat.f_frsize
    assert asked == [tmp_path]


@pytest.mark.skipif(sys.platform != "linux", reason="pages are reserved on Linux")
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.ENOSPC, "no space"), SegmentSpaceError),
        (OSError(errno.ENOMEM, "no space"), SegmentSpaceError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=["full", "no memory", "interrupt"],
)
def test_an_error_or_interrupt_while_pages_are_taken_leaves_nothing(
    error, raised, monkeypatch, tmp_path
):
    monkeypatch.setenv("TORCHRL_UNILAB_SHM_DIR", str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=error))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(raised) as refused:
        SharedSegment(1024, name="unilab-test")
    assert list(tmp_path.iterdir()) == [], refused.traceback  # though the error is kept
    assert len(os.listdir("/proc/self/fd")) == before


@NAMES
def test_an_interrupt_at_any_point_of_making_or_attaching_a_segment_leaves_nothing(
    name, monkeypatch
):
    # No signal comes between a block and the end of its lock, which is in C: a tracer does.
    monkeypatch.setattr(segment_module, "_mappings_lock", contextlib.nullcontext())
    before = descriptors()

    def make_and_attach() -> None:
        with SharedSegment(64, name=name) as segment:
            attached(segment).close()

    for interrupt in each_interrupt(segment_module):
        interrupt.during(make_and_attach)
        assert descriptors() == before
        assert not (named_directory() / NAME).exists()


def test_a_limit_of_file_sizes_is_named():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(SegmentSpaceError, match=r"2097152 bytes .*`ulimit -f`"):
            SharedSegment(2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("left", [0, 1])
def test_a_limit_of_open_files_is_named(left):
    message = r"^shared segment: too many open .*`ulimit -n`"
    with may_open(left), pytest.raises(ConfigError, match=message):
        SharedSegment(64)


def test_a_limit_of_the_address_space_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHRL_UNILAB_SHM_DIR", str(tmp_path))  # a mount may be as small
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with SharedSegment(1 << 26, name=NAME) as segment:
        held = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (held + (1 << 25), limits[1]))
        try:
            with pytest.raises(SegmentSpaceError, match=r"67108864 bytes .*`ulimit -v`"):
                SharedSegment(1 << 26)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        assert SharedSegment.attach(segment.name).nbytes == segment.nbytes


def test_a_creator_leaves_a_file_that_took_the_name_meanwhile(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHRL_UNILAB_SHM_DIR", str(tmp_path))
    with SharedSegment(64, name="unilab-test"):
        (tmp_path / "unilab-test").unlink()
        (tmp_path / "unilab-test").write_bytes(b"of another")
    assert (tmp_path / "unilab-test").read_bytes() == b"of another"


def test_an_interrupt_while_a_segment_is_attached_again_leaves_the_first_as_it_was(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("TORCHRL_UNILAB_SHM_DIR", str(tmp_path))
    with SharedSegment(1024, name="unilab-test") as segment:
        with monkeypatch.context() as patch:
            patch.setattr(segment_module, "_map_file", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                SharedSegment.attach("unilab-test")
        assert os.fstat(segment.descriptor).st_size == 1024


def _create_and_keep(name: str) -> None:
    _KEPT.append(SharedSegment(4096, name=name))


_KEPT: list[SharedSegment] = []


@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_worker_that_ends_in_order_leaves_no_named_segment(method):
    context = multiprocessing.get_context(method)
    worker = context.Process(target=_create_and_keep, args=(NAME,))
    worker.start()
    worker.join(DEADLINE)

    assert worker.exitcode == 0
    assert not (named_directory() / NAME).exists()


def test_a_killed_creator_leaves_no_segment():
    before = set(os.listdir(named_directory()))
    with spawned(_create_and_wait) as (process, pipe):
        assert receive(pipe) == 4096
        os.kill(process.pid, signal.SIGKILL)
        process.join(DEADLINE)
        assert process.exitcode == -signal.SIGKILL
    assert set(os.listdir(named_directory())) <= before


def test_a_segment_without_a_name_is_anonymous(monkeypatch):
    monkeypatch.delenv("TORCHRL_UNILAB_SEGMENT", raising=False)

    with SharedSegment(64) as segment:
        assert segment.name is None


def test_the_environment_gives_each_segment_a_name(monkeypatch):
    monkeypatch.setenv("TORCHRL_UNILAB_SEGMENT", "named")

    with SharedSegment(64) as segment, SharedSegment(64) as other:
        assert (named_directory() / segment.name).exists()
        assert segment.name != other.name


def test_an_unknown_kind_setting_is_refused(monkeypatch):
    monkeypatch.setenv("TORCHRL_UNILAB_SEGMENT", "posix")
    with pytest.raises(ConfigError, match="'posix'"):
        SharedSegment(64)


def test_an_unlinked_file_serves_as_anonymous_segment_off_linux(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHRL_UNILAB_SHM_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "darwin")
    with SharedSegment(64) as segment:
        segment.buffer[0] = 1
        assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHRL_UNILAB_SHM_DIR", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as root may write it
    with pytest.raises(ConfigError, match=r"_SHM_DIR: .* \(expected a directory that may be wri"):
        SharedSegment(1024, name="unilab-test")


def test_a_directory_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setenv("TORCHRL_UNILAB_SHM_DIR", "/no/such/directory")
    with pytest.raises(ConfigError, match="TORCHRL_UNILAB_SHM_DIR"):
        SharedSegment(1024, name="unilab-test")


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_what_has_no_name_is_copied_for_a_new_process_alone(copied):
    layout = BlockLayout.of_specs([("x", (2,), torch.float32)])
    with SharedSegment(8) as segment, RolloutRing(layout, slots=2) as ring:
        before = psutil.Process().num_fds()
        for owner in (segment, ring):
            with pytest.raises(SegmentError, match="cannot copy or pickle"):
                copied(owner)
        assert psutil.Process().num_fds() == before
