"""Shared memory is full: a run is refused as a whole, or is in need of none."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import CONFIGS, ENV
from tests.support.processes import live_children
from torchrl_unilab.errors import SegmentSpaceError
from torchrl_unilab.shm.segment import named_directory
from torchrl_unilab.trainers import PublishWeights, train_appo, train_off_policy

ALLOCATE = os.posix_fallocate
LONG = (pytest.mark.faults, pytest.mark.slow)
EACH = pytest.mark.parametrize("algorithm", ["appo", pytest.param("sac", marks=LONG)])
KINDS = pytest.mark.parametrize("kind", ["named", pytest.param("anonymous", marks=LONG)])


class _Mount:
    """Shared memory that is full after so many segments."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.refused = 0

    def allocate(self, descriptor: int, offset: int, nbytes: int) -> None:
        if self.room <= 0:
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= 1
        ALLOCATE(descriptor, offset, nbytes)


def _train(run_dir: Path, algorithm: str) -> dict[str, Any]:
    train = train_appo if algorithm == "appo" else train_off_policy
    config: Any = CONFIGS[algorithm]
    settings: Any = {"frames": 96, "progress_bar": False, "eval_episodes": 1}
    return train(ENV, run_dir=run_dir, config=config, **settings)


@EACH
@KINDS
def test_whichever_segment_does_not_fit_the_run_is_refused_and_nothing_is_left(
    algorithm, kind, monkeypatch, tmp_path
):
    monkeypatch.setenv("TORCHRL_UNILAB_SEGMENT", kind)
    before = set(os.listdir(named_directory()))
    for room in range(100):
        mount = _Mount(room)
        monkeypatch.setattr(os, "posix_fallocate", mount.allocate)
        try:
            _train(tmp_path / "run", algorithm)
            break
        except SegmentSpaceError as error:
            message = str(error)
        assert "do not fit" in message
        assert mount.refused == 1
        assert not (tmp_path / "run").exists()
        assert not live_children()
        assert set(os.listdir(named_directory())) == before
    assert room > 2  # the policy's, the metrics', and the ring or the replay
    assert mount.refused == 0


@EACH
def test_a_run_that_has_begun_does_not_need_any_more_of_it(algorithm, monkeypatch, tmp_path):
    mount = _Mount(0)

    def fill(self: PublishWeights) -> None:
        monkeypatch.setattr(os, "posix_fallocate", mount.allocate)
        publish(self)

    publish = PublishWeights.__call__
    monkeypatch.setattr(PublishWeights, "__call__", fill)
    assert _train(tmp_path / "run", algorithm)["frames"] >= 96
    assert mount.refused == 0
    assert os.posix_fallocate == mount.allocate
    assert not live_children()
