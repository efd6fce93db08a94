from __future__ import annotations

import math
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from torchrl.checkpoint import Checkpoint

from tests.support.quick import FRAMES, QUIET
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.errors import CheckpointError
from torchrl_unilab.trainers import evaluate_run, load_policy, play_run, resume_run
from torchrl_unilab.trainers.runs.best_policy import BestPolicy
from torchrl_unilab.trainers.runs.checkpoint import RunCheckpoints, run_checkpoint
from torchrl_unilab.trainers.runs.directory import BEST

RUN = {"env": "Hopper-v5", "hidden": (16,), "device": "cpu"}
METADATA = RunCheckpoints("unused").metadata(RUN, total_frames=1000)


def _keep(directory: Path, frames: int, mean_return: float) -> dict[str, float] | None:
    """Evaluate a policy whose weights name its frames; return the best one's result."""
    policy = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(policy.weight, frames)
    best = BestPolicy(directory, METADATA)
    best.keep(policy, frames, mean_return)
    return best.result()


def _kept(directory: Path) -> float:
    """Return the frames of the policy that is loaded."""
    policy = torch.nn.Linear(1, 1)
    Checkpoint(policy=policy).load(RunCheckpoints(directory).newest(("policy",)).path)
    return policy.weight.item()


@pytest.mark.parametrize(
    ("evaluations", "best"),
    [
        ([(100, 5.0), (200, 7.0)], 200),
        ([(100, 5.0), (200, 4.0), (300, 3.0)], 100),
        ([(100, 5.0), (200, 5.0)], 200),  # of equals, the newest
        ([(100, 5.0), (200, math.nan), (300, math.inf)], 100),
        ([(100, -5.0), (200, -7.0)], 100),
        ([(300, 5.0), (200, 6.0)], 200),  # of a run that was resumed at 100
        ([(300, 5.0), (300, 6.0), (400, 5.5)], 300),
        ([(100, 4.0), (100, 4.0)], 100),  # nothing more is saved
    ],
)
def test_the_policy_with_the_highest_return_is_kept(tmp_path, evaluations, best):
    returned = [_keep(tmp_path, *evaluation) for evaluation in evaluations]
    highest = max(value for _, value in evaluations if math.isfinite(value))
    assert _kept(tmp_path) == best
    assert returned[-1] == {"frames": best, "eval_return": highest}
    assert len(RunCheckpoints(tmp_path).paths()) == min(2, len({*map(str, filter(None, returned))}))


def test_of_two_evaluations_without_a_finite_return_nothing_is_kept(tmp_path):
    assert [_keep(tmp_path / BEST, 100, value) for value in (math.nan, -math.inf)] == [None, None]
    assert not (tmp_path / BEST).exists()


def test_a_damaged_best_policy_is_replaced(tmp_path):
    _keep(tmp_path, 100, 9.0)
    (path,) = RunCheckpoints(tmp_path).paths()
    (path / "manifest.json").write_text("{}")
    _keep(tmp_path, 200, 1.0)
    assert _kept(tmp_path) == 200


def test_a_damaged_best_policy_gives_way_to_a_better_one_of_before(tmp_path):
    for frames, value in ((100, 9.0), (200, 10.0)):
        _keep(tmp_path, frames, value)
    (max(RunCheckpoints(tmp_path).paths()) / "manifest.json").write_text("{}")
    assert _keep(tmp_path, 300, 1.0) == {"frames": 100, "eval_return": 9.0}
    assert _kept(tmp_path) == 100


@pytest.mark.parametrize(
    ("run", "evaluated"),
    [
        ({"env": "Ant-v5"}, {"eval_return": 9.0}),  # copied here
        ({"env": "Hopper-v5", "hidden": [8]}, {"eval_return": 9.0}),  # begun again with other ones
        (RUN, {}),  # a checkpoint that was copied here
    ],
)
def test_a_best_policy_of_another_run_is_replaced(tmp_path, run, evaluated):
    metadata = METADATA | {"run": run, "collected_frames": 100} | evaluated
    checkpoint = run_checkpoint(policy=torch.nn.Linear(1, 1))
    RunCheckpoints(tmp_path).save(checkpoint, step=100, metadata=metadata)
    assert _keep(tmp_path, 200, 1.0) == {"frames": 200, "eval_return": 1.0}
    assert _kept(tmp_path) == 200


