"""Shared memory is full: a run is refused as a whole, or is in need of none."""

from __future__ import annotations

import errno
import gc
import os
import re
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.fault_points import CONFIGS, ENV
from tests.support.faults import MOUNT
from tests.support.mounts import fill, mount_small, start_from_here
from tests.support.processes import DEADLINE, live_children, receive, spawned
from torchrl_unilab.errors import ConfigError, SegmentSpaceError
from torchrl_unilab.shm.segment import named_directory
from torchrl_unilab.trainers import (
    APPOConfig,
    OffPolicyConfig,
    PublishWeights,
    train_appo,
    train_off_policy,
)

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
    gc.collect()  # what a whole run published its policy through goes with its trainer
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


# A mount of 64 megabytes, as containers have it, and the settings that people get


def train_on_a_small_mount(pipe: Any, run_dir: Path, algorithm: str, kind: str | None) -> None:
    """Train for a moment, with all else as it is by default; fill the mount in mid-run."""
    try:
        mounted = mount_small(MOUNT, "64m")
        pipe.send(mounted)
        if not mounted:
            return
        os.environ["TORCHRL_UNILAB_SHM_DIR"] = str(MOUNT)
        os.environ.pop("TORCHRL_UNILAB_SEGMENT", None)
        if kind is not None:
            os.environ["TORCHRL_UNILAB_SEGMENT"] = kind
        start_from_here()
        pipe.send(_outcome_on_a_small_mount(run_dir, algorithm))
    except BaseException:
        pipe.send(traceback.format_exc())


def _outcome_on_a_small_mount(run_dir: Path, algorithm: str) -> dict[str, Any]:
    publish = PublishWeights.__call__
    filled: list[bool] = []

    def publish_and_fill(self: PublishWeights) -> None:
        publish(self)
        if not filled:
            fill(MOUNT)
            filled.append(True)

    PublishWeights.__call__ = publish_and_fill  # type: ignore[method-assign]
    config: Any = APPOConfig() if algorithm == "appo" else OffPolicyConfig("sac")
    refusal = ""
    try:
        summary = _train_by_default(run_dir, config)
    except ConfigError as error:
        assert not run_dir.exists()
        assert os.listdir(MOUNT) == []
        refusal = str(error)
        factor, setting = re.findall(r"([\d.]+) times what the others leave: lower (\w+)", refusal)[
            0
        ]
        count = int(getattr(config, setting) / (float(factor) + 0.01))  # which is rounded
        summary = _train_by_default(run_dir, replace(config, **{setting: count}))
    gc.collect()  # the trainer's policy is published through memory that goes with it
    return {
        "refusal": refusal,
        "frames": summary["frames"],
        "filled": bool(filled),
        "left": sorted(os.listdir(MOUNT)),
        "children": [child.pid for child in live_children()],
    }


def _train_by_default(run_dir: Path, config: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"frames": 4400, "progress_bar": False, "eval_episodes": 1}
    train: Any = train_appo if isinstance(config, APPOConfig) else train_off_policy
    summary: dict[str, Any] = train("HalfCheetah-v5", run_dir=run_dir, config=config, **options)
    return summary


@pytest.mark.parametrize(
    ("algorithm", "kind", "too_much"),
    [
        pytest.param("appo", None, None, id="appo"),
        pytest.param("appo", "named", None, id="appo-named", marks=LONG),
        pytest.param("sac", None, None, id="sac", marks=LONG),
        pytest.param("sac", "named", "packed replay", id="sac-named", marks=LONG),
    ],
)
def test_on_a_mount_of_64_megabytes_a_default_run_runs_or_says_with_which_setting_it_does(
    algorithm, kind, too_much, tmp_path
):
    """And once it runs, it needs no more of the mount, which is full from then on."""
    with spawned(train_on_a_small_mount, tmp_path / "run", algorithm, kind) as (_, pipe):
        if not receive(pipe):
            pytest.skip("this process may not mount a file system: see the tests above")
        outcome = receive(pipe, 3 * DEADLINE)
    assert isinstance(outcome, dict), outcome
    if too_much is None:
        assert outcome["refusal"] == ""
    else:
        limit = "do not fit shared-memory mount /dev/shm (expected at most 64.0 MiB"
        assert limit in outcome["refusal"]
        assert re.search(rf"\n  shared +{too_much} +[\d.]+ MiB\n", outcome["refusal"])
    assert outcome["frames"] >= 4400
    assert outcome["filled"]
    assert outcome["left"] == ["filler"]
    assert outcome["children"] == []
