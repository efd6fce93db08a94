"""Episodes of all simulations at once, beside a plain count of the steps of each."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torchrl_unilab.envs.episodes import Episodes

N, LIMIT = 3, 4
MASK = st.lists(st.booleans(), min_size=N, max_size=N).map(np.array)
DEED = st.one_of(
    st.tuples(st.just("step"), MASK, st.just(np.ones(N, dtype=bool))),
    st.tuples(st.just("partial step"), MASK, MASK),
    st.tuples(st.just("start"), MASK, MASK),
    st.tuples(st.just("save and load"), MASK, MASK),
)


class Plain:
    """The same, one simulation after the other."""

    def __init__(self) -> None:
        self.elapsed = [0] * N
        self.terminated = [False] * N
        self.truncated = [False] * N

    def step(self, terminated: np.ndarray, rows: np.ndarray) -> None:
        for i in np.flatnonzero(rows):
            self.elapsed[i] += 1
            self.terminated[i] = bool(terminated[i])
            self.truncated[i] = self.elapsed[i] >= LIMIT

    def start(self, rows: np.ndarray) -> None:
        for i in np.flatnonzero(rows):
            self.elapsed[i], self.terminated[i], self.truncated[i] = 0, False, False


@given(st.lists(DEED, max_size=20))
def test_episodes_are_what_counting_each_step_of_each_says(deeds):
    episodes, plain = Episodes(N, LIMIT), Plain()
    for deed, terminated, rows in deeds:
        if deed == "step":
            episodes.advance(terminated)
            plain.step(terminated, rows)
        elif deed == "partial step":
            episodes.advance(terminated, np.flatnonzero(rows))
            plain.step(terminated, rows)
        elif deed == "start":
            episodes.start(np.flatnonzero(rows))
            plain.start(rows)
        else:
            state = episodes.state_dict()
            for _ in range(2):
                episodes.start(np.arange(N), elapsed=9)  # which changes nothing that was saved
                episodes = Episodes(N, LIMIT)
                episodes.load_state_dict(state)
        done = np.logical_or(plain.terminated, plain.truncated)
        assert episodes.elapsed.tolist() == plain.elapsed
        assert episodes.terminated.tolist() == plain.terminated
        assert episodes.truncated.tolist() == plain.truncated
        assert episodes.done.tolist() == done.tolist()
        expected = [done, plain.terminated, plain.truncated]
        flags = np.array(episodes.flags())
        assert flags.dtype == bool
        assert flags.tolist() == np.array(expected)[:, :, None].tolist()


def test_what_a_task_said_is_not_written_to():
    terminated = np.array([True, False, True])
    episodes = Episodes(N, LIMIT)
    episodes.advance(terminated)
    episodes.start(np.array([0]))
    for flags in episodes.flags():
        flags[:] = True
    assert terminated.tolist() == [True, False, True]
    assert episodes.terminated.tolist() == [False, False, True]
