"""A process is known by its id and its start time: a reused id is another process."""

from __future__ import annotations

import mmap
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from tests.support.processes import DEADLINE, process_with_id, receive, spawned, wait_for
from tests.support.striking import exit_code_of, forked
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.processes import (
    process_id,
    process_is_alive,
    process_is_stopped,
    process_word,
    this_process,
    working_directory,
)


def _tell_who_and_wait(pipe: Connection) -> None:
    pipe.send((os.getpid(), this_process()))
    pipe.recv()


def test_a_process_names_itself_by_its_id_and_start_time():
    assert process_id(this_process()) == os.getpid()
    assert process_is_alive(this_process())
    assert this_process() == this_process()


def test_no_process_and_one_of_another_start_time_under_the_same_id_are_not_alive():
    assert not process_is_alive(0)
    assert not process_is_alive(this_process() ^ (1 << 40))


def test_a_process_that_takes_memory_is_the_one_that_it_was():
    word = this_process()
    with mmap.mmap(-1, 1 << 26):
        assert process_is_alive(word)


def test_each_process_knows_itself_also_when_it_is_forked():
    before = this_process()
    assert exit_code_of(lambda: os._exit(process_id(this_process()) != os.getpid())) == 0
    assert this_process() == before


def test_a_process_lives_until_it_ends():
    with spawned(_tell_who_and_wait) as (process, pipe):
        pid, word = receive(pipe)
        assert process_id(word) == pid == process.pid
        assert process_is_alive(word)
        process.kill()
        process.join(DEADLINE)
        assert not process_is_alive(word)


def test_a_zombie_is_not_alive():
    here, there = os.pipe()
    with forked(lambda: os.write(there, this_process().to_bytes(8, "little"))) as child:
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        word = int.from_bytes(os.read(here, 8), "little")
        assert process_id(word) == child
        assert not process_is_alive(word)
    os.close(here)
    os.close(there)


def test_a_process_under_the_id_of_a_dead_one_is_not_taken_for_it():
    with spawned(_tell_who_and_wait) as (process, pipe):
        pid, word = receive(pipe)
        process.kill()
        process.join(DEADLINE)
        with process_with_id(pid):
            assert not process_is_alive(word)


def test_a_stopped_process_is_told_from_another_that_had_its_id():
    with spawned(_tell_who_and_wait) as (_, pipe):
        pid, word = receive(pipe)
        assert not process_is_stopped(word)
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: process_is_stopped(word))
        assert process_is_alive(word)
        assert not process_is_stopped(word ^ (1 << 40))


def test_the_name_of_a_program_may_hold_what_ends_it_in_the_kernels_words():
    word, name = this_process(), Path("/proc/self/comm")
    before = name.read_text().strip()
    name.write_text("a) Z 1 (b")
    alive = process_is_alive(word)
    name.write_text(before)
    assert alive


@pytest.mark.parametrize("error", [FileNotFoundError, ProcessLookupError])
def test_a_process_that_ends_while_it_is_looked_at_is_not_alive(error, monkeypatch):
    word = this_process()
    monkeypatch.setattr(Path, "read_bytes", Mock(side_effect=error))
    assert not process_is_alive(word)


def test_off_linux_processes_are_known_by_id_and_start_time_too(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    word = process_word(os.getpid())
    assert process_id(word) == os.getpid()
    assert word >> 22 == round(100 * psutil.Process().create_time())
    assert process_is_alive(word)
    assert not process_is_alive(word ^ (1 << 40))
    with forked(bool) as child:  # which ends at once
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert process_word(child) == 0
    assert process_word(child) == 0


def test_a_working_directory_that_was_deleted_is_refused(deleted_directory):
    with pytest.raises(ConfigError, match=r"^working directory: deleted \(expected .*`cd`"):
        working_directory()
