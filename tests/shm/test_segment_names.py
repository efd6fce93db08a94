"""Named segments: where their files lie, how they may be called, whose they are, who ends them."""

from __future__ import annotations

import gc
import os
import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.striking import exit_code_of
from torchrl_unilab.errors import ConfigError, SegmentError
from torchrl_unilab.shm import segment as segment_module
from torchrl_unilab.shm.segment import SharedSegment, free_bytes, named_directory

NAME = f"unilab-test-{os.getpid()}"


@pytest.fixture
def path() -> Path:
    """The file of a segment of that name."""
    return named_directory() / NAME


@pytest.mark.parametrize(
    ("writable", "expected"), [(True, "/dev/shm"), (False, tempfile.gettempdir())]
)
def test_segments_lie_on_the_mount_for_them_if_it_can_be_written_or_where_temporary_files_do(
    writable, expected, monkeypatch
):
    monkeypatch.delenv("TORCHRL_UNILAB_SHM_DIR")
    monkeypatch.setattr(os, "access", lambda path, mode: writable)
    assert named_directory() == Path(expected)


@pytest.mark.parametrize(
    ("kind", "named", "on_mount"),
    [
        ("named", None, True),
        ("named", False, False),
        ("anonymous", None, False),
        ("anonymous", True, True),
    ],
)
def test_room_is_asked_for_where_a_segment_would_lie(kind, named, on_mount, monkeypatch):
    monkeypatch.setenv("TORCHRL_UNILAB_SEGMENT", kind)
    disk = SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=1))
    monkeypatch.setattr(segment_module, "shutil", disk)
    monkeypatch.setattr(segment_module, "available_memory", lambda: 2)
    assert free_bytes(named) == (1 if on_mount else 2)


def test_a_name_is_as_long_as_a_file_s_may_be_in_bytes():
    longest = "é" * 127 + "x"
    with SharedSegment(64, name=longest):
        assert (named_directory() / longest).exists()
    with pytest.raises(ConfigError, match="at most 255 bytes"):
        SharedSegment(64, name="é" * 128)


def test_a_named_segment_is_its_users_alone(path):
    with SharedSegment(64, name=NAME):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_to_a_segment_that_is_mapped_here_is_no_segment(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHRL_UNILAB_SHM_DIR", str(tmp_path))
    (tmp_path / "link").symlink_to(tmp_path / NAME)
    with SharedSegment(64, name=NAME), pytest.raises(SegmentError, match="symbolic link"):
        SharedSegment.attach("link")


def test_a_forked_child_that_closes_a_segment_leaves_its_parents_file(path):
    with SharedSegment(64, name=NAME) as segment:
        assert exit_code_of(segment.close) == 0
        assert path.exists()


def test_a_segment_that_is_closed_leaves_its_name_to_the_next(path, monkeypatch):
    monkeypatch.setattr(os.path, "samestat", lambda *_: True)  # a file's number is used again
    closed = SharedSegment(64, name=NAME)
    closed.close()
    with SharedSegment(64, name=NAME):
        del closed
        gc.collect()
        assert path.exists()


def test_a_descriptor_that_attachments_share_is_closed_once(monkeypatch):
    gc.collect()  # other tests' descriptors
    closed, close = [], os.close
    monkeypatch.setattr(os, "close", lambda number: closed.append(number) or close(number))
    with SharedSegment(64, name=NAME) as segment, SharedSegment.attach(NAME):
        descriptor = segment.descriptor
    assert closed == [descriptor]


def test_another_error_of_the_system_is_not_taken_for_a_link(path):
    path.mkdir()
    try:
        with pytest.raises(IsADirectoryError):
            SharedSegment.attach(NAME)
    finally:
        path.rmdir()
