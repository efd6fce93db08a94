"""The disk fills while a checkpoint is written: the run says so at once, and loses nothing old.

On a file system of four megabytes, mounted for the run alone; where a process may not mount one,
that case is skipped. In the other one files cannot grow (``RLIMIT_FSIZE``), which any process can
have: writing fails there as really, with another error.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.bounds import PROMPT
from tests.support.fault_points import CONFIGS, ENV
from tests.support.faults import FRAMES, INTERVAL
from tests.support.mounts import fill, mount_small, start_from_here
from tests.support.processes import DEADLINE, live_children, receive, spawned
from torchrl_unilab.trainers import resume_run, train_appo, train_off_policy
from torchrl_unilab.trainers.runs.best_policy import BestPolicy
from torchrl_unilab.trainers.runs.checkpoint import RunCheckpoints, run_checkpoint

LONG = (pytest.mark.faults, pytest.mark.slow)
LEFT = 8192  # bytes that are free when the second checkpoint is begun, some of what it needs


def train_until_full(pipe: Any, disk: Path, algorithm: str, way: str) -> None:
    """Train on a disk that fills; tell what became of it; make room and go on from there."""
    try:
        mounted = way == "mount" and mount_small(disk, "4m")
        pipe.send(mounted)
        if way == "mount" and not mounted:
            return
        start_from_here()
        pipe.send(_outcome(disk, algorithm, mounted))
        (disk / "filler").unlink(missing_ok=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        summary = resume_run(disk / "run", progress_bar=False, eval_episodes=1)
        pipe.send((summary["frames"], summary["resumed"]))
    except BaseException:
        pipe.send(traceback.format_exc())


def _outcome(disk: Path, algorithm: str, mounted: bool) -> dict[str, Any]:
    began: list[float] = []
    save = RunCheckpoints.save

    def save_on_a_full_disk(checkpoints: RunCheckpoints, *args: Any, **kwargs: Any) -> Path:
        if checkpoints.paths() and not began:
            began.append(time.monotonic())
            if mounted:
                fill(disk, but=LEFT)
            else:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
        return save(checkpoints, *args, **kwargs)

    RunCheckpoints.save = save_on_a_full_disk  # type: ignore[method-assign]
    train: Any = train_appo if algorithm == "appo" else train_off_policy
    error: Exception | None = None
    try:
        train(
            ENV,
            frames=FRAMES,
            run_dir=disk / "run",
            config=CONFIGS[algorithm],
            checkpoint_interval=INTERVAL,
            progress_bar=False,
            eval_episodes=1,
        )
    except Exception as raised:
        error = raised
    RunCheckpoints.save = save  # type: ignore[method-assign]
    return {
        "kind": [kind.__name__ for kind in type(error).__mro__],
        "message": str(error),
        "seconds": time.monotonic() - began[0] if began else None,
        "names": sorted(os.listdir(disk / "run" / "checkpoint")),
        "frames": RunCheckpoints(disk / "run" / "checkpoint").newest().frames,
        "children": [" ".join(child.cmdline()) for child in live_children()],
        "disk": str(disk),
    }


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("appo", "mount"), id="appo-mount"),
        pytest.param(("sac", "mount"), id="sac-mount", marks=LONG),
        pytest.param(("appo", "limit"), id="appo-limit", marks=LONG),
    ],
)
def outcome(request, tmp_path_factory) -> Any:
    """What became of a run, and of the one that went on from its checkpoint."""
    algorithm, way = request.param
    disk = tmp_path_factory.mktemp("disk")
    with spawned(train_until_full, disk, algorithm, way) as (_, pipe):
        mounted = receive(pipe)
        if way == "mount" and not mounted:
            pytest.skip("this process may not mount a file system")
        found = receive(pipe, 2 * DEADLINE)
        assert isinstance(found, dict), found
        found["resumed"] = receive(pipe, 2 * DEADLINE)
        return found


def test_a_run_whose_disk_is_full_fails_at_once_and_leaves_no_process(outcome):
    assert outcome["seconds"] < PROMPT
    assert outcome["children"] == []


def test_the_error_names_the_directory_and_the_space_there_is(outcome):
    assert "OSError" in outcome["kind"]
    expected = rf"cannot save a checkpoint in {re.escape(outcome['disk'])}/run/checkpoint: .+ "
    assert re.match(expected + r"\(expected .*\d+ bytes are free\)\. [A-Z]", outcome["message"])


def test_the_checkpoint_before_stays_whole_and_nothing_half_written_beside_it(outcome):
    assert outcome["names"] == [f"frames-{INTERVAL:012d}"]
    assert outcome["frames"] == INTERVAL


def test_with_room_again_the_run_continues_from_there(outcome):
    assert outcome["resumed"] == (FRAMES, [INTERVAL])


def save_what_does_not_fit(pipe: Any, disk: Path, what: str) -> None:
    """Save one large tensor where the files before it fit; tell the error."""
    mounted = mount_small(disk, "4m")
    pipe.send(mounted)
    if mounted:
        fill(disk, but=1 << 18)
        large = torch.nn.Linear(1 << 18, 1)
        checkpoints = RunCheckpoints(disk / "saved")
        try:
            if what == "checkpoint":
                checkpoints.save(run_checkpoint(net=large), step=1)
            else:
                metadata = checkpoints.metadata({}, total_frames=1)
                BestPolicy(checkpoints.directory, metadata).keep(large, 1, 0.0)
        except Exception as error:
            pipe.send((type(error).__name__, str(error)))


@pytest.mark.parametrize("what", ["checkpoint", "best policy"])
def test_a_tensor_that_does_not_fit_is_an_error_and_no_signal(tmp_path, what):
    with spawned(save_what_does_not_fit, tmp_path, what) as (_, pipe):
        if not receive(pipe):
            pytest.skip("this process may not mount a file system")
        kind, message = receive(pipe)
    assert kind == "OSError"
    assert re.match(r"cannot save a checkpoint in .*: No space left on device \(expected", message)
