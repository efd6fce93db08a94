"""A small model of the ring's protocol, and the search through every interleaving of it.

The model has writers that each commit a few rollouts into home slots, one reader, and each
writer's two pipes as first-in first-out queues whose puts and takes happen at once. All else is
one step per load or store; a payload is two words, so that it can be mixed. `explore` follows
every order of the steps, and may kill the first writer before any of its steps; the reader then
recovers it, and another process takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
