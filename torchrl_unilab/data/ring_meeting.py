"""Where processes find a ring that one of them is yet to build."""

from __future__ import annotations

import json
import os
import weakref
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from torchrl_unilab.data.rollout_form import RolloutForm
from torchrl_unilab.shm.ring import Overflow, RolloutRing
from torchrl_unilab.shm.segment import named_directory
from torchrl_unilab.shm.tokens import Token, TokenPipe, pipe_paths

__all__ = ["RingMeetingPoint"]


class RingMeetingPoint:
    """Where processes find a ring that none of them has built yet.

    Whoever makes it holds the two pipes of the ring to be, so that nothing in them is lost
    when the process that built the ring goes. The segment's name appears last and at once
    (a link), so a ring that can be found is complete.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._pipes = [TokenPipe.open(path, create=True) for path in pipe_paths(name)]
        paths = [self._path(), self._path(".layout"), self._path(".build")]
        paths += [*pipe_paths(name), *pipe_paths(f"{name}.build")]
        self.close = weakref.finalize(self, _leave, self._pipes, paths, os.getpid())
        Finalize(self, self.close, exitpriority=0)  # as `torchrl_unilab.shm.place` has it

    def _path(self, suffix: str = "") -> Path:
        return named_directory() / (self.name + suffix)

    @property
    def ready(self) -> TokenPipe:
        """Tokens of committed slots of the ring to be; a reader may wait for them already."""
        return self._pipes[1]

    def find(self) -> tuple[RolloutRing, RolloutForm] | None:
        """Attach the ring, if it has been built."""
        if not self._path().exists():
            return None
        form = RolloutForm.from_json(json.loads(self._path(".layout").read_text()))
        return RolloutRing.attach(self.name, form.meta()), form

    def build(
        self, form: RolloutForm, slots: int, writers: int, overflow: Overflow
    ) -> tuple[RolloutRing, RolloutForm]:
        """Build the ring for all. One process at a time."""
        draft = f"{self.name}.build"
        with RolloutRing(form.meta(), slots=slots, writers=writers, overflow=overflow, name=draft):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            with os.fdopen(os.open(self._path(".layout"), flags, 0o600), "w") as file:
                json.dump(form.to_json(), file)
            for slot in range(slots):
                self._pipes[0].put(Token(slot, 0, 0, 0))
            os.link(self._path(".build"), self._path())
            return RolloutRing.attach(self.name, form.meta()), form

    def __reduce__(self) -> tuple[Any, ...]:
        return _join, (self.name,)


def _join(name: str) -> RingMeetingPoint:
    point = RingMeetingPoint.__new__(RingMeetingPoint)
    point.name = name
    point._pipes = [TokenPipe.open(path) for path in pipe_paths(name)]
    point.close = weakref.finalize(point, _leave, point._pipes, [], os.getpid())
    return point


def _leave(pipes: list[TokenPipe], paths: list[Path], creator: int) -> None:
    for pipe in pipes:
        pipe.close()
    if os.getpid() == creator:
        for path in paths:
            path.unlink(missing_ok=True)
