"""The ring's protocol, checked in every interleaving of a small model.

The model has writers that each commit a few rollouts, one reader, and the two pipes as
first-in first-out queues whose puts and takes happen at once. All else takes one step per
load or store: a payload is two words, so that it can be mixed. `explore` follows every
order of the steps, and may kill one party before any of its steps; another may then take its
place as soon as the slots are recovered. That the code takes the same steps as the model is a
test of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_unilab.shm import ring as ring_module
from torchrl_unilab.shm.ring import RolloutRing
from torchrl_unilab.shm.ring_notes import IDLE, MOVING
from torchrl_unilab.shm.tokens import Token

NOBODY = -1
FILL = ("note", "odd", "fill 0", "fill 1", "even", "move", "count", "put", "idle")
READ = ("take", "check", "load 0", "load 1", "check again", "count", "put")
Label = tuple[object, ...]


class Writer(NamedTuple):
    """Where a writer is, the slot it owns, and its words."""

    at: str
    slot: int = NOBODY
    robbed: int = NOBODY  # whose rollout it has just dropped
    note: int = IDLE
    changed: bool = False  # the note, since the census first looked: its count is another then
    committed: int = 0
    dropped: int = 0
    dead: bool = False


class Reader(NamedTuple):
    """Where the reader is, what it owns, has loaded and has read."""

    at: str = "wait"
    token: Token | None = None
    loaded: tuple[object, ...] = ()
    awaited: tuple[Token, ...] = ()
    read: int = 0
    last: tuple[int, ...] = ()  # sequence last read of each writer
    dead: bool = False


class Census(NamedTuple):
    """How far the one who recovers slots is, and what it knows."""

    at: str = "look"
    notes: tuple[int, ...] = ()
    changed: bool = False  # any of them, in between
    free: tuple[int, ...] = ()
    missing: int = 0
    found: tuple[int, ...] = ()


class State(NamedTuple):
    """All that there is: the pipes, the shared words, the parties."""

    free: tuple[int, ...]
    ready: tuple[Token, ...]
    generations: tuple[int, ...]
    payload: tuple[object, ...]
    writers: tuple[Writer, ...]
    reader: Reader
    recovered: int | None = None  # slot being taken over, NOBODY once that is over
    census: Census | None = None  # of whoever recovers; at the end "over"
    lost: int = 0


@dataclass(frozen=True)
class Model:
    """A ring and who takes part; `fill` and `read` are the orders of the steps.

    Once a party is dead, `recovers` says what is done: ``"taken over"``, the first writer is
    by its note; ``"census"``, all slots that nobody holds are found, and another process goes
    on in the place of the dead one.

    `peeks` and `miscounts` are ways to be broken: a writer that overwrites without taking
    the token, and one that does not count what it drops. So are `hides`, a writer that does
    not note that it takes, `repeats`, one whose notes are not counted, and `trusts`, a census
    that does not look again.
    """

    writers: int
    rollouts: int
    slots: int
    overflow: str
    killed: str | None = None  # "writer", the first, or "reader"
    recovers: str | None = None
    fill: tuple[str, ...] = FILL
    read: tuple[str, ...] = READ
    peeks: bool = False
    miscounts: bool = False
    hides: bool = False
    repeats: bool = False
    trusts: bool = False

    def start(self) -> State:
        return State(
            free=tuple(range(self.slots)),
            ready=(),
            generations=(0,) * self.slots,
            payload=(None,) * (2 * self.slots),
            writers=(Writer(self.first(0)),) * self.writers,
            reader=Reader(last=(0,) * self.writers),
        )

    def write(self, s: State, i: int) -> tuple[Label | None, State] | None:
        """Writer i's next step, or None if it has none."""
        me, overwrites = s.writers[i], self.overflow == "overwrite"
        slot, steps = me.slot, self.fill
        counted = me.at in steps and "count" in steps[: steps.index(me.at)]
        number = me.committed + (not counted)

        def then(at: str | None = None, *, of: State = s, **mine: object) -> State:
            if at is None:
                following = steps.index(me.at) + 1
                at = steps[following] if following < len(steps) else self.first(me.committed)
                mine |= {"slot": NOBODY} if following == len(steps) else {}
            writers = (*s.writers[:i], me._replace(at=at, **mine), *s.writers[i + 1 :])
            return of._replace(writers=writers)

        def noting(state: int, at: str | None = None) -> State:
            return then(at, note=state, changed=s.census is not None and s.census != OVER)

        if me.dead or me.at == "done":
            return None
        if me.at == "wait":
            ready = s.free or (overwrites and s.ready)
            return (None, then(self.first(me.committed))) if ready else None
        if me.at == "move first":
            return ("store", "note", MOVING), noting(MOVING, "take free")
        if me.at == "idle again":
            return ("store", "note", IDLE), noting(IDLE, "wait")
        if me.at == "take free":
            if s.free:
                rest = s._replace(free=s.free[1:])
                return ("take", "free"), then(self.fill[0], of=rest, slot=s.free[0])
            vain = "wait" if self.hides else "idle again"
            return ("take", "free"), then("take ready" if overwrites else vain)
        if me.at == "take ready":
            if not s.ready:
                return ("take", "ready"), then("wait" if self.hides else "idle again")
            oldest, *rest = s.ready
            taken = s if self.peeks else s._replace(ready=tuple(rest))
            at = self.fill[0] if self.miscounts else "count drop"
            return ("take", "ready"), then(at, of=taken, slot=oldest.slot, robbed=oldest.writer)
        if me.at == "count drop":
            label = ("store", "dropped", me.robbed)
            return label, then(self.fill[0], dropped=me.dropped + 1, robbed=NOBODY)
        if me.at == "note":
            return ("store", "note", slot + 1), noting(slot + 1)
        if me.at in ("odd", "even"):
            now = s.generations[slot] + 1
            now = now | 1 if me.at == "odd" else now
            changed = s._replace(generations=put(s.generations, slot, now))
            return ("store", "generation", slot, now), then(of=changed)
        if me.at in ("fill 0", "fill 1"):
            word = 2 * slot + int(me.at[-1])
            filled = s._replace(payload=put(s.payload, word, (i, number)))
            return ("store", "payload", slot) if me.at == "fill 0" else None, then(of=filled)
        if me.at in ("move", "idle"):
            state = MOVING if me.at == "move" else IDLE
            return ("store", "note", state), noting(state)
        if me.at == "put":
            token = Token(slot, i, number, s.generations[slot])
            return ("put", "ready", token), then(of=s._replace(ready=(*s.ready, token)))
        assert me.at == "count"
        return ("store", "committed", number), then(committed=number)

    def first(self, committed: int) -> str:
        """The first step of a writer's next rollout."""
        if committed == self.rollouts:
            return "done"
        return "take free" if self.hides else "move first"

    def take(self, s: State) -> tuple[Label | None, State] | None:
        """The reader's next step, or None if it has none."""
        me = s.reader

        def then(at: str | None = None, *, of: State = s, **mine: object) -> State:
            if at is None:
                following = self.read.index(me.at) + 1
                at = self.read[following] if following < len(self.read) else "wait"
                mine |= {"token": None, "loaded": ()} if at == "wait" else {}
            return of._replace(reader=me._replace(at=at, **mine))

        if me.dead or s.census not in (None, OVER):
            return None
        if me.at == "wait" and me.awaited:
            return None, then(self.read[1], token=me.awaited[0], awaited=me.awaited[1:])
        if me.at == "wait":
            return (None, then("take")) if s.ready else None
        if me.at == "take":
            if not s.ready:
                return ("take", "ready"), then("wait")
            oldest, *rest = s.ready
            return ("take", "ready"), then(of=s._replace(ready=tuple(rest)), token=oldest)
        assert me.token is not None
        slot, writer, sequence, generation = me.token
        if me.at in ("check", "check again"):
            if s.generations[slot] != generation:
                raise FaultError("noticed")
            return ("load", "generation", slot), then()
        if me.at in ("load 0", "load 1"):
            loaded = (*me.loaded, s.payload[2 * slot + int(me.at[-1])])
            return ("load", "payload", slot) if me.at == "load 0" else None, then(loaded=loaded)
        if me.at == "count":
            if set(me.loaded) != {(writer, sequence)}:
                raise FaultError("mixed")
            if sequence <= me.last[writer]:
                raise FaultError("out of order")
            last = put(me.last, writer, sequence)
            return ("store", "read"), then(read=me.read + 1, last=last)
        assert me.at in ("put", "put again")
        return ("put", "free", slot), then(of=s._replace(free=(*s.free, slot)))

    def recover(self, s: State) -> tuple[Label | None, State] | None:
        """The next step of whoever recovers what the dead party held."""
        if self.recovers == "census":
            return self.count(s)
        dead = s.writers[0]
        if not (self.recovers and dead.dead) or s.recovered == NOBODY:
            return None
        if s.recovered is None:
            slot = dead.note - 1 if dead.note not in (IDLE, MOVING) else NOBODY
            writers = (dead._replace(note=IDLE), *s.writers[1:])
            return ("store", "note", IDLE), s._replace(writers=writers, recovered=slot)
        free = (*s.free, s.recovered)
        writers = (dead._replace(slot=NOBODY), *s.writers[1:])
        return ("put", "free", s.recovered), s._replace(
            free=free, writers=writers, recovered=NOBODY
        )

    def count(self, s: State) -> tuple[Label | None, State] | None:
        """The next step of the census, between two steps of the reader's or instead of it."""
        reader, census, dead = s.reader, s.census, s.writers[0].dead
        if census == OVER:
            return None
        if census is None:
            between = reader.dead or reader.at in ("wait", "load 0")
            if not (between and (dead or reader.dead)):
                return None
            fresh = reader._replace(at="wait", token=None, loaded=(), dead=False)
            return None, s._replace(census=Census(), reader=fresh if reader.dead else reader)

        def then(at: str | None = None, *, of: State = s, **mine: object) -> State:
            return of._replace(census=census._replace(at=at or census.at, **mine))

        if census.at == "look":
            i = len(census.notes)
            looked = s.writers[i]._replace(changed=False)
            after = s._replace(writers=put(s.writers, i, looked))
            at = "empty free" if i + 1 == self.writers else None
            return None, then(at, of=after, notes=(*census.notes, looked.note))
        if census.at == "empty free":
            if not s.free:
                return ("take", "free"), then("empty ready")
            rest = s._replace(free=s.free[1:])
            return ("take", "free"), then(of=rest, free=(*census.free, s.free[0]))
        if census.at == "empty ready":
            if not s.ready:
                return ("take", "ready"), then("miss")
            awaited = (*reader.awaited, s.ready[0])
            taken = s._replace(ready=s.ready[1:], reader=reader._replace(awaited=awaited))
            return ("take", "ready"), then(of=taken)
        if census.at == "miss":
            held = len(reader.awaited) + (reader.token is not None)
            missing = written(s) - dropped(s) - s.lost - reader.read - held
            return None, then("judge" if self.trusts else "look again 0", missing=missing)
        if census.at.startswith("look again"):
            i = int(census.at[-1])
            at = f"look again {i + 1}" if i + 1 < self.writers else "judge"
            writer, known = s.writers[i], census.notes[i]
            changed = writer.note != known if self.repeats else writer.changed
            return None, then(at, changed=census.changed or changed)
        if census.at == "judge":
            alive = census.notes[1:] if dead else census.notes
            if census.changed or MOVING in alive:
                return None, then("look", notes=(), changed=False)
            held = {*census.free, *(token.slot for token in reader.awaited)}
            held |= {reader.token.slot} if reader.token else set()
            held |= {note - 1 for note in alive}
            found = sorted(set(range(self.slots)) - held)
            return None, then("forget", found=tuple(found))
        if census.at == "forget":
            writers = s.writers
            if dead:  # and its place is taken at once
                gone = writers[0]
                again = Writer(self.first(gone.committed), committed=gone.committed)
                writers = (again._replace(dropped=gone.dropped), *writers[1:])
            known = s._replace(lost=s.lost + census.missing, writers=writers)
            label = ("store", "note", IDLE) if dead else None
            free = (*census.free, *census.found)
            return label, known._replace(census=Census("give", free=free))
        assert census.at == "give"
        if not census.free:
            writers = tuple(writer._replace(changed=False) for writer in s.writers)
            return None, s._replace(census=OVER, writers=writers)
        given = s._replace(free=(*s.free, census.free[0]))
        return ("put", "free", census.free[0]), then(of=given, free=census.free[1:])

    def kills(self, s: State) -> Iterator[State]:
        if s.reader.dead or s.writers[0].dead or s.census is not None:
            return
        if self.killed == "writer" and s.writers[0].at != "done":
            yield s._replace(writers=(s.writers[0]._replace(dead=True), *s.writers[1:]))
        if self.killed == "reader":
            yield s._replace(reader=s.reader._replace(dead=True))


