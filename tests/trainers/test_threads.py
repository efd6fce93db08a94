"""The learner's thread count follows what its updates take."""

from collections.abc import Callable

import pytest

from torchrl_unilab.trainers.threads import ThreadChoice, thread_counts

TRIAL, REST = 4, 50


def _run(choice: ThreadChoice, pieces: int, seconds: Callable[[int], float]) -> tuple[float, int]:
    """Work so many pieces; return the seconds of all, and the count after the last one."""
    total = 0.0
    for _ in range(pieces):
        took = seconds(choice.count)
        choice.took(took)
        total += took
    return total, choice.count


def _quiet(threads: int) -> float:
    return 1.0 / threads


def _busy(threads: int) -> float:
    return 1.0 if threads == 1 else 3.0


@pytest.mark.parametrize(
    ("most", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])]
)
def test_the_counts_to_try_are_powers_of_two_and_the_highest(most, counts):
    assert thread_counts(most) == counts


@pytest.mark.parametrize(("seconds", "best"), [(_quiet, 4), (_busy, 1), (lambda _: 1.0, 1)])
def test_the_fastest_count_is_chosen_and_the_lower_of_equals(seconds, best):
    choice = ThreadChoice([1, 2, 4], trial=TRIAL, rest=REST)
    assert _run(choice, 3 * TRIAL, seconds)[1] == best


def test_a_gain_below_a_tenth_takes_no_more_threads():
    choice = ThreadChoice([1, 2], trial=TRIAL, rest=REST)
    assert _run(choice, 2 * TRIAL, lambda count: 1.0 if count == 1 else 0.95)[1] == 1


def test_a_program_that_begins_beside_it_is_noticed_after_a_few_pieces():
    choice = ThreadChoice([1, 2], trial=TRIAL, rest=10_000)
    assert _run(choice, 100, _quiet)[1] == 2
    assert _run(choice, 3 * TRIAL, _busy)[1] == 1


def test_cores_that_become_idle_are_taken_at_the_next_trial():
    choice = ThreadChoice([1, 2], trial=TRIAL, rest=REST)
    assert _run(choice, 100, _busy)[1] == 1
    assert _run(choice, REST + 2 * TRIAL, _quiet)[1] == 2


def test_beside_a_busy_program_trials_cost_less_than_a_tenth_of_one_threads_time():
    pieces = 1000
    seconds, _ = _run(ThreadChoice([1, 2]), pieces, _busy)
    assert seconds < 1.1 * pieces


def test_the_first_piece_of_a_trial_does_not_count():
    choice = ThreadChoice([1, 2], trial=TRIAL, rest=REST)
    for took in (9.0, 1.0, 1.0, 1.0, 9.0, 0.5, 0.5, 0.5):
        choice.took(took)
    assert choice.count == 2


def test_a_single_count_stays():
    choice = ThreadChoice([3], trial=TRIAL, rest=REST)
    assert _run(choice, 200, _busy)[1] == 3
