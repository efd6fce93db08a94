"""Each message that the page on troubleshooting lists, raised."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import PrioritizedSampler, SliceSampler, TensorDictReplayBuffer

from tests.support.acting import make_policy
from tests.support.collecting import GatedEnv, appo_collector
from tests.support.processes import DEADLINE
from torchrl_unilab.collectors.arguments import find_device
from torchrl_unilab.configs.algorithms import split_settings
from torchrl_unilab.data import PackedReplayStorage, PackedReplayWriter, RolloutRingStorage
from torchrl_unilab.envs import MujocoBatchEnv, make_task, rendering
from torchrl_unilab.objectives.compiler import compiled
from torchrl_unilab.runtime import WorkerGroup
from torchrl_unilab.runtime.link import Link
from torchrl_unilab.trainers import train_appo
from torchrl_unilab.trainers.runs.loggers import check_loggers
from torchrl_unilab.weight_update import UniLabShmScheme

PAGE = Path(__file__).parents[1] / "tutorials" / "how-to" / "troubleshooting.md"
MESSAGES = re.findall(r"^### `(.*)`$", PAGE.read_text(), re.MULTILINE)


def _make_env() -> MujocoBatchEnv:
    return MujocoBatchEnv("InvertedPendulum-v5", num_envs=2, num_threads=1)


def _scheme() -> UniLabShmScheme:
    scheme = UniLabShmScheme()
    scheme.init_on_sender(model=torch.nn.Linear(2, 2), devices=[torch.device("cpu")])
    scheme.connect()
    return scheme


def _publish_without_a_model() -> None:
    scheme = UniLabShmScheme()
    weights = TensorDict(weight=torch.zeros(2))
    scheme.init_on_sender(weights=weights, devices=[torch.device("cpu")])
    scheme.connect()
    scheme.send()


def _publish_another_shape() -> None:
    _scheme().send(weights=torch.nn.Linear(3, 2))


def _publish_after_the_end() -> None:
    scheme = _scheme()
    scheme.shutdown()
    scheme.wait_applied()


def _wait_for_a_worker() -> None:
    scheme = _scheme()
    scheme.send()
    scheme.wait_applied(timeout=0.0)


def _sleep_on(link: Link) -> None:
    link.ready()
    link.request(block=True)


def _leave_at_once(link: Link) -> None:
    os._exit(3)


def _end_before_it_is_ready() -> None:
    WorkerGroup(_leave_at_once, [()], name="collector")


def _lose_a_worker() -> None:
    with WorkerGroup(_sleep_on, [()], name="collector") as group:
        os.kill(group.pids[0], signal.SIGKILL)
        group.ask(0, "nothing", timeout=DEADLINE)


def _wait_for_a_rollout() -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.mkfifo(gate := Path(directory, "gate"))  # which nobody opens: no rollout ends
        with appo_collector(make_policy(), partial(GatedEnv, gate, 2), timeout=0.0) as collector:
            next(iter(collector))


def _save_a_batch() -> None:
    row = TensorDict(x=torch.zeros(2), ended=torch.zeros(1, dtype=torch.bool))
    with PackedReplayStorage(8, example=row) as storage, tempfile.TemporaryFile() as file:
        storage.append(row.expand(4))
        batch = storage.sample(2)
        torch.save(batch.clone(), file)
        torch.save(batch, file)


def _sample_slices() -> None:
    rows = TensorDict(x=torch.zeros(2), batch_size=[2])
    with PackedReplayStorage(8, example=rows[0], writers=2) as storage:
        buffer = TensorDictReplayBuffer(
            storage=storage,
            sampler=SliceSampler(slice_len=1, traj_key="x"),
            writer=PackedReplayWriter(),
            batch_size=1,
        )
        buffer.extend(rows)
        buffer.sample()


def _fill_the_ring() -> None:
    rollout = TensorDict(x=torch.zeros(1, 1), batch_size=[1, 1])
    with RolloutRingStorage(1, example=rollout, overflow="block", timeout=0.0) as storage:
        storage.set(range(2), torch.stack([rollout, rollout]))


def _step_by_nan() -> None:
    env = _make_env()
    try:
        env.step(env.reset().set("action", torch.full((2, 1), torch.nan)))
    finally:
        env.close()


def _train_into_a_full_directory() -> None:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "file").touch()
        train_appo("InvertedPendulum-v5", frames=10_000, run_dir=directory)


def _allocate() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchrl_unilab.data.replay.shared.free_bytes", lambda: 100)
        PackedReplayStorage(1000, example=TensorDict(x=torch.zeros(1)))


def _find_a_backend() -> None:
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="nothing here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", lambda *_, **__: failed)
        rendering.find_backend.__wrapped__("")


def _import_with_a_backend_that_is_none() -> None:
    command = [sys.executable, "-m", "torchrl_unilab", "tasks"]
    environment = os.environ | {"MUJOCO_GL": "none_of_them"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    raise RuntimeError(done.stderr)


def _prioritise_without_the_extension() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchrl.data.replay_buffers.samplers.prioritized.SumSegmentTreeFp32", None)
        PrioritizedSampler(8, 0.7, 0.5)


def _compile_without_a_compiler() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", "no-such-compiler")
        compiled(torch.sin)


CAUSES: dict[str, Callable[[], object]] = {
    "Cannot save": _save_a_batch,
    "make_task": lambda: make_task("HalfCheeta-v5"),
    "epoch": lambda: split_settings({"algo": "appo", "epoch": 1}, "appo"),
    "device": lambda: find_device("device", "cuda:99"),
    "logger": lambda: check_loggers(["no_such_logger"]),
    "compile": _compile_without_a_compiler,
    "run directory": _train_into_a_full_directory,
    "cannot create": _allocate,
    "rendering": _find_a_backend,
    "mujoco cannot": _import_with_a_backend_that_is_none,
    "SumSegmentTreeFp32": _prioritise_without_the_extension,
    "cannot publish": _publish_without_a_model,
    "shape of": _publish_another_shape,
    "workers behind": _wait_for_a_worker,
    "cannot use": _publish_after_the_end,
    "... was ended": _lose_a_worker,
    "... before it was ready": _end_before_it_is_ready,
    "no rollout": _wait_for_a_rollout,
    "slices of": _sample_slices,
    "cannot write": _fill_the_ring,
    "MujocoBatchEnv.step": _step_by_nan,
}
"""Beginning of a message, and what raises it."""


@pytest.mark.parametrize("message", MESSAGES)
def test_what_the_page_lists_is_raised(message):
    (cause,) = [CAUSES[start] for start in CAUSES if message.startswith(start)]
    pattern = ".*".join(map(re.escape, message.removeprefix("... ").split(" ... ")))
    with pytest.raises(Exception, match=f"(?s){pattern}"):
        cause()


def test_each_cause_is_on_the_page():
    assert [start for start in CAUSES if not any(m.startswith(start) for m in MESSAGES)] == []