OVER = Census("over")


class FaultError(Exception):
    """The model has come to what must not be."""


def put(words: tuple, index: int, value: object) -> tuple:
    return (*words[:index], value, *words[index + 1 :])


def check_owners(model: Model, s: State) -> None:
    """Each slot is in one pipe, or has one owner, dead or alive."""
    held = [*s.free, *(token.slot for token in s.ready)]
    given = model.fill[model.fill.index("put") + 1 :]
    held += [w.slot for w in s.writers if w.slot != NOBODY and w.at not in given]
    given = model.read[model.read.index("put") + 1 :]
    held += [s.reader.token.slot] if s.reader.token and s.reader.at not in given else []
    held += [token.slot for token in s.reader.awaited]
    held += s.census.free if s.census else ()
    if s.census not in (None, OVER):
        if len(held) > len(set(held)):
            raise FaultError("two owners")
        return  # what the dead held is nobody's, until it is found
    if len(held) != model.slots or len(set(held)) != model.slots:
        raise FaultError("two owners" if len(held) > len(set(held)) else "a slot is lost")


@dataclass
class Outcome:
    """What `explore` has met: faults, states in which nobody could go on, other counts."""

    states: int = 0
    faults: set[str] = field(default_factory=set)
    ends: set[State] = field(default_factory=set)
    vain_looks: int = 0


