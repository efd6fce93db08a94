from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tests.support.collecting import CountingEnv, HitEnv, env_for_parents_only
from tests.support.processes import live_children
from tests.support.traces import Event, assert_nested, load_events, names, spans
from torchrl_unilab.cli import main
from torchrl_unilab.data import DoubleBufferReplayPipeline, PackedReplayStorage
from torchrl_unilab.errors import WorkerError
from torchrl_unilab.runtime import trace
from torchrl_unilab.trainers import APPOConfig, train_appo

APPO = ["--num-envs", "8", "--num-steps", "16", "--epochs", "1", "--minibatches", "1"]
SAC = ["--num-envs", "8", "--batch-size", "16", "--learning-starts", "4", "--replay-buffer-n", "99"]
SAC += ["--updates-per-step", "1", "--env-steps-per-sync", "4", "--learner-threads", "1"]
QUICK = APPOConfig(num_envs=2, num_steps=4, epochs=1, minibatches=1, hidden=(8,))
WORKERS = {"collector 0", "collector 1"}


def _train(run_dir: Path, algorithm: str, *settings: str) -> list[Event]:
    """Train with two collectors, in a process that has imported everything."""
    command = ["train", algorithm, "--env", "InvertedPendulum-v5", "--frames", "1024", "--trace"]
    command += ["--num-collectors", "2", "--eval-episodes", "1", "--no-progress", *settings]
    assert main([*command, "--run-dir", str(run_dir)]) == 0
    events = load_events(run_dir / "trace.json")
    assert_nested(events)
    return events


def _by_process(events: list[Event], phase: str) -> Mapping[str, set[str]]:
    named = names(events)
    found: dict[str, set[str]] = {name: set() for (_, tid), name in named.items() if tid == 0}
    for event in events:
        if event["ph"] == phase:
            found[named[event["pid"], 0]].add(event["name"])
    return found


def _values(events: list[Event], name: str) -> list[float]:
    return [event["args"]["value"] for event in events if event["name"] == name]


def test_an_appo_run_shows_what_learner_and_collectors_do(tmp_path, capsys):
    events = _train(tmp_path, "appo", *APPO)
    found = _by_process(events, "X")
    assert set(found) == {"learner", *WORKERS}
    assert found["learner"] >= {"publish", "sample", "wait", "update", "checkpoint"}
    for worker in WORKERS:
        assert found[worker] >= {"pull", "claim", "rollout", "commit"}
    counters = _by_process(events, "C")
    assert counters["learner"] == {"policy_lag", "ring_occupancy", "dropped", "stale", "restarts"}
    rollouts = 1024 // (8 * 16)
    updates = [event for event in spans(events) if event["name"] == "update"]
    assert len(updates) == len(_values(events, "policy_lag")) == rollouts
    assert all(0.0 <= value <= 1.0 for value in _values(events, "ring_occupancy"))
    assert "trace.json" in capsys.readouterr().out
    assert trace.settings() is None


def test_a_sac_run_shows_what_learner_and_collectors_do(tmp_path):
    events = _train(tmp_path, "sac", *SAC)
    found = _by_process(events, "X")
    assert set(found) == {"learner", *WORKERS}
    of_pipeline = {"replay pack", "replay submit", "replay wait"}
    assert found["learner"] == {"publish", "sample", "wait", "update", "checkpoint", *of_pipeline}
    for worker in WORKERS:
        assert found[worker] == {"pull", "wait", "rollout", "commit"}
    assert _by_process(events, "C")["learner"] == {"policy_lag", "replay_size", "restarts"}
    sizes = _values(events, "replay_size")
    assert sizes == sorted(sizes)
    tick = 2 * 8 * 4  # workers may take the next one while the learner takes its last updates
    assert 1024 <= sizes[-1] <= 1024 + tick


def test_the_pipelines_thread_has_a_track_of_its_own(tmp_path):
    storage = PackedReplayStorage(64, example=TensorDict(reward=torch.zeros(1)))
    storage.append(TensorDict(reward=torch.ones(64, 1), batch_size=[64]))
    trace.start(tmp_path / "trace.json")
    try:
        with storage, DoubleBufferReplayPipeline(storage, sample_count=8) as pipeline:
            for tick in range(3):
                pipeline.sample_large_batch(tick, 8)
                pipeline.after_tick()
    finally:
        trace.stop()
    events = load_events(tmp_path / "trace.json")
    assert_nested(events)
    named = names(events)
    threads = {(named[e["pid"], e["tid"]].split("_")[0], e["name"]) for e in spans(events)}
    assert threads == {
        ("main", "sample"),
        ("main", "replay wait"),
        ("replay-packer", "replay pack"),
        ("replay-packer", "replay submit"),
    }


def _run(path: Path, env: Callable[[], CountingEnv] = CountingEnv) -> None:
    train_appo(
        "Counting",
        create_env=env,
        config=QUICK,
        frames=10_000,
        run_dir=path,
        progress_bar=False,
        trace=True,
    )


def test_a_run_whose_collector_is_killed_leaves_a_trace_with_what_that_did(tmp_path):
    with pytest.raises(WorkerError, match="SIGKILL"):
        _run(tmp_path / "run", partial(HitEnv, tmp_path / "mark", 30, "SIGKILL"))
    events = load_events(tmp_path / "run" / "trace.json")
    assert_nested(events)
    named = names(events)
    rollouts = [e for e in spans(events) if e["name"] == "rollout"]
    assert len(rollouts) == 29 // 4  # all but the one it died in
    assert {named[event["pid"], 0] for event in rollouts} == {"collector 0"}
    assert "update" in _by_process(events, "X")["learner"]
    assert not live_children()


def test_a_run_whose_workers_do_not_start_leaves_no_trace(tmp_path):
    for run_dir in (tmp_path, tmp_path / "new"):
        with pytest.raises(WorkerError, match="no such robot"):
            _run(run_dir, env_for_parents_only)
    assert list(tmp_path.iterdir()) == []
    assert trace.settings() is None


def test_a_run_without_trace_leaves_none(appo_run):
    assert not (appo_run.run_dir / "trace.json").exists()
