"""What ranks say of those that have left, from what these have posted and from their processes."""

from __future__ import annotations

import os
import socket
import subprocess
from unittest.mock import Mock

import pytest
from torch.distributed import HashStore

from torchrl_unilab.errors import PeerGoneError
from torchrl_unilab.processes import process_id, process_word, this_process
from torchrl_unilab.runtime import Ranks

HERE = socket.gethostname()


@pytest.fixture
def ended() -> int:
    """A process that has ended."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        return process_word(process.pid)


def two_of(size: int) -> tuple[Ranks, Ranks]:
    """The last two ranks, which have joined; their processes live."""
    one, other = Ranks(size - 2, size), Ranks(size - 1, size)
    one._store = other._store = HashStore()
    one._processes = other._processes = [(HERE, this_process())] * size
    return one, other


def test_a_rank_that_ended_with_its_store_is_not_said_to_have_crashed(ended):
    ranks = Ranks(1, 2)
    ranks._store = Mock(check=Mock(side_effect=RuntimeError("Connection reset by peer")))
    ranks._processes = [(HERE, ended), (HERE, this_process())]
    said = str(ranks._peer_error(RuntimeError("recv failed")))
    assert "rank 0 has ended, and what it said is gone with its store" in said
    assert "crashed" not in said


def test_a_rank_that_was_interrupted_is_said_to_be_so_without_an_empty_message():
    one, other = two_of(2)
    other.leave(KeyboardInterrupt())
    error = one._peer_error(RuntimeError("recv failed"))
    assert "rank 1 failed with KeyboardInterrupt\n" in str(error)


def test_a_rank_that_leaves_because_of_another_is_not_to_blame():
    one, other = two_of(2)
    other._post_exit_reason("failed with ArithmeticError: the physics exploded")
    error = one._peer_error(RuntimeError("recv failed"))
    assert "rank 1 failed with ArithmeticError" in str(error)
    one.leave(error)
    assert other._reason(0) == ""


def test_a_rank_that_is_interrupted_after_another_has_crashed_names_that_one(ended):
    """A launcher interrupts all ranks once it has lost one, which may be the first they hear."""
    one, other = two_of(3)
    one._processes = [(HERE, ended), *one._processes[1:]]
    crashed = (
        f"^rank 1 of 3: rank 0 was ended by a signal, or has crashed, process {process_id(ended)}\n"
    )
    for _ in range(2):  # also once it has left
        with pytest.raises(PeerGoneError, match=crashed):
            one.leave(KeyboardInterrupt())
    assert other._reason(1) == ""


def test_a_rank_that_is_interrupted_after_a_failed_step_leaves_with_the_error_of_that():
    one, other = two_of(2)
    other.leave(ArithmeticError("the physics exploded"))
    error = one._peer_error(RuntimeError("recv failed"))
    one.leave(error)
    with pytest.raises(PeerGoneError, match="the physics exploded"):
        one.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)


def test_an_interrupt_of_all_ranks_is_no_error_of_any(ended):
    one, other = two_of(2)
    other.leave(KeyboardInterrupt())
    one._processes = [*one._processes[:1], (HERE, ended)]
    one.leave(KeyboardInterrupt())


def test_a_rank_of_another_machine_is_not_looked_for_on_this_one(ended):
    ranks, _ = two_of(2)
    for host, found in [(HERE, f"process {process_id(ended)}"), ("elsewhere", "None")]:
        ranks._processes = [(HERE, this_process()), (host, ended)]
        assert found in str(ranks._reason(1))


def test_another_process_by_the_id_of_a_crashed_rank_is_not_taken_for_it():
    ranks, _ = two_of(2)
    ranks._processes = [(HERE, this_process() ^ (1 << 40)), (HERE, this_process())]
    assert f"has crashed, process {os.getpid()}" in str(ranks._reason(0))


def test_a_rank_leaves_though_its_launcher_has_ended_with_the_store():
    ranks = Ranks(1, 2)
    ranks._store = Mock(check=Mock(side_effect=RuntimeError("Connection reset by peer")))
    ranks.leave()
    ranks.leave()
