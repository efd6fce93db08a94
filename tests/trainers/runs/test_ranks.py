"""Whole runs of two ranks: what each learns, writes and says."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from tests.support.collecting import CountingEnv, HitEnv
from tests.support.quick import APPO, OFF_POLICY
from tests.support.worlds import world
from torchrl_unilab.collectors import APPOCollector
from torchrl_unilab.collectors.replay import transition_keys
from torchrl_unilab.configs import RunConfig
from torchrl_unilab.data import PackedReplayStorage
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.errors import ConfigError, DivergedError, PeerGoneError, WorkerError
from torchrl_unilab.runtime import Ranks
from torchrl_unilab.trainers import APPOConfig, OffPolicyConfig, OffPolicyTrainer, resume_run
from torchrl_unilab.trainers.runs.builders import build_learner
from torchrl_unilab.trainers.runs.checkpoint import RunCheckpoints
from torchrl_unilab.trainers.runs.train import Run

CONFIGS: dict[str, Any] = {
    "appo": APPOConfig(**APPO),
    "sac": OffPolicyConfig("sac", **OFF_POLICY),
    "td3": OffPolicyConfig("td3", **OFF_POLICY),
}
FRAMES = 256
each_algorithm = pytest.mark.parametrize("algorithm", CONFIGS)


class SpoiltEnv(CountingEnv):
    """Its rewards are no numbers."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return super()._step(tensordict).set("reward", torch.full((*self.batch_size, 1), torch.nan))


class HugeEnv(CountingEnv):
    """The critic's loss of its rewards is infinite, and its clipped gradients are not."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return super()._step(tensordict).set("reward", torch.full((*self.batch_size, 1), 1e25))


def _run(algorithm: str, run_dir: Path, create_env: Any = None, **options: Any) -> dict[str, Any]:
    """Train; return what came of it, and how it differs between ranks."""
    options = {"frames": FRAMES, "progress_bar": False, "eval_episodes": 1, **options}
    config = options.pop("config", CONFIGS[algorithm])
    plan = RunConfig("InvertedPendulum-v5", **options)
    run = Run(plan, config, run_dir, create_env=create_env)
    summary = run()
    learner, trainer = run.learner, run.trainer
    return {
        "frames": summary["frames"],
        "own frames": trainer.collector._frames,
        "updates": summary["optim_steps"],
        "learnt": _bytes(learner.loss.state_dict()),
        "counted": [_bytes(one.state_dict()) for one in learner.normalizers.values()],
        "acting seed": run._acting_seed,
        "evaluated": summary["eval_return"] is not None,
    }


def _from_rollouts() -> dict[str, int]:
    """Learn off policy from rollouts; return the frames counted, and this rank's own."""
    config = CONFIGS["sac"]
    create_env = partial(MujocoBatchEnv, "InvertedPendulum-v5", 4, num_threads=1)
    env = create_env()
    learner = build_learner(env, config)
    row = env.fake_tensordict()[0].select(*transition_keys(env))
    env.close()
    steps = {"frames_per_batch": 64, "inline": True, "seed": 0}
    with Ranks.of_torchrun() as ranks, PackedReplayStorage(1024, example=row) as storage:
        collector = APPOCollector(create_env, learner.actor, **steps)
        trainer = OffPolicyTrainer(
            collector=collector,
            loss_module=learner.loss,
            total_frames=512,
            config=config,
            storage=storage,
            ranks=ranks,
            progress_bar=False,
        )
        trainer.train()
        trainer.close()
        return {"frames": trainer.collected_frames, "own frames": collector._frames}


def _bytes(state: dict[str, Any]) -> dict[str, bytes]:
    return {k: t.numpy().tobytes() for k, t in state.items() if isinstance(t, torch.Tensor)}