def explore(model: Model, *, owners: bool = True) -> Outcome:
    """Follow every interleaving; `owners` says whether two owners end the search there."""
    outcome = Outcome()
    pending = [model.start()]
    seen = set(pending)
    while pending:
        state = pending.pop()
        following = []
        try:
            if owners:
                check_owners(model, state)
            steps = [model.write(state, i) for i in range(model.writers)]
            steps += [model.take(state), model.recover(state)]
            following = [step[1] for step in steps if step is not None]
            if not following:
                outcome.ends.add(state)
            following += model.kills(state)
        except FaultError as fault:
            outcome.faults.add(str(fault))
            continue
        if state.reader.at == "take" and not state.ready and not state.reader.dead:
            outcome.vain_looks += 1
        for after in following:
            if after not in seen:
                seen.add(after)
                pending.append(after)
    outcome.states = len(seen)
    return outcome


SIZES = [(1, 3, 1), (1, 3, 2), (1, 4, 3), (2, 2, 1), (2, 2, 2), (2, 2, 3)]
OVERFLOW = pytest.mark.parametrize("overflow", ["overwrite", "block"])
SIZE = pytest.mark.parametrize(("writers", "rollouts", "slots"), SIZES)
SMALLER = pytest.mark.parametrize(("writers", "rollouts", "slots"), SIZES[:-1])


