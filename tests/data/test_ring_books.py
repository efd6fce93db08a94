"""Counts of a ring that go on where others ended, and who its writers are."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from torchrl_unilab.data.ring_books import RingBooks


@dataclass
class Counted:
    """The counts of a ring."""

    written: tuple[int, ...]
    dropped: tuple[int, ...]
    read_count: int
    lost: int


def make_books(writers: int) -> RingBooks:
    return RingBooks(memoryview(bytearray(RingBooks.nbytes(writers))).cast("q"), writers)


count = st.integers(0, 2**40)
three = st.tuples(count, count, count)
rings = st.builds(Counted, written=three, dropped=three, read_count=count, lost=count)
saved = st.fixed_dictionaries(
    {
        "written": three.map(list),
        "dropped": three.map(list),
        "read": count,
        "lost": count,
        "skipped": count,
    }
)


@given(rings)
def test_counts_are_the_rings_until_others_are_loaded(ring):
    books = make_books(3)
    assert books.state_dict(ring) == {
        "written": [*ring.written],
        "dropped": [*ring.dropped],
        "read": ring.read_count,
        "lost": ring.lost,
        "skipped": 0,
    }
    none = books.state_dict(None)
    assert none == {"written": [0] * 3, "dropped": [0] * 3, "read": 0, "lost": 0, "skipped": 0}


@given(st.none() | rings, saved, saved, three, count)
def test_loaded_counts_go_on_as_the_ring_counts(ring, first, last, more, read):
    books = make_books(3)
    for counts in (first, last):
        books.load_state_dict(counts, ring)
        assert books.state_dict(ring) == counts
    then = ring or Counted((0,) * 3, (0,) * 3, 0, 0)
    now = Counted(
        tuple(a + b for a, b in zip(then.written, more, strict=True)),
        then.dropped,
        then.read_count + read,
        then.lost,
    )
    assert books.written(now) == tuple(a + b for a, b in zip(last["written"], more, strict=True))
    assert books.dropped(now) == tuple(last["dropped"])
    assert books.read(now) == last["read"] + read
    assert books.lost(now) == last["lost"]


def test_a_rollout_given_up_was_not_read_but_dropped_or_skipped():
    ring, books = Counted((3, 2), (0, 1), 3, 0), make_books(2)
    books.give_up(1, dropped=True)
    assert (books.read(ring), books.dropped(ring), books.skipped) == (2, (0, 2), 0)
    books.give_up(0, dropped=False)
    assert (books.read(ring), books.dropped(ring), books.skipped) == (1, (0, 2), 1)
    assert books.written(ring) == (3, 2)


def test_each_word_is_of_one_thing():
    books = make_books(2)
    books.set_owner(0, 11)
    books.set_owner(1, 12)
    books.recover(3)
    books.recover(4)
    assert (books.owners([1, 0]), books.recovered) == ({1: 12, 0: 11}, 7)
    books.load_state_dict(
        {"written": [1, 2], "dropped": [3, 4], "read": 5, "lost": 6, "skipped": 8}, None
    )
    books.set_owner(0, 0)
    assert (books.owners(range(2)), books.recovered) == ({0: 0, 1: 12}, 7)
    assert books.state_dict(None) == {
        "written": [1, 2],
        "dropped": [3, 4],
        "read": 5,
        "lost": 6,
        "skipped": 8,
    }
