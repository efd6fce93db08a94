"""The ring's protocol, checked in every interleaving of a small model, and the code beside it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.ring_model import READ, Label, Model, Outcome, State, explore
from tests.support.rings import DEAD, make_ring
from tests.support.watching import WatchedPipe, WatchedWords
from torchrl_unilab.shm import ring_writer
from torchrl_unilab.shm.ring import RolloutRing
from torchrl_unilab.shm.tokens import TokenPipe

SIZES = [(1, 3, 1), (1, 4, 2), (1, 4, 3), (2, 2, 1), (2, 2, 2)]
KILLED_SIZES = [
    (1, 3, 1),
    (1, 4, 2),
    (1, 4, 3),
    (2, 1, 2),
    pytest.param(2, 2, 2, marks=pytest.mark.slow),
]
OVERFLOW = pytest.mark.parametrize("overflow", ["overwrite", "block"])
SIZE = pytest.mark.parametrize(("writers", "rollouts", "slots"), SIZES)


def check_ends(model: Model, outcome: Outcome) -> None:
    """At each end all was written, is accounted for, and all slots are free."""
    assert outcome.ends
    for end in outcome.ends:
        assert end.at == "look"
        for i, writer in enumerate(end.writers):
            assert writer.committed == model.rollouts, "a writer waits for ever"
            assert writer.committed == writer.read + writer.dropped + writer.lost
            home = range(i * model.slots, (i + 1) * model.slots)
            assert (sorted(writer.free), writer.ready) == ([*home], ())
            assert model.overflow == "overwrite" or writer.dropped == 0


@OVERFLOW
@SIZE
def test_in_no_interleaving_has_a_slot_two_owners_or_a_rollout_two_fates(
    writers, rollouts, slots, overflow
):
    # What was read was whole, in its writer's order and the oldest, or the search had stopped.
    model = Model(writers, rollouts, slots, overflow)

    outcome = explore(model)

    assert not outcome.faults
    check_ends(model, outcome)
    assert all(writer.lost == 0 for end in outcome.ends for writer in end.writers)
    if overflow == "overwrite" and rollouts > slots:
        assert any(end.writers[0].dropped for end in outcome.ends)


@OVERFLOW
@pytest.mark.parametrize(("writers", "rollouts", "slots"), KILLED_SIZES)
def test_a_writer_killed_at_any_step_and_recovered_at_any_time_costs_one_rollout_at_most(
    writers, rollouts, slots, overflow
):
    model = Model(writers, rollouts, slots, overflow, killed=True)

    outcome = explore(model)

    assert not outcome.faults
    check_ends(model, outcome)
    assert {end.writers[0].lost for end in outcome.ends} == {0, 1}
    assert all(writer.lost == 0 for end in outcome.ends for writer in end.writers[1:])


HASTY = ("zero", "drop", "fill 0", "generation", "count", "put", "fill 1")


@pytest.mark.parametrize(
    ("fault", "model"),
    [
        ("mixed", Model(1, 3, 2, "block", fill=HASTY)),
        ("two owners", Model(1, 3, 2, "overwrite", peeks=True)),
        ("two owners", Model(1, 3, 2, "block", read=(*READ, "put again"))),
        ("mixed", Model(1, 3, 2, "block", read=("check", "put", "load 0", "load 1", "count"))),
        ("two owners", Model(1, 3, 2, "block", killed=True, forgets_leases=True)),
        ("two owners", Model(1, 3, 2, "overwrite", hasty=True)),
        ("not the oldest", Model(2, 2, 1, "block", unordered=True)),
    ],
)
def test_the_search_finds_the_fault_of_a_protocol_that_does_less(fault, model):
    assert fault in explore(model).faults


def test_a_slot_that_is_filled_without_its_token_is_noticed_before_the_release():
    faults = explore(Model(1, 3, 2, "overwrite", peeks=True), owners=False).faults

    assert "noticed" in faults
    assert "mixed" not in faults


def test_the_search_finds_the_mix_if_besides_the_second_check_is_left_out():
    read = tuple(step for step in READ if step != "check again")

    model = Model(1, 3, 2, "overwrite", peeks=True, read=read)
    assert "mixed" in explore(model, owners=False).faults


def test_the_search_finds_the_rollout_that_is_dropped_without_a_count():
    ends = explore(Model(1, 3, 2, "overwrite", miscounts=True)).ends

    assert any(end.writers[0].committed > end.writers[0].read for end in ends)


# The code, compared with the model


NAMES = {
    ring_writer.PROCESS: "process",
    ring_writer.COMMITTED: "committed",
    ring_writer.DROPPED: "dropped",
    ring_writer.READ: "read",
    ring_writer.LOST: "lost",
}


def record(ring: RolloutRing) -> list:
    """Note what is done to `ring` from now on, in the model's words."""
    trace: list = []

    def of_writer(index: int, before: int, value: int) -> Label | None:
        writer, word = divmod(index, ring_writer.WRITER_WORDS)
        if word == ring_writer.PROCESS:
            return ("process", writer) if value == 0 else None
        return (NAMES[word], writer, value) if value != before else None

    def watched(pipe: TokenPipe, *name: object) -> WatchedPipe:
        return WatchedPipe(
            pipe,
            lambda slot: trace.append(("take", *name) if slot is None else ("put", *name, slot)),
        )

    def look(index: object) -> None:
        if index == slice(None):
            trace.append(("look",))

    words, generations = ring._words, ring._generations
    ring._free = [watched(p, "free", w) for w, p in enumerate(ring._free)]
    ring._ready = [watched(p, "ready", w) for w, p in enumerate(ring._ready)]
    ring._words = WatchedWords(
        words, lambda index, value: trace.append(of_writer(index, words[index], value))
    )
    ring._generations = WatchedWords(
        generations, lambda slot, value: trace.append(("generation", slot, bool(value))), look
    )
    return trace


