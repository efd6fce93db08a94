from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from tests.support.bounds import DEADLINE, PATIENCE
from tests.support.processes import receive
from tests.support.worlds import world
from torchrl_unilab.errors import (
    ConfigError,
    DivergedError,
    PeerGoneError,
    UsageError,
    WaitTimeoutError,
)
from torchrl_unilab.runtime import Ranks
from torchrl_unilab.runtime.ranks import SINGLE_RANK


def use_each_verb(_: Any) -> dict[str, Any]:
    """What each verb makes of what differs between ranks."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with Ranks.of_torchrun(timeout=math.inf) as ranks:
        own = float(ranks.rank + 1)
        gradients, statistics = [torch.full((2, 3), own), torch.full((1,), -own)], torch.zeros(2)
        statistics[1] = math.nan
        ranks.mean_(gradients, [statistics])
        ranks.mean_([huge := torch.full((4,), 3e38)], [])  # whose sum is not finite
        ranks.mean_([], [only := torch.full((1,), own)])
        given = torch.full((2,), own, dtype=torch.float64)
        ranks.broadcast_([given])
        results = {
            "mean": [*gradients[0].flatten().tolist(), *gradients[1].tolist()],
            "statistics": statistics.isnan().tolist(),
            "only": only.item(),
            "huge": bool((huge == 3e38).all()),
            "gathered": [one.tolist() for one in ranks.gather(torch.tensor([own]))],
            "broadcast": given.tolist(),
            "agreed": [ranks.agree(wish) for wish in (False, True, ranks.rank == 1)],
        }
        for i in range(50):  # the faster one is a call ahead of the other's reading
            ranks.check_same({"call": i, "bound": math.nan})
        with pytest.raises(ConfigError, match=r"own: (None, nothing|nothing, None) on ranks"):
            ranks.check_same({"own": None} if ranks.rank else {})
        with pytest.raises(ConfigError) as refused:
            ranks.check_same({"lr": 0.1, "seed": own})
        huge = torch.tensor([math.inf if ranks.rank else 0.0])
        with pytest.raises(DivergedError) as unseen:
            ranks.gather(huge)
        ranks.mean_([huge], [statistics])
        ranks.mean_([torch.tensor([0.0 if ranks.rank else math.nan])], [])  # which follows from it
        with pytest.raises(DivergedError) as diverged:
            ranks.agree(False)
        results |= {"settings": str(refused.value), "overflow": str(diverged.value)}
        results |= {"observations": str(unseen.value), "SIGTERM": signal.getsignal(signal.SIGTERM)}
    with ranks:
        results["again"] = ranks.agree(False)
        ranks.mean_([torch.tensor([0.0 if ranks.rank else math.nan])], [])
        with pytest.raises(DivergedError) as first:
            ranks.agree(False)
        results["first"] = str(first.value)
    return results


@pytest.fixture(scope="module")
def verbs() -> list[dict[str, Any]]:
    with world(use_each_verb) as ranks:
        return ranks.results()


def test_all_ranks_come_to_the_same(verbs):
    first, second = (str(one) for one in verbs)  # as NaN does not equal itself
    assert first == second


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("mean", [1.5] * 6 + [-1.5], id="gradients and statistics become means"),
        pytest.param("statistics", [False, True], id="a statistic that is NaN hurts no other"),
        pytest.param("only", 1.5, id="statistics without gradients become means as well"),
        pytest.param("huge", True, id="the mean of numbers whose sum is too large is finite"),
        pytest.param("again", False, id="who joins again begins without what was not finite"),
        pytest.param("gathered", [[1.0], [2.0]], id="what is gathered is in the order of ranks"),
        pytest.param("broadcast", [1.0, 1.0], id="a broadcast gives rank 0's values"),
        pytest.param("agreed", [False, True, True], id="a wish of any rank is agreed upon"),
        pytest.param("SIGTERM", signal.SIG_IGN, id="what is done at SIGTERM stays as it is"),
    ],
)
def test_each_verb_gives_all_ranks_what_it_promises(verbs, name, expected):
    assert verbs[1][name] == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("overflow", "of rank 1 are not finite", id="gradients"),
        pytest.param("first", "of rank 0 are not finite", id="gradients of the first"),
        pytest.param("observations", "observations of rank 1 are not finite", id="observations"),
        pytest.param("settings", r"^seed: 1\.0, 2\.0 on ranks 0 to 1", id="settings"),
    ],
)
def test_what_is_not_finite_or_differs_ends_all_ranks_and_is_named(verbs, name, message):
    assert re.search(message, verbs[0][name])


def step_until_told(pipe: Any) -> None:
    """Come to steps until one fails; a rank that is told to fails."""
    with Ranks.of_torchrun() as ranks:
        ranks.agree(False)
        pipe.send(os.getpid())
        while True:
            if pipe.poll(0):
                pipe.recv()
                raise ArithmeticError("the physics exploded")
            ranks.agree(False)


def test_a_rank_that_is_killed_ends_the_others_which_name_it():
    with world(step_until_told) as ranks:
        _, pid = (receive(pipe) for pipe in ranks.pipes)
        os.kill(pid, signal.SIGKILL)
        error = receive(ranks.pipes[0])
    assert isinstance(error, PeerGoneError)
    assert f"rank 1 was ended by a signal, or has crashed, process {pid}" in str(error)


SHORT = 5.0 * PATIENCE
"""Seconds to join, in which a slow machine does so, and then to wait for a rank in vain."""


def step_once_told(pipe: Any) -> None:
    """Come to one step."""
    with Ranks.of_torchrun(timeout=SHORT) as ranks:
        pipe.send(os.getpid())
        pipe.recv()
        ranks.agree(False)


def test_a_rank_that_is_stopped_ends_the_others_which_name_it():
    with world(step_once_told) as ranks:
        _, pid = (receive(pipe) for pipe in ranks.pipes)
        os.kill(pid, signal.SIGSTOP)
        ranks.pipes[0].send("now")
        error = receive(ranks.pipes[0])
    assert isinstance(error, PeerGoneError)
    assert f"rank 1 was stopped by a signal, process {pid}" in str(error)


def test_a_rank_that_fails_ends_the_others_with_its_own_words():
    with world(step_until_told) as ranks:
        for pipe in ranks.pipes:
            receive(pipe)
        ranks.pipes[1].send("now")
        here, there = ranks.results()
    assert isinstance(there, ArithmeticError)
    assert isinstance(here, PeerGoneError)
    assert "rank 1 failed with ArithmeticError: the physics exploded" in str(here)


def test_of_three_ranks_the_one_to_blame_is_named_and_no_other():
    with world(step_until_told, size=3) as ranks:
        *_, pid = (receive(pipe) for pipe in ranks.pipes)
        os.kill(pid, signal.SIGKILL)
        errors = [str(receive(pipe)) for pipe in ranks.pipes[:2]]
    for error in errors:
        assert f"rank 2 was ended by a signal, or has crashed, process {pid}" in error
        assert "rank 0 was" not in error
        assert "rank 1 was" not in error


def test_a_rank_that_is_late_ends_the_others_which_name_it_and_then_itself():
    with world(step_once_told) as ranks:
        for pipe in ranks.pipes:
            receive(pipe)
        ranks.pipes[0].send("now")
        error = receive(ranks.pipes[0])
        ranks.pipes[1].send("late")
        late = receive(ranks.pipes[1])
    assert isinstance(error, PeerGoneError)
    assert f"rank 1 did not come to a step within {SHORT:g} s" in str(error)
    assert isinstance(late, PeerGoneError)
    assert "rank 1 of 2: came late, or for another step than the others" in str(late)


def leave_first(_: Any) -> None:
    """Rank 1 is done, and rank 0 is not."""
    with Ranks.of_torchrun() as ranks:
        for _ in range(2 - ranks.rank):
            ranks.agree(False)


def test_a_rank_that_is_done_before_the_others_is_named_as_such():
    with world(leave_first) as ranks:
        error, _ = ranks.results()
    assert "rank 1 is done" in str(error)


def join_of_two(_: Any) -> None:
    """Wait for a rank that nobody has started."""
    os.environ["WORLD_SIZE"] = "2"
    with Ranks.of_torchrun(timeout=1.0):
        pass


def test_ranks_that_never_come_are_not_waited_for_without_end():
    with world(join_of_two, size=1) as ranks:
        (error,) = ranks.results()
    assert isinstance(error, WaitTimeoutError)
    assert "rank 0 of 2: cannot join the others" in str(error)


def starts(store: HashStore, ranks: Sequence[int]) -> list[str]:
    """What two ranks, which come in this order, call the start at which they meet."""
    with ThreadPoolExecutor(2) as threads:
        found = {rank: threads.submit(Ranks(rank, 2)._agree_on_prefix, store) for rank in ranks}
        return [found[rank].result(DEADLINE) for rank in range(2)]


def test_ranks_that_start_again_meet_whatever_earlier_starts_have_left():
    store, names = HashStore(), []
    for order in ((0, 1), (1, 0), (0, 1)):
        first, second = starts(store, order)
        assert first == second
        names.append(first)
    assert len({*names}) == 3


def test_a_rank_does_not_meet_what_died_before_it():
    store = HashStore()
    dead = Ranks(1, 2, timeout=0.01)
    with pytest.raises(TimeoutError, match="not all have come"):
        dead._agree_on_prefix(store)
    first, second = starts(store, (0, 1))
    assert first == second


@pytest.mark.parametrize(
    ("device", "gpus", "backend", "chosen"),
    [
        ("cuda", 2, "cpu:gloo,cuda:nccl", [1]),
        ("cuda", 1, "gloo", [0]),
        ("cuda:1", 2, "gloo", []),  # one for all ranks, which NCCL does not take
        ("cpu", 2, "gloo", []),
    ],
)
def test_each_rank_has_a_gpu_of_its_own_or_they_share_by_gloo(
    monkeypatch, device, gpus, backend, chosen
):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    assert Ranks(1, 2, device=device)._choose_backend() == backend
    assert found == chosen


def wait_in_vain(pipe: Any) -> str:
    """Rank 0 waits for rank 1, which comes to no step."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        with Ranks.of_torchrun() as ranks:
            pipe.send(os.getpid())
            if ranks.rank:
                pipe.poll(None)
            ranks.agree(False)
    except KeyboardInterrupt:
        assert signal.getsignal(signal.SIGTERM) is before
        return "interrupted"
    return "not interrupted"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_waits_for_another_can_be_interrupted(number):
    with world(wait_in_vain) as ranks:
        pid, _ = (receive(pipe) for pipe in ranks.pipes)
        os.kill(pid, number)
        assert receive(ranks.pipes[0]) == "interrupted"