def written(s: State) -> int:
    return sum(writer.committed for writer in s.writers)


def dropped(s: State) -> int:
    return sum(writer.dropped for writer in s.writers)


def uncounted(s: State) -> int:
    """Rollouts that the words say were written, and that are nowhere."""
    return written(s) - s.reader.read - dropped(s) - s.lost - len(s.ready)


def lost_slots(model: Model, s: State) -> int:
    """Slots in neither pipe, once nobody goes on."""
    return model.slots - len(s.free) - len(s.ready)


@OVERFLOW
@SIZE
def test_in_no_interleaving_has_a_slot_two_owners_or_a_rollout_two_fates(
    writers, rollouts, slots, overflow
):
    # Whatever was read was whole and in its writer's order, or the search had stopped there.
    model = Model(writers, rollouts, slots, overflow)
    outcome = explore(model)
    assert not outcome.faults
    assert outcome.states > 80
    for end in outcome.ends:
        assert all(writer.at == "done" for writer in end.writers), "a writer waits for ever"
        assert end.reader.at == "wait"
        assert end.ready == ()
        assert written(end) == writers * rollouts == end.reader.read + dropped(end)
        assert lost_slots(model, end) == 0
        assert overflow == "overwrite" or dropped(end) == 0
    assert len(outcome.ends) > 0
    if overflow == "overwrite":
        assert any(dropped(end) for end in outcome.ends)


