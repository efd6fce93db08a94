"""Deadlines, and what ends at them."""

from __future__ import annotations

import itertools
import math
import os
import select
import time
from collections.abc import Iterator

import pytest

from torchrl_unilab.errors import ConfigError
from torchrl_unilab.waits import deadline, poll_while, watch


@pytest.mark.parametrize(("timeout", "left"), [(None, math.inf), (math.inf, math.inf), (60, 60.0)])
def test_a_deadline_is_so_many_seconds_away(timeout, left):
    assert deadline(timeout) - time.monotonic() == pytest.approx(left, abs=30.0)


@pytest.mark.parametrize("timeout", [0, -5.0, math.nan])
def test_a_deadline_of_nothing_is_now(timeout):
    assert deadline(timeout) <= time.monotonic()


@pytest.mark.parametrize("timeout", ["2", [1.0]], ids=str)
def test_a_deadline_of_no_number_is_refused(timeout):
    with pytest.raises(ConfigError, match=r"^timeout: .*expected seconds, or None"):
        deadline(timeout)


def test_a_poll_ends_with_the_first_result_that_is_false():
    results = iter([[1, 2], [1], [], [3]])
    assert poll_while(lambda: next(results), None, 0.0) == []
    assert next(results) == [3]


def test_a_poll_without_time_looks_once_and_returns_what_it_found():
    results = iter([[1, 2], [1]])
    assert poll_while(lambda: next(results), 0.0, 60.0) == [1, 2]
    assert next(results) == [1]


def test_a_poll_pauses_between_two_looks():
    looks = itertools.count(1)
    assert poll_while(lambda: next(looks), 0.1, 0.03) <= 5


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe that is empty."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_a_watch_lasts_for_its_timeout_and_yields_each_period(pipe):
    begun = time.monotonic()
    looks = [*watch({pipe[0]: select.POLLIN}, 0.1, 0.03)]
    assert time.monotonic() - begun > 0.09
    assert 1 < len(looks) <= 5  # it sleeps between them
    assert {*looks} == {()}


def test_a_watch_yields_the_descriptors_that_have_their_events(pipe):
    reads, writes = pipe
    events = {reads: select.POLLIN, writes: select.POLLOUT}
    assert next(watch(events, None, 60.0)) == (writes,)
    os.write(writes, b"x")
    assert {*next(watch(events, None, 60.0))} == {reads, writes}
