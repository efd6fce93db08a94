"""However a collector is closed, and however its interpreter ends: once, in order, in silence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.support.fault_points import CONFIGS, ENV
from tests.support.processes import DEADLINE, live_children
from torchrl_unilab.collectors.base import WorkerCollector
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.trainers.runs.builders import build_learner, replay_collector, ring_collector
from torchrl_unilab.weight_update import UniLabShmScheme

LONG = (pytest.mark.faults, pytest.mark.slow)
ALGORITHMS = ["appo", pytest.param("sac", marks=LONG)]


def make(algorithm: str) -> WorkerCollector:
    """A collector at work, as a whole run has it."""
    create_env = partial(MujocoBatchEnv, ENV, num_envs=4, num_threads=1)
    config = CONFIGS[algorithm]
    proxy = create_env()
    learner = build_learner(proxy, config)
    proxy.close()
    collect = ring_collector if algorithm == "appo" else replay_collector
    return collect(create_env, learner.actor, UniLabShmScheme(), config, 0)  # type: ignore[operator]


@pytest.fixture
def collector(request: pytest.FixtureRequest) -> Iterator[WorkerCollector]:
    made = make(request.param)
    next(iter(made))
    yield made
    made.shutdown()
    assert not live_children()


@pytest.mark.parametrize("collector", ALGORITHMS, indirect=True)
def test_a_collector_is_shut_down_as_often_as_one_likes(collector):
    pids = collector.pids
    for _ in range(3):
        collector.shutdown()
        assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("collector", ALGORITHMS, indirect=True)
def test_threads_shut_a_collector_down_at_the_same_time(collector):
    failed: list[BaseException] = []
    gate = threading.Barrier(8)

    def shut_down() -> None:
        gate.wait(DEADLINE)
        try:
            collector.shutdown()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=shut_down) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert failed == []


@pytest.mark.parametrize("collector", ALGORITHMS, indirect=True)
def test_a_forked_child_that_shuts_down_leaves_its_parents_collector_at_work(collector):
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(int(DEADLINE))
            collector.shutdown()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    batches = iter(collector)
    for _ in range(3):
        next(batches)


_OPEN = """
from tests.faults.test_closing import make

if __name__ == "__main__":
    collectors = [make("appo"), make("sac")]
    batches = [iter(collector) for collector in collectors]
    for _ in range(3):
        for each in batches:
            next(each)
    print(*(pid for collector in collectors for pid in collector.pids), flush=True)
"""

_UNGUARDED = """
from tests.support.fault_points import CONFIGS, ENV
from torchrl_unilab.trainers import train_appo

train_appo(ENV, frames=64, run_dir="run", config=CONFIGS["appo"], progress_bar=False)
"""


def _run(tmp_path: Path, script: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "script.py").write_text(script)
    return subprocess.run(
        [sys.executable, "script.py"],
        capture_output=True,
        text=True,
        timeout=3 * DEADLINE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        cwd=tmp_path,
        check=False,
    )


@pytest.mark.faults
@pytest.mark.slow
def test_an_interpreter_that_ends_with_everything_open_says_nothing(tmp_path):
    done = _run(tmp_path, _OPEN)
    assert (done.returncode, done.stderr) == (0, "")
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.faults
@pytest.mark.slow
def test_a_script_without_a_main_guard_ends_and_shows_what_to_write(tmp_path):
    done = _run(tmp_path, _UNGUARDED)
    assert done.returncode == 1
    assert "if __name__ == '__main__':" in done.stderr
    last = done.stderr.rpartition("Traceback (most recent call last)")[2]
    assert "__main__" in last.partition("Error: ")[2]  # also in the error itself
    assert not (tmp_path / "run").exists()