def turn(model: Model, state: State, who: int | str) -> tuple[list, State]:
    """Labels of a whole turn of a writer or the reader, undisturbed; none if it has to wait."""
    labels, after = [], state
    rests = "look" if who == "reader" else "take free"
    while True:
        step = model.take(after) if who == "reader" else model.write(after, who)
        if step is None:
            return [], state
        label, after = step
        labels += [label] if label else []
        at = after.at if who == "reader" else after.writers[who].at
        if at == rests:
            return (labels, after) if labels[-1][0] != "take" else ([], state)


@OVERFLOW
@settings(deadline=None)
@given(st.integers(1, 3), st.lists(st.sampled_from([0, 1, "reader"]), max_size=20))
def test_the_code_takes_the_models_steps(overflow, slots, turns):
    model = Model(2, 99, slots, overflow)
    state = model.start()
    with make_ring(elements=2, slots=slots, writers=2, overflow=overflow) as ring:
        trace = record(ring)
        for who in turns:
            expected, state = turn(model, state, who)
            if not expected:
                continue
            if who != "reader":
                ring.become_writer(who)
            trace.clear()
            if who == "reader":
                lease = ring.acquire()
                trace.append(("load", lease.slot))
                ring.release(lease)
            else:
                slot = ring.claim()
                trace.append(("payload", slot))
                ring.commit()
            assert [label for label in trace if label] == expected


@pytest.mark.parametrize("lease", [False, True])
def test_a_recovery_takes_the_models_steps(lease):
    model = Model(2, 99, 3, "block")
    state = turn(model, model.start(), 0)[1]
    state = turn(model, state, 0)[1]
    while state.writers[0].at != "put":
        state = model.write(state, 0)[1]
    while lease and state.at != "load 0":
        state = model.take(state)[1]
    dead = state.writers[0]._replace(dead=True)
    state = state._replace(writers=(dead, state.writers[1]), at="drain free")
    expected = []
    while not state.replaced:
        label, state = model.take(state)
        expected += [label] if label else []
    with make_ring(elements=2, slots=3, writers=2, overflow="block") as ring:
        ring.become_writer(0)
        for _ in range(2):
            ring.claim()
            ring.commit()
        ring.claim()
        ring._words[ring_writer.COMMITTED] += 1  # and dies before the put
        ring._words[ring_writer.PROCESS] = DEAD
        held = ring.acquire() if lease else None
        trace = record(ring)

        assert ring.recover(0) == 1

        found = [label for label in trace if label and label[0] != "generation"]
        assert found == expected
        assert [other.slot for other in ring.leases] == ([held.slot] if held else [])
        trace.clear()
        assert (ring.read, trace) == ((0, 0), [])  # it is complete: no token moves any more