def test_a_run_that_goes_on_on_another_device_has_the_best_policy_of_before(tmp_path):
    metadata = METADATA | {"run": RUN | {"device": "cuda"}}
    BestPolicy(tmp_path, metadata).keep(torch.nn.Linear(1, 1), 100, 9.0)
    assert _keep(tmp_path, 200, 1.0) == {"frames": 100, "eval_return": 9.0}


@pytest.fixture
def run_dir(appo_run, tmp_path) -> Path:
    """A copy of a run that evaluates, whose best policy is another than the newest."""
    path = shutil.copytree(appo_run.run_dir, tmp_path / "run")
    policy = load_policy(path)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    run = RunCheckpoints(path / BEST).newest(("policy",)).run
    metadata = RunCheckpoints(path).metadata(run, total_frames=1024)
    BestPolicy(path / BEST, metadata).keep(policy, 512, 5000.0)
    return path


def test_the_best_policy_of_a_run_is_loaded_evaluated_and_filmed(run_dir):
    assert not any(parameter.any() for parameter in load_policy(run_dir, best=True).parameters())
    assert any(parameter.any() for parameter in load_policy(run_dir).parameters())
    for use in (evaluate_run, partial(play_run, video=run_dir / "best.mp4", width=64, height=48)):
        assert use(run_dir, best=True)["mean"] != use(run_dir)["mean"]


def test_the_best_policy_is_loaded_though_a_run_finds_better_ones_meanwhile(run_dir):
    def create_env() -> MujocoBatchEnv:
        run = RunCheckpoints(run_dir / BEST).newest(("policy",)).run
        best = BestPolicy(run_dir / BEST, RunCheckpoints(run_dir).metadata(run, 2048))
        for frames in (1024, 2048):
            best.keep(load_policy(run_dir), frames, 5000.0 + frames)
        return MujocoBatchEnv("InvertedPendulum-v5", num_envs=1, num_threads=1)

    loaded = load_policy(run_dir, best=True, create_env=create_env)
    assert any(parameter.any() for parameter in loaded.parameters())


def test_a_resumed_run_keeps_a_better_policy_of_before(run_dir):
    summary = resume_run(run_dir, frames=1024 + FRAMES, **QUIET)
    assert summary["best"] == {"frames": 512, "eval_return": 5000.0}
    assert not any(parameter.any() for parameter in load_policy(run_dir, best=True).parameters())


def test_a_runs_summary_names_the_best_of_all_its_evaluations(appo_run):
    summary = appo_run.summary
    during = {one.frames: one.mean_return for one in summary["evaluations"]}
    returns = during | {summary["frames"]: summary["eval_return"]}
    best = summary["best"]
    assert best["eval_return"] == pytest.approx(max(returns.values()))
    assert best["eval_return"] == pytest.approx(returns[best["frames"]])
    found = evaluate_run(appo_run.run_dir, best=True, episodes=2, seed=3)
    assert found["mean"] == pytest.approx(best["eval_return"])


def test_a_run_without_a_whole_best_policy_is_refused_where_it_is_asked_for(
    off_policy_runs, tmp_path
):
    path = shutil.copytree(off_policy_runs["sac"].run_dir, tmp_path / "run")
    (best,) = RunCheckpoints(path / BEST).paths()
    (best / "digests.json").unlink()
    with pytest.raises(CheckpointError, match=r"digests.json.* Or leave best out"):
        evaluate_run(path, best=True)
    best.rename(best.with_name(f".{best.name}"))  # as a run leaves it that is killed in mid-save
    missing = r"no checkpoint in .*/best .* Or leave best out"
    with pytest.raises(CheckpointError, match=missing):
        evaluate_run(path, best=True)
    shutil.rmtree(path / BEST)
    with pytest.raises(CheckpointError, match=missing):
        evaluate_run(path, best=True)
    assert evaluate_run(path, episodes=1)["episodes"] == 1