@pytest.mark.parametrize("rank", ["1", "-1"])
def test_a_rank_that_no_world_has_is_refused(rank, monkeypatch):
    """A job array may set RANK alone: each job would take itself for one that writes nothing."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(ConfigError, match=rf"rank: {rank} \(expected an integer of 0 to 0\)"):
        Ranks.of_torchrun()


@pytest.mark.parametrize(
    "wrong", [{"size": 0}, {"size": 2.0}, {"rank": True}, {"timeout": 0}, {"timeout": math.nan}]
)
def test_ranks_that_cannot_be_are_refused(wrong):
    with pytest.raises(ConfigError, match="rank"):
        Ranks(**{"rank": 0, "size": 2} | wrong)


@pytest.mark.parametrize(
    "verb", [lambda ranks: ranks.agree(True), lambda ranks: ranks.check_same({"seed": 1})]
)
def test_the_error_for_ranks_that_have_not_joined_says_how_to(verb):
    with pytest.raises(UsageError, match=r"rank 1 of 2: not among .* Use it in a with statement"):
        verb(Ranks(1, 2))


def test_a_process_that_has_a_process_group_is_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="has a process group already"), Ranks(0, 2):
        pass


def test_what_ended_an_earlier_world_is_not_blamed_for_an_interrupt_of_the_next(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    ranks = Ranks(0, 2)
    ranks._gone = PeerGoneError("rank 1 was ended")
    with pytest.raises(ConfigError), ranks:
        pass
    ranks.leave(KeyboardInterrupt())


def test_alone_each_verb_leaves_all_as_it_is(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    gradient, statistics = torch.ones(2), torch.full((1,), math.nan)
    with Ranks.of_torchrun() as ranks:
        ranks.mean_([gradient], [statistics])
        ranks.broadcast_([gradient])
        ranks.check_same({"seed": 1})
        assert ranks.gather(statistics) == [statistics]
        assert [ranks.agree(wish) for wish in (True, False)] == [True, False]
    assert gradient.tolist() == [1.0, 1.0]
    assert not torch.distributed.is_initialized()
    assert (SINGLE_RANK.rank, SINGLE_RANK.size) == (0, 1)
