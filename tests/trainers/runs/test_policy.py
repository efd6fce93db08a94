"""Policies of runs that have ended, loaded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tests.support.quick import four_pendulums, pendulum
from torchrl_unilab.errors import CheckpointError, ConfigError
from torchrl_unilab.trainers import load_policy
from torchrl_unilab.trainers.runs.policy import check_run, task_of


@pytest.mark.parametrize(("make", "fits"), [(four_pendulums, True), (pendulum, False)])
def test_an_environment_is_closed_whether_a_policy_fits_it_or_not(appo_run, make, fits):
    made = []

    def create_env():
        made.append(make())
        return made[0]

    if fits:
        load_policy(appo_run.run_dir, create_env=create_env)
    else:
        with pytest.raises(CheckpointError, match=r"does not load, (?s:.*) Restore the task"):
            load_policy(appo_run.run_dir, create_env=create_env)
    assert made[0].is_closed


@pytest.mark.parametrize("regular", [True, False], ids=["package", "namespace"])
@pytest.mark.parametrize("linked", [True, False])
def test_no_package_in_a_run_directory_is_imported_for_its_task(
    tmp_path, monkeypatch, regular, linked
):
    run_dir, link = tmp_path / "run", tmp_path / "link"
    package = run_dir / "evil_of_a_test"
    package.mkdir(parents=True)
    link.symlink_to(run_dir)
    for name in ("task", "__init__") if regular else ("task",):
        (package / f"{name}.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(link if linked else run_dir)
    with pytest.raises(ConfigError, match=r"cannot play: its task '.*' is code in the run dir"):
        task_of({"env": "evil_of_a_test.task:Task"}, run_dir, "cannot play")


def test_a_task_that_is_gone_is_an_error_of_its_run(tmp_path):
    with pytest.raises(ConfigError, match=r"^cannot play: .*Gone-v5.* give it here, too\.$"):
        task_of({"env": "Gone-v5"}, tmp_path, "cannot play")


MACHINE = ["device", "collector_device", "physics_threads", "learner_threads"]


@pytest.mark.parametrize("name", MACHINE)
def test_a_run_is_the_same_on_another_machine(name, tmp_path):
    saved = SimpleNamespace(run={name: 1, "gamma": 0.9}, path=tmp_path)
    check_run(saved, {name: 2, "gamma": 0.9}, "cannot resume", {name: 3})
    with pytest.raises(ConfigError, match=r"is of a run with \{'gamma': 0.9\} \(expected"):
        check_run(saved, {name: 2, "gamma": 0.5}, "cannot resume")


def test_a_policy_is_loaded_without_its_environment(run_dir):
    policy = load_policy(run_dir)
    seen = TensorDict(observation=torch.zeros(3, 4))
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        one, other = (policy(seen.copy())["action"] for _ in range(2))
    assert one.shape == (3, 1)
    assert torch.equal(one, other)
