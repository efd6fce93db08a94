"""Checkpoints and settings with which no run is resumed, evaluated or filmed."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from tensordict import TensorDict
from tensordict import save as save_tensordict

from tests.support.checkpoints import plant_code, tree
from tests.support.processes import live_children
from tests.support.quick import FRAMES, QUIET
from torchrl_unilab.configs.file import as_yaml, read_config
from torchrl_unilab.errors import CheckpointError, ConfigError
from torchrl_unilab.trainers import evaluate_run, load_policy, resume_run
from torchrl_unilab.trainers.runs.checkpoint import RunCheckpoints, _digests, run_checkpoint
from torchrl_unilab.trainers.runs.policy import play_run
from torchrl_unilab.trainers.runs.train import Run


def plant(run_dir: Path, component: str, mark: Path) -> None:
    """Put code into a component of a run's newest checkpoint, with digests that agree."""
    newest = max((run_dir / "checkpoint").iterdir())
    record = json.loads((newest / "manifest.json").read_text())["components"][component]
    state = newest / record["path"] / "state"
    if not state.exists():  # of a component of another kind
        save_tensordict(TensorDict(), state)
    plant_code(state, mark)
    (newest / "digests.json").write_text(json.dumps(_digests(newest)))


LOADERS = {
    "eval": lambda run_dir: evaluate_run(run_dir, episodes=1),
    "play": lambda run_dir: play_run(run_dir, run_dir.parent / "film.mp4", width=16, height=16),
    "resume": lambda run_dir: resume_run(run_dir, frames=2 * FRAMES, **QUIET),
}


@pytest.mark.filterwarnings("default::FutureWarning")  # the error that it is here would hide it
@pytest.mark.parametrize("component", ["policy", "replay", "collector", "rng"])
@pytest.mark.parametrize("loader", LOADERS)
def test_a_run_directory_with_a_pickle_is_refused_and_runs_no_code(
    run_dir, tmp_path, loader, component
):
    mark = tmp_path / "mark"
    plant(run_dir, component, mark)
    with pytest.raises(CheckpointError, match=r"it holds \['.*state/evil/other.pickle'\]"):
        LOADERS[loader](run_dir)
    assert not mark.exists()


def test_a_pickle_within_an_archive_is_refused(run_dir):
    newest = max((run_dir / "checkpoint").iterdir())
    archive = next(newest.rglob("*.tdz"))
    with ZipFile(archive, "a") as within:
        within.writestr("evil/other.pickle", pickle.dumps(1))
    (newest / "digests.json").unlink()
    (newest / "digests.json").write_text(json.dumps(_digests(newest)))
    refused(run_dir, rf"it holds \['.*{archive.name}/evil/other.pickle'\]", frames=2 * FRAMES)


def test_files_behind_a_symbolic_link_are_refused(run_dir, tmp_path):
    newest = max((run_dir / "checkpoint").iterdir())
    (newest / "elsewhere").symlink_to(tmp_path)
    refused(run_dir, r"it holds \['elsewhere'\]", frames=2 * FRAMES)


def refused(run_dir: Path, reason: str, **settings: Any) -> None:
    """Resuming is refused for a reason, and nothing of the run is touched."""
    before = tree(run_dir)
    with pytest.raises((CheckpointError, ConfigError), match=reason):
        resume_run(run_dir, **{**QUIET, **settings})
    assert tree(run_dir) == before
    assert not live_children()


def test_a_damaged_checkpoint_is_refused_and_the_older_one_works(run_dir, tmp_path):
    older, newest = sorted((run_dir / "checkpoint").iterdir())
    rows = next(newest.rglob("rows.bin"))
    rows.write_bytes(rows.read_bytes()[:-1])
    remedy = rf"rows.bin'\] are not as .*{older.name} is: remove {newest.name} to resume"
    refused(run_dir, remedy)
    assert evaluate_run(run_dir, episodes=1)["episodes"] == 1  # the policy's files are whole
    (newest / "manifest.json").write_text("{}")
    for purpose, use in {"evaluate": evaluate_run, "play": play_run}.items():
        before = tree(run_dir)
        arguments = (run_dir, tmp_path / "film.mp4") if use is play_run else (run_dir,)
        with pytest.raises(CheckpointError) as caught:
            use(*arguments, episodes=1)
        message = str(caught.value)
        assert message.startswith(f"cannot {purpose} {run_dir}: checkpoint {newest}: its manifest")
        assert message.endswith(f"{older.name} is: remove {newest.name} to resume from there.")
        assert message.count("(expected ") == 1
        assert tree(run_dir) == before
        assert not (tmp_path / "film.mp4").exists()
    shutil.rmtree(newest)
    assert resume_run(run_dir, **QUIET)["frames"] == FRAMES


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"settings": {"env": "Hopper-v5"}}, r"run with \{'env': 'InvertedPendulum-v5'\}"),
        ({"settings": {"algo": "td3"}}, r"is a run of sac \(expected td3\)\. .*: train sac\."),
        ({"settings": {"gamma": 0.5}}, r"run with \{'gamma': 0.99\}"),
        ({"settings": {"nonsense": 1}}, r"run with \{'nonsense': None\}"),
        ({"settings": [1]}, r"settings cannot be compared, .* \(expected a mapping"),
        ({"settings": {"hidden": {1}}}, "settings cannot be compared, Object of type set"),
        ({"frames": FRAMES}, "192 of 192 frames have been collected"),
        ({}, "192 of 192 frames have been collected"),
        ({"frames": 2 * FRAMES, "eval_episodes": 0}, "eval_episodes: 0"),
        ({"seed": 4, "lr": 1e-4}, r"\['lr', 'seed'\] \(expected some of check.*: train anew\."),
        ({"frames": 2 * FRAMES, "keep_checkpoints": -1}, "keep_checkpoints: -1"),
        ({"frames": 2 * FRAMES, "create_env": print}, r"create_env for a run without one \(expec"),
    ],
)
def test_another_run_or_nothing_to_do_is_refused(free, settings, reason):
    refused(free, reason, **settings)


