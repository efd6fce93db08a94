from __future__ import annotations

import numpy as np
import pytest

from torchrl_unilab.shm.words import LINE, SharedWords, is_weakly_ordered


def test_each_word_has_a_line_of_its_own():
    buffer = np.zeros(LINE * 4, np.uint8)
    words = SharedWords(buffer, LINE, 3)
    words[0], words[2] = 1, 2**64 - 1
    assert len(words) == 3
    assert [words[i] for i in range(3)] == [1, 0, 2**64 - 1]
    assert np.flatnonzero(buffer.reshape(4, LINE).any(axis=1)).tolist() == [1, 3]


@pytest.mark.parametrize(("offset", "count"), [(8, 1), (0, 3), (LINE, 2)])
def test_words_off_a_line_or_outside_the_buffer_are_refused(offset, count):
    with pytest.raises(ValueError, match="cannot place words"):
        SharedWords(np.zeros(2 * LINE, np.uint8), offset, count)


@pytest.mark.parametrize(
    ("machine", "weak"), [("x86_64", False), ("AMD64", False), ("aarch64", True), ("arm64", True)]
)
def test_only_x86_needs_no_fence(machine, weak):
    assert is_weakly_ordered(machine) is weak