def take_part(_: Any, directory: Path) -> dict[str, Any]:
    """Take part in one run after the other, each in a directory of this rank's own."""
    rank = int(os.environ["RANK"])
    results: dict[str, Any] = {}

    def attempt(name: str, run: Any, *arguments: Any, **options: Any) -> None:
        try:
            results[name] = run(*arguments, **options)
        except Exception as error:
            results[name] = error

    for algorithm in CONFIGS:
        attempt(algorithm, _run, algorithm, directory / f"{algorithm}-{rank}")
    attempt("stopped", _run, "appo", directory / f"stopped-{rank}", frames=512, max_seconds=1e-6)
    other = APPOConfig(**APPO, gamma=(0.9, 0.8)[rank])
    attempt("other settings", _run, "appo", directory / "other", config=other)
    task = ("InvertedPendulum-v5", "Hopper-v5")[rank]
    sized = partial(MujocoBatchEnv, task, 8, num_threads=1)
    attempt("other sizes", _run, "appo", directory / "other", sized)
    resume = partial(resume_run, progress_bar=False, frames=2 * FRAMES)
    attempt("resumed", resume, directory / "sac-0")
    sound = partial(CountingEnv, (8,))
    broken = (sound, partial(HitEnv, directory / "mark", 20, "raise"))[rank]
    two = APPOConfig(**{**APPO, "num_envs": 2, "num_steps": 8})
    attempt("broken", _run, "appo", directory / f"broken-{rank}", broken, config=two)
    spoilt = (sound, partial(SpoiltEnv, (8,)))[rank]
    attempt("spoilt", _run, "appo", directory / f"spoilt-{rank}", spoilt)
    huge = partial(HugeEnv, (8,))
    attempt("huge", _run, "appo", directory / f"huge-{rank}", huge)
    if rank:  # whose machine does not see rank 0's directory
        attempt("unshared", _run, "appo", directory / "unseen", frames=2 * FRAMES)
    else:
        attempt("unshared", resume, directory / "appo-0")
    attempt("rollouts", _from_rollouts)
    return results


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def results(directory: Path) -> list[dict[str, Any]]:
    with world(take_part, directory) as ranks:
        return ranks.results()


def _of(results: list[dict[str, Any]], name: str) -> list[Any]:
    found = [one[name] for one in results]
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found


@each_algorithm
def test_ranks_learn_the_same_from_episodes_of_their_own(results, algorithm):
    first, second = _of(results, algorithm)
    assert first["updates"] > 0
    assert first["learnt"] == second["learnt"]
    assert first["counted"] == second["counted"]
    assert first["acting seed"] != second["acting seed"]


@each_algorithm
def test_frames_are_counted_of_all_ranks(results, algorithm):
    for one in _of(results, algorithm):
        assert one["frames"] == FRAMES
        assert one["own frames"] == FRAMES // 2


@each_algorithm
def test_rank_0_alone_writes_and_evaluates(results, directory, algorithm):
    assert [one["evaluated"] for one in _of(results, algorithm)] == [True, False]
    assert (directory / f"{algorithm}-0" / "summary.json").is_file()
    assert not (directory / f"{algorithm}-1").exists()


def test_all_ranks_stop_in_the_step_in_which_one_wants_to(results):
    first, second = _of(results, "stopped")
    assert first["frames"] == second["frames"] == 2 * 8 * 16
    assert first["learnt"] == second["learnt"]


def test_settings_or_networks_that_differ_are_refused_on_all_ranks_before_anything_is_written(
    results, directory
):
    for one in results:
        assert isinstance(one["other settings"], ConfigError)
        assert "gamma: 0.9, 0.8" in str(one["other settings"])
        assert isinstance(one["other sizes"], ConfigError)
        assert re.search(r"^shape of actor.*: \[1\], \[3\] on", str(one["other sizes"]))
    assert not (directory / "other").exists()


def test_all_ranks_resume_from_rank_0s_checkpoint(results):
    first, second = _of(results, "resumed")
    assert first["resumed"] == second["resumed"] == [FRAMES]
    assert first["frames"] == second["frames"] == 2 * FRAMES


def test_a_run_of_ranks_is_not_resumed_alone(results, directory):
    with pytest.raises(ConfigError, match="1 ranks for a run of 2"):
        resume_run(directory / "sac-0", frames=4 * FRAMES)


def test_a_collector_lost_on_one_rank_ends_the_others_which_name_its_cause(results, directory):
    first, second = (one["broken"] for one in results)
    assert isinstance(second, WorkerError)
    assert isinstance(first, PeerGoneError)
    assert "rank 1 failed with WorkerError" in str(first)
    assert "the physics exploded" in str(first)
    assert RunCheckpoints(directory / "broken-0" / "checkpoint").newest().frames > 0


def test_what_is_not_finite_on_one_rank_ends_all_and_names_it(results):
    for one in results:
        assert isinstance(one["spoilt"], DivergedError), one["spoilt"]
        assert "of rank 1 are not finite" in str(one["spoilt"])


def test_a_loss_that_is_not_finite_ends_all_ranks(results):
    for one in results:
        assert isinstance(one["huge"], DivergedError), one["huge"]


def test_ranks_that_see_different_directories_are_refused(results):
    for one in results:
        assert isinstance(one["unshared"], ConfigError), one["unshared"]
        assert f"checkpoint in the run's directory, at frames: [{FRAMES}], []" in str(
            one["unshared"]
        )


def test_frames_of_another_collectors_rollouts_are_counted_of_all_ranks(results):
    for one in _of(results, "rollouts"):
        assert one == {"frames": 512, "own frames": 256}