@OVERFLOW
@SMALLER
def test_a_writer_killed_at_any_step_costs_no_more_than_its_slot(
    writers, rollouts, slots, overflow
):
    model = Model(writers, rollouts, slots, overflow, killed="writer")
    outcome = explore(model)
    assert not outcome.faults
    deaths = {end.writers[0].at for end in outcome.ends if end.writers[0].dead}
    assert deaths >= {"move first", "take free", "idle again", *FILL}
    for end in outcome.ends:
        dead = end.writers[0].at if end.writers[0].dead else "alive"
        owned = dead in {"count drop", *FILL[: FILL.index("idle")]}
        assert lost_slots(model, end) == owned
        # A ring of one slot is lost with it; otherwise the others come to their end.
        if slots > owned:
            assert end.reader.at == "wait"
            assert end.ready == ()
            assert all(writer.at == "done" for writer in end.writers[1:])
        assert uncounted(end) == (dead in {"count drop", "put"})


@OVERFLOW
@pytest.mark.parametrize(("writers", "rollouts", "slots"), [(1, 3, 2), (2, 2, 1)])
def test_who_takes_the_place_of_a_killed_writer_frees_the_slot_that_it_noted(
    writers, rollouts, slots, overflow
):
    model = Model(writers, rollouts, slots, overflow, killed="writer", recovers="taken over")
    outcome = explore(model)
    assert not outcome.faults
    lost = {end.writers[0].at for end in outcome.ends if lost_slots(model, end)}
    drops = {"count drop"} if overflow == "overwrite" else set()
    assert lost == {"note", "count", "put"} | drops


@OVERFLOW
@pytest.mark.parametrize(("writers", "rollouts", "slots"), [(1, 3, 2), (2, 1, 1), (2, 1, 2)])
@pytest.mark.parametrize("killed", ["writer", "reader"])
def test_a_census_frees_what_any_party_held_that_was_killed_at_any_step_and_loses_no_count(
    writers, rollouts, slots, overflow, killed
):
    model = Model(writers, rollouts, slots, overflow, killed=killed, recovers="census")
    outcome = explore(model)
    assert not outcome.faults
    assert any(end.lost for end in outcome.ends)
    assert any(end.census == OVER for end in outcome.ends)
    for end in outcome.ends:
        assert all(writer.at == "done" for writer in end.writers), "a writer waits for ever"
        assert end.reader.at == "wait"
        assert end.reader.awaited == end.ready == ()
        assert written(end) == writers * rollouts
        assert lost_slots(model, end) == uncounted(end) == 0
        assert end.lost <= 1
        assert overflow == "overwrite" or dropped(end) == 0


@OVERFLOW
@SMALLER
def test_a_reader_killed_at_any_step_costs_no_more_than_its_slot(
    writers, rollouts, slots, overflow
):
    model = Model(writers, rollouts, slots, overflow, killed="reader")
    outcome = explore(model)
    assert not outcome.faults
    deaths = {end.reader.at for end in outcome.ends if end.reader.dead}
    assert deaths == {"wait", *READ}
    waiting = 0
    for end in outcome.ends:
        owned = end.reader.token is not None
        assert lost_slots(model, end) == owned
        assert uncounted(end) == (owned and end.reader.at != "put")
        if overflow == "overwrite" and slots > owned:
            assert all(writer.at == "done" for writer in end.writers)
        waiting += any(writer.at == "wait" for writer in end.writers)
    # Who waits for a slot then is told so: see test_ring. None does where it may overwrite.
    assert (waiting > 0) == (overflow == "block" or slots == 1)


