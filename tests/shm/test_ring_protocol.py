"""The ring's protocol, checked in every interleaving of a small model.

The model has writers that each commit a few rollouts into home slots, one reader, and each
writer's two pipes as first-in first-out queues whose puts and takes happen at once. All else is
one step per load or store; a payload is two words, so that it can be mixed. `explore` follows
every order of the steps, and may kill the first writer before any of its steps; the reader then
recovers it, and another process takes its place. `test_the_code_takes_the_models_steps`
compares the code with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.rings import DEAD, make_ring
from tests.support.watching import WatchedPipe, WatchedWords
from torchrl_unilab.shm import ring_writer
from torchrl_unilab.shm.ring import RolloutRing
from torchrl_unilab.shm.tokens import TokenPipe

FILL = ("zero", "drop", "fill 0", "fill 1", "generation", "count", "put")
READ = ("check", "load 0", "load 1", "check again", "put", "count")
Label = tuple[object, ...]
Step = tuple[Label | None, "State"]


class Token(NamedTuple):
    generation: int
    slot: int


class Writer(NamedTuple):
    """Where a writer is, the token in its hand, its pipes and its words."""

    free: tuple[int, ...]
    ready: tuple[Token, ...] = ()
    at: str = "take free"
    hand: int | None = None
    drops: bool = False  # the slot in hand was unread
    committed: int = 0
    dropped: int = 0
    read: int = 0
    lost: int = 0
    last: int = 0  # the rollout that was last read
    dead: bool = False


class State(NamedTuple):
    """All that there is: the writers, the words of the slots, and the reader."""

    writers: tuple[Writer, ...]
    generations: tuple[int, ...]
    payload: tuple[object, ...]
    taken: tuple[int, ...]  # generation that the reader last took from each slot
    clock: int = 0  # generations are drawn from it
    at: str = "look"  # where the reader is
    order: tuple[int, ...] = ()  # the writers that it has yet to ask
    seen: frozenset[int] = frozenset()  # the generations that were ready when it looked
    lease: Token | None = None
    loaded: tuple[object, ...] = ()
    spare: tuple[int, ...] = ()  # tokens drained by a recovery
    unread: tuple[Token, ...] = ()
    replaced: bool = False


class FaultError(Exception):
    """The model has come to what must not be."""


@dataclass(frozen=True)
class Model:
    """A ring and the parties; `fill` and `read` are the orders of their steps.

    The flags are ways to be broken: a writer that overwrites without taking the token
    (`peeks`), or that does not count what it drops (`miscounts`); a reader that asks the
    writers in turn (`unordered`); a recovery that takes leased slots for orphaned
    (`forgets_leases`), or of a writer that is alive (`hasty`).
    """

    writers: int
    rollouts: int
    slots: int
    overflow: str
    killed: bool = False
    fill: tuple[str, ...] = FILL
    read: tuple[str, ...] = READ
    peeks: bool = False
    miscounts: bool = False
    unordered: bool = False
    forgets_leases: bool = False
    hasty: bool = False

    def start(self) -> State:
        count = self.slots * self.writers
        homes = [tuple(range(w * self.slots, (w + 1) * self.slots)) for w in range(self.writers)]
        zeros = (0,) * count
        return State(tuple(map(Writer, homes)), zeros, (None,) * (2 * count), zeros)

    def write(self, s: State, i: int) -> Step | None:
        """Writer i's next step, or None if it has none."""
        me = s.writers[i]
        number = me.committed + ("count" not in self.fill[: self._index(self.fill, me.at)])
        if me.dead or (me.at == "take free" and me.committed == self.rollouts):
            return None

        def then(at: str | None = None, *, of: State = s, **mine: Any) -> State:
            if at is None:
                following = self._index(self.fill, me.at) + 1
                at = self.fill[following] if following < len(self.fill) else "take free"
            return of._replace(writers=put(of.writers, i, me._replace(at=at, **mine)))

        if me.at == "take free":
            if me.free:
                return ("take", "free", i), then(self.fill[0], free=me.free[1:], hand=me.free[0])
            if self.overflow == "overwrite":
                return ("take", "free", i), then("take ready")
            return None
        if me.at == "take ready":
            if not me.ready:
                return ("take", "ready", i), then("take free")
            rest = me.ready if self.peeks else me.ready[1:]
            mine = {"hand": me.ready[0].slot, "ready": rest, "drops": True}
            return ("take", "ready", i), then(self.fill[0], **mine)
        slot = me.hand
        assert slot is not None
        if me.at == "drop":
            counted = me.drops and not self.miscounts
            after = then(dropped=me.dropped + counted, drops=False)
            return ("dropped", i, me.dropped + 1) if counted else None, after
        if me.at in ("zero", "generation"):
            clock = s.clock + (me.at == "generation")
            value = clock if me.at == "generation" else 0
            after = s._replace(generations=put(s.generations, slot, value), clock=clock)
            return ("generation", slot, bool(value)), then(of=after)
        if me.at in ("fill 0", "fill 1"):
            word = 2 * slot + int(me.at[-1])
            after = s._replace(payload=put(s.payload, word, (i, number)))
            return ("payload", slot) if me.at == "fill 0" else None, then(of=after)
        if me.at == "count":
            return ("committed", i, number), then(committed=number)
        assert me.at == "put"
        ready = (*me.ready, Token(s.generations[slot], slot))
        hand = None if self.fill[-1] == "put" else slot
        return ("put", "ready", i, slot), then(ready=ready, hand=hand)

    @staticmethod
    def _index(steps: tuple[str, ...], at: str) -> int:
        return steps.index(at) if at in steps else 0

    def take(self, s: State) -> Step | None:
        """The reader's next step, or None if it has none."""

        def then(at: str | None = None, *, of: State = s, **mine: Any) -> State:
            if at is None:
                following = self.read.index(s.at) + 1
                at = self.read[following] if following < len(self.read) else "look"
                mine |= {"lease": None, "loaded": ()} if at == "look" else {}
            return of._replace(at=at, **mine)

        if s.at == "look":
            ready = [token for w in s.writers for token in w.ready]
            if not ready:
                return None
            unread = [
                (g, slot) for slot, g in enumerate(s.generations) if g not in (0, s.taken[slot])
            ]
            oldest = [slot // self.slots for _, slot in sorted(unread)]
            order = dict.fromkeys([] if self.unordered else oldest) | dict.fromkeys(
                range(self.writers)
            )
            seen = frozenset(token.generation for token in ready)
            return ("look",), then("take", order=tuple(order), seen=seen)
        if s.at == "take":
            if not s.order:
                return None, then("look", seen=frozenset())
            i = s.order[0]
            writer = s.writers[i]
            if not writer.ready:
                return ("take", "ready", i), then(order=s.order[1:], at="take")
            token, *rest = writer.ready
            others = {other.generation for w in s.writers for other in w.ready}
            older = min(s.seen & others, default=token.generation) < token.generation
            if older and self.overflow == "block":  # else the oldest may just have been dropped
                raise FaultError("not the oldest")
            after = s._replace(
                writers=put(s.writers, i, writer._replace(ready=tuple(rest))),
                taken=put(s.taken, token.slot, token.generation),
            )
            mine = {"lease": token, "order": (), "seen": frozenset()}
            return ("take", "ready", i), then(self.read[0], of=after, **mine)
        if s.at in ("drain free", "drain ready", "judge", "drain again", "put back"):
            return self.recovery(s, then)
        assert s.lease is not None
        slot = s.lease.slot
        i = slot // self.slots
        writer = s.writers[i]
        if s.at in ("check", "check again"):
            if s.generations[slot] != s.lease.generation:
                raise FaultError("noticed")
            return None, then()
        if s.at in ("load 0", "load 1"):
            loaded = (*s.loaded, s.payload[2 * slot + int(s.at[-1])])
            return ("load", slot) if s.at == "load 0" else None, then(loaded=loaded)
        if s.at == "count":
            if len(set(s.loaded)) > 1 or s.loaded[0][0] != i:
                raise FaultError("mixed")
            number = s.loaded[0][1]
            if number <= writer.last:
                raise FaultError("out of order")
            counted = writer._replace(read=writer.read + 1, last=number)
            return ("read", i, counted.read), then(
                of=s._replace(writers=put(s.writers, i, counted))
            )
        assert s.at in ("put", "put again")
        given = writer._replace(free=(*writer.free, slot))
        return ("put", "free", i, slot), then(of=s._replace(writers=put(s.writers, i, given)))

    def recovery(self, s: State, then: Callable[..., State]) -> Step:
        """The reader's next step of the recovery of writer 0."""
        dead = s.writers[0]

        def of(**words: Any) -> State:
            return s._replace(writers=put(s.writers, 0, dead._replace(**words)))

        if s.at == "drain free":
            if not dead.free:
                return ("take", "free", 0), then("drain ready")
            after = of(free=dead.free[1:])
            return ("take", "free", 0), then("drain free", of=after, spare=(*s.spare, dead.free[0]))
        if s.at == "drain ready":
            if not dead.ready:
                return ("take", "ready", 0), then("judge")
            after, unread = of(ready=dead.ready[1:]), (*s.unread, dead.ready[0])
            return ("take", "ready", 0), then("drain ready", of=after, unread=unread)
        if s.at == "judge":
            leased = s.lease is not None and s.lease.slot < self.slots
            held = {*s.spare, *(token.slot for token in s.unread)}
            if leased and not self.forgets_leases:
                held.add(s.lease.slot)  # type: ignore[union-attr]
            orphaned = [slot for slot in range(self.slots) if slot not in held]
            gone = dead.dropped + dead.read + len(s.unread) + leased
            hand = None if dead.dead else dead.hand
            after = of(lost=dead.committed - gone, hand=hand)
            changed = dead.committed - gone != dead.lost
            label = ("lost", 0, dead.committed - gone) if changed else None
            for slot in orphaned:
                after = after._replace(generations=put(after.generations, slot, 0))
            return label, then("drain again", of=after, spare=(*s.spare, *orphaned))
        if s.at == "drain again":  # for what an interrupted recovery had put back
            return ("take", "ready", 0), then("put back")
        if s.unread:
            after = of(ready=(*dead.ready, s.unread[0]))
            label = ("put", "ready", 0, s.unread[0].slot)
            return label, then("put back", of=after, unread=s.unread[1:])
        if s.spare:
            after = of(free=(*dead.free, s.spare[0]))
            return ("put", "free", 0, s.spare[0]), then("put back", of=after, spare=s.spare[1:])
        again = of(at="take free", hand=None, drops=False, dead=False)
        at = "look" if s.lease is None else "load 0"
        return ("process", 0), again._replace(at=at, replaced=True)

    def faults(self, s: State) -> Iterator[State]:
        """The states that a death, or a recovery, leads to."""
        first = s.writers[0]
        if not (self.killed or self.hasty) or s.replaced:
            return
        if self.killed and not first.dead:
            yield s._replace(writers=put(s.writers, 0, first._replace(dead=True)))
        if (first.dead or self.hasty) and s.at in ("look", "load 0"):  # between two calls
            yield s._replace(at="drain free")


def put(words: tuple, index: int, value: object) -> tuple:
    return (*words[:index], value, *words[index + 1 :])


def check_owners(model: Model, s: State) -> None:
    """Each home slot is in one of its writer's pipes, or has one owner, dead or alive."""
    given = model.read[model.read.index("put") + 1 :]
    filled = model.fill[model.fill.index("put") + 1 :]
    for i, writer in enumerate(s.writers):
        held = [*writer.free, *(token.slot for token in writer.ready)]
        held += [] if writer.hand is None or writer.at in filled else [writer.hand]
        if i == 0:
            held += [*s.spare, *(token.slot for token in s.unread)]
        if s.lease is not None and s.lease.slot // model.slots == i and s.at not in given:
            held.append(s.lease.slot)
        if len(held) > len(set(held)):
            raise FaultError("two owners")
        if len(held) < model.slots:
            raise FaultError("a slot is lost")
        may_wait = model.overflow == "block" or model.slots == 1 or writer.hand is not None
        if not (may_wait or writer.free or writer.ready or s.spare or s.unread):
            raise FaultError("an overwriting writer waits for one lease")


@dataclass
class Outcome:
    """What `explore` has met: states, faults, and the states in which no party has a step."""

    states: int = 0
    faults: set[str] = field(default_factory=set)
    ends: set[State] = field(default_factory=set)


def explore(model: Model, *, owners: bool = True) -> Outcome:
    """Follow every interleaving; `owners` says whether two owners end the search there."""
    outcome = Outcome()
    pending = [model.start()]
    seen = set(pending)
    while pending:
        state = pending.pop()
        try:
            if owners:
                check_owners(model, state)
            steps = [*(model.write(state, i) for i in range(model.writers)), model.take(state)]
            following = [step[1] for step in steps if step is not None]
            faults = [*model.faults(state)]
            if not following and not faults:
                outcome.ends.add(state)
        except FaultError as fault:
            outcome.faults.add(str(fault))
            continue
        for after in (*following, *faults):
            if after not in seen:
                seen.add(after)
                pending.append(after)
    outcome.states = len(seen)
    return outcome


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

    assert (
        "mixed" in explore(Model(1, 3, 2, "overwrite", peeks=True, read=read), owners=False).faults
    )


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