def test_threads_of_another_algorithm_are_refused(appo_run):
    reason = r"run with \{'learner_threads': None\}"
    refused(appo_run.run_dir, reason, settings={"learner_threads": 2}, frames=9999)


def test_a_checkpoint_in_the_directory_of_another_run_is_refused(run_dir):
    file = run_dir / "config.yaml"
    file.write_text(as_yaml({**read_config(file), "seed": 7, "hidden": [9]}))
    refused(run_dir, r"run with \{'seed': 0, 'hidden': \[8\]\}", frames=2 * FRAMES)
    file.write_text("{")
    refused(run_dir, "config.yaml: cannot be read", frames=2 * FRAMES)


def test_an_unknown_setting_of_config_yaml_is_refused_with_the_nearest(run_dir):
    file = run_dir / "config.yaml"
    file.write_text(as_yaml({**read_config(file), "eval_episode": 2}))
    reason = r"config.yaml: eval_episode: unknown \(expected .* Did you mean eval_episodes\?"
    refused(run_dir, reason, frames=2 * FRAMES)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"env": "InvertedDoublePendulum-v5"},
            r"is of a run with \{'env': 'InvertedPendulum-v5'\}",
        ),
        ({"algo": "td3"}, r"it is a run of sac \(expected td3\)"),
        ({"hidden": 8}, r"is of a run with \{'hidden': \[8\]\} \(expected \{'hidden': 8\}\)"),
    ],
)
def test_a_policy_is_not_used_as_that_of_another_run_that_config_yaml_is_of(
    run_dir, tmp_path, said, message
):
    """Two tasks may observe and act in as many numbers."""
    file = run_dir / "config.yaml"
    file.write_text(as_yaml({**read_config(file), **said}))
    film = partial(play_run, video=tmp_path / "film.mp4")
    uses = {"evaluate": evaluate_run, "play": film, "load": load_policy, "resume": resume_run}
    for purpose, use in uses.items():
        with pytest.raises(ConfigError, match=f"cannot {purpose} .*{message}"):
            use(run_dir)
    assert not (tmp_path / "film.mp4").exists()


def test_a_run_without_a_checkpoint_is_refused_by_the_name_of_that(run_dir):
    (run_dir / "checkpoint").rename(run_dir / "elsewhere")
    with pytest.raises(CheckpointError, match=r"cannot evaluate .*: no checkpoint in .*checkpoint"):
        evaluate_run(run_dir)


@pytest.mark.parametrize("steps", [0, "abc"])
def test_an_evaluation_without_steps_is_refused_as_a_resume_refuses_it(run_dir, steps):
    file = run_dir / "config.yaml"
    file.write_text(as_yaml({**read_config(file), "eval_max_steps": steps}))
    message = f"eval_max_steps: {steps!r} \\(expected an integer of at least 1\\)"
    for use in (evaluate_run, partial(resume_run, frames=2 * FRAMES)):
        with pytest.raises(ConfigError, match=message):
            use(run_dir)


def test_a_checkpoint_of_other_sizes_is_refused(run_dir):
    checkpoints = RunCheckpoints(run_dir / "checkpoint")
    saved = checkpoints.newest()
    metadata = checkpoints.metadata(saved.run, total_frames=2 * FRAMES)
    parts = run_checkpoint(policy=torch.nn.Linear(2, 2))
    metadata |= {"collected_frames": FRAMES + 1}
    checkpoints.save(parts, step=FRAMES + 1, metadata=metadata)
    refused(run_dir, re.escape("cannot resume from"), frames=2 * FRAMES)


def test_a_run_without_its_settings_is_evaluated_and_resumed_by_those_of_its_checkpoint(run_dir):
    (run_dir / "config.yaml").unlink()
    assert evaluate_run(run_dir, episodes=1)["env"] == "InvertedPendulum-v5"
    shutil.rmtree(max((run_dir / "checkpoint").iterdir()))
    assert resume_run(run_dir, **QUIET)["frames"] == FRAMES
    assert read_config(run_dir / "config.yaml")["hidden"] == (8,)


def test_a_checkpoint_that_came_while_a_run_was_being_resumed_is_not_passed_over(
    run_dir, monkeypatch
):
    connect = Run.connect

    def early(run: Run, closing: object) -> None:
        connect(run, closing)
        if not done:
            done.append(True)
            resume_run(run_dir, frames=2 * FRAMES, **QUIET)

    done: list[bool] = []
    monkeypatch.setattr(Run, "connect", early)
    with pytest.raises(
        ConfigError, match=r"its newest checkpoint is frames-\d+ by now \(expected frames-\d+\)"
    ):
        resume_run(run_dir, frames=2 * FRAMES, **QUIET)