def test_what_a_reader_only_saw_may_be_overwritten_before_it_takes_it():
    # With any number of slots: a writer may pause between the two pipes. This is why
    # wait_for_data takes what it saw.
    assert explore(Model(1, 4, 3, "overwrite")).vain_looks > 0
    assert explore(Model(2, 2, 3, "block")).vain_looks == 0


HASTY = ("note", "odd", "fill 0", "even", "move", "count", "put", "fill 1", "idle")


def test_the_search_finds_the_mix_if_a_rollout_is_committed_before_it_is_complete():
    assert "mixed" in explore(Model(1, 3, 2, "block", fill=HASTY)).faults


def test_the_search_finds_the_second_owner_if_an_overwriter_leaves_the_token():
    assert explore(Model(1, 3, 2, "overwrite", peeks=True)).faults == {"two owners"}


def test_a_slot_that_is_filled_without_its_token_is_noticed_before_the_release():
    faults = explore(Model(1, 3, 2, "overwrite", peeks=True), owners=False).faults
    assert "noticed" in faults
    assert "mixed" not in faults


def test_the_search_finds_the_mix_if_besides_the_second_check_is_left_out():
    read = tuple(step for step in READ if step != "check again")
    model = Model(1, 3, 2, "overwrite", peeks=True, read=read)
    assert "mixed" in explore(model, owners=False).faults


def test_the_search_finds_the_second_owner_if_a_slot_is_released_twice():
    assert "two owners" in explore(Model(1, 3, 2, "block", read=(*READ, "put again"))).faults


def test_the_search_finds_the_mix_if_a_slot_is_released_before_it_is_read():
    read = ("take", "check", "put", "load 0", "load 1", "count")
    assert "mixed" in explore(Model(1, 3, 2, "block", read=read)).faults


def test_the_search_finds_the_rollout_that_is_dropped_without_a_count():
    outcome = explore(Model(1, 3, 2, "overwrite", miscounts=True))
    assert any(uncounted(end) for end in outcome.ends)


def test_the_search_finds_the_second_owner_if_a_writer_that_commits_notes_its_slot_too_long():
    hasty = tuple(step for step in FILL if step != "move")
    model = Model(2, 2, 2, "block", killed="writer", recovers="taken over", fill=hasty)
    assert "two owners" in explore(model).faults


@pytest.mark.parametrize("flaw", ["hides", "repeats", "trusts"])
def test_the_search_finds_the_second_owner_if_a_census_rests_on_less(flaw):
    model = Model(2, 1, 2, "overwrite", killed="writer", recovers="census", **{flaw: True})
    assert "two owners" in explore(model).faults


class _RecordedPipe:
    """A token pipe that notes each put and take."""

    def __init__(self, name: str, pipe, trace: list) -> None:
        self._name, self._pipe, self._trace = name, pipe, trace
        self.ends, self.close = pipe.ends, pipe.close

    def put(self, token: Token) -> None:
        what = token if self._name == "ready" else token.slot
        self._trace.append(("put", self._name, what))
        self._pipe.put(token)

    def take(self) -> Token | None:
        self._trace.append(("take", self._name))
        return self._pipe.take()


class _RecordedWords:
    """Shared words that note each load and store of those that `label` names."""

    def __init__(self, words, label, trace: list) -> None:
        self._words, self._label, self._trace = words, label, trace

    def __getitem__(self, index: int) -> int:
        self._trace.append(self._label("load", index, ()))
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._trace.append(self._label("store", index, (value,)))
        self._words[index] = value


