from __future__ import annotations

import numpy as np
import pytest

from torchrl_unilab.shm import words
from torchrl_unilab.shm.words import LINE, is_weakly_ordered, shared_words


def test_each_word_has_a_line_of_its_own():
    buffer = np.zeros(LINE * 4, np.uint8)
    placed = shared_words(buffer[LINE:], 3)
    placed[0], placed[2] = 1, 2**64 - 1
    assert [placed[i] for i in range(3)] == [1, 0, 2**64 - 1]
    assert np.flatnonzero(buffer.reshape(4, LINE).any(axis=1)).tolist() == [1, 3]


@pytest.mark.parametrize(
    ("machine", "weak"), [("x86_64", False), ("AMD64", False), ("aarch64", True), ("arm64", True)]
)
def test_only_x86_needs_no_fence(machine, weak):
    assert is_weakly_ordered(machine) is weak


def test_a_fence_unlocks_before_it_locks_again(monkeypatch):
    steps: list[str] = []

    class Lock:
        def __enter__(self) -> None:
            steps.append("lock")

        def __exit__(self, *_: object) -> None:
            steps.append("unlock")

    monkeypatch.setattr(words.threading, "Lock", Lock)

    words._lock_twice()

    assert steps == ["lock", "unlock", "lock", "unlock"]


def test_this_processors_fence_is_the_one_that_it_needs():
    assert words.fence is (words._lock_twice if is_weakly_ordered() else bool)