def record(ring: RolloutRing, monkeypatch) -> list:
    """Note what `ring` does in the model's words; own words are only noted when stored."""
    trace: list = []

    def of_writer(access: str, index: int, value: tuple) -> Label | None:
        word = index % (3 + ring.writers)
        if access == "load" or word == ring_module._PID:
            return None
        if word >= 3:
            return ("store", "dropped", word - 3)
        if word == ring_module._NOTE:
            return ("store", "note", value[0] & 0xFFFF)
        return ("store", "committed", *value)

    def of_header(access: str, index: int, value: tuple) -> Label | None:
        return ("store", "read") if (access, index) == ("store", ring_module._READ) else None

    def of_slot(access: str, index: int, value: tuple) -> Label:
        return (access, "generation", index, *value)

    ring._free = _RecordedPipe("free", ring._free, trace)
    ring._ready = _RecordedPipe("ready", ring._ready, trace)
    ring._writer_words = _RecordedWords(ring._writer_words, of_writer, trace)
    ring._header = _RecordedWords(ring._header, of_header, trace)
    ring._generations = _RecordedWords(ring._generations, of_slot, trace)
    copy = torch._foreach_copy_
    slots = {tensors[0].data_ptr(): slot for slot, tensors in enumerate(ring._tensors)}

    def foreach_copy(targets, sources):
        for access, tensors in (("store", targets), ("load", sources)):
            if tensors[0].data_ptr() in slots:
                trace.append((access, "payload", slots[tensors[0].data_ptr()]))
        return copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", foreach_copy)
    return trace


def turn(model: Model, state: State, who: int | str) -> tuple[list, State]:
    """Labels of one whole turn of a writer or the reader, undisturbed; none if it must wait."""
    labels, after = [], state
    while True:
        step = model.take(after) if who == "reader" else model.write(after, who)
        if step is None:
            return [], state
        label, after = step
        labels += [label] if label else []
        at = after.reader.at if who == "reader" else after.writers[who].at
        if at == "wait" and (who != "reader" or len(labels) == 1):
            return [], state  # it has looked in vain
        if at in ("wait", "move first"):
            return labels, after


@OVERFLOW
@given(st.integers(1, 3), st.lists(st.sampled_from([0, 1, "reader"]), max_size=20))
def test_the_code_takes_the_models_steps(overflow, slots, turns):
    model = Model(2, 99, slots, overflow)
    state, out = model.start(), [torch.zeros(2)]
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        RolloutRing({"x": out[0]}, slots=slots, writers=2, overflow=overflow) as ring,
    ):
        trace = record(ring, monkeypatch)
        for who in turns:
            expected, state = turn(model, state, who)
            if not expected:  # it would wait
                continue
            if who != "reader":
                ring.use_writer(who)
            trace.clear()
            if who == "reader":
                lease = ring.acquire()
                torch._foreach_copy_(out, list(lease.views.values()))
                ring.release(lease)
            else:
                assert ring.write({"x": out[0]})
                # What a writer loads is its own while it loads it.
                trace[:] = [label for label in trace if label and label[0] != "load"]
            assert [label for label in trace if label] == expected


def steps_of_recovery(model: Model, state: State) -> list[Label]:
    labels = []
    while (step := model.recover(state)) is not None:
        label, state = step
        labels += [label] if label else []
    return labels


@pytest.mark.parametrize("recovers", ["taken over", "census"])
def test_recovery_takes_the_models_steps(recovers, monkeypatch):
    model = Model(2, 99, 3, "block", recovers=recovers)
    state = turn(model, model.start(), 1)[1]  # the other one has committed slot 0
    for _ in range(3):  # and the first one owns slot 1, and has said so
        state = model.write(state, 0)[1]
    state = state._replace(writers=(state.writers[0]._replace(dead=True), state.writers[1]))
    expected = steps_of_recovery(model, state)
    with RolloutRing({"x": torch.zeros(2)}, slots=3, writers=2) as ring:
        ring.use_writer(1)
        ring.write({"x": torch.ones(2)})
        ring.use_writer(0)
        ring.claim()
        ring._set_own(ring_module._PID, 2**22 + 1)  # beyond any process id of Linux
        trace = record(ring, monkeypatch)
        assert ring.recover(0) == 1 if recovers == "census" else ring.take_over(0)
        assert [label for label in trace if label and label[0] != "load"] == expected
