from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import gymnasium
import pytest
import torch
from tensordict.nn import TensorDictModule

from tests.benchmarks import learn
from tests.benchmarks.learning_page import as_text
from tests.support.quick import APPO
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.trainers import APPOConfig, OffPolicyConfig

# Settings as text


def test_settings_are_read_by_the_type_of_their_field():
    given = ["epochs=10", "lr=3e-4", "hidden=32,16", "fused=false", "overflow=overwrite"]
    assert learn.parse_settings(APPOConfig, [*given, "slots=none", "value_clip=0.2"]) == {
        "epochs": 10,
        "lr": 3e-4,
        "hidden": (32, 16),
        "fused": False,
        "overflow": "overwrite",
        "slots": None,
        "value_clip": 0.2,
    }


@pytest.mark.parametrize(
    "config", [APPOConfig(), APPOConfig(hidden=()), OffPolicyConfig("td3", hidden=(8,))]
)
def test_every_setting_that_is_recorded_can_be_given_again(config):
    recorded = json.loads(json.dumps(dataclasses.asdict(config)))
    recorded.pop("algorithm", None)
    given = [f"{name}={as_text(value)}" for name, value in recorded.items()]
    assert dataclasses.replace(config, **learn.parse_settings(type(config), given)) == config


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("epochs=x", r"^epochs: 'x' \(expected an integer"),
        ("epochs", r"^epochs: '' \(expected an integer"),
        ("fused=1", r"^fused: 1 \(expected True or False\)"),
        ("hidden=8,x", r"^hidden: '8,x' \(expected a tuple"),
        ("epoch=3", r"^setting 'epoch=3': no 'epoch' \(expected name=value.*mean epochs\?"),
    ],
)
def test_a_setting_that_cannot_be_read_is_named(assignment, message):
    with pytest.raises(ConfigError, match=message):
        learn.parse_settings(APPOConfig, [assignment])


# Curves


def test_a_long_curve_is_thinned_evenly_between_its_first_and_last_point():
    kept = learn.thin([(index / 10, index, 2.0 * index) for index in range(1000)])
    frames = [point[1] for point in kept]
    assert len(kept) == 60
    assert kept[0] == [0.0, 0, 0.0]
    assert kept[-1] == [99.9, 999, 1998.0]
    assert {after - before for before, after in itertools.pairwise(frames)} == {16, 17}


@pytest.mark.parametrize("points", [0, 1, 2, 60])
def test_a_short_curve_is_kept(points):
    assert len(learn.thin([(0.0, index, 0.0) for index in range(points)])) == points


def test_an_evaluation_counts_from_the_moment_at_which_training_had_its_frames():
    curve = [(1.0, 100, 0.0), (2.5, 200, 0.0), (4.0, 300, 0.0)]
    evaluations = [(150, 7, 20.0, 99.0), (300, 9, 30.0, 99.0)]
    assert learn.timed(evaluations, curve) == [[1.75, 150, 20.0], [4.0, 300, 30.0]]


def test_evaluations_before_and_after_all_points_of_a_curve_are_kept():
    evaluations = [(50, 7, 20.0, 99.0), (400, 9, 30.0, 99.0)]
    assert learn.timed(evaluations, [(1.0, 100, 0.0)]) == [[0.5, 50, 20.0], [1.0, 400, 30.0]]
    assert learn.timed(evaluations, [])[1] == [0.0, 400, 30.0]


# Returns in Gymnasium's own environment


def test_returns_are_those_of_gymnasiums_own_episodes():
    actor = TensorDictModule(
        lambda seen: 0.5 * seen[..., :1], in_keys=["observation"], out_keys=["action"]
    )
    expected = []
    env = gymnasium.make("InvertedPendulum-v5")
    for seed in (5, 6, 7):
        observation, _ = env.reset(seed=seed)
        total, done = 0.0, False
        while not done:
            action = 0.5 * torch.as_tensor(observation, dtype=torch.float32)[:1].double()
            observation, reward, terminated, truncated, _ = env.step(action.numpy())
            total, done = total + reward, terminated or truncated
        expected.append(total)
    env.close()
    assert learn.gymnasium_returns(actor, "InvertedPendulum-v5", 3, seed=5) == expected
    assert len(set(expected)) > 1


# Runs


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> dict[str, Any]:
    """The record of a short run, as its line has it."""
    run_dir = tmp_path_factory.mktemp("learn") / "run"
    made = learn.learn("InvertedPendulum-v5", "appo", 3, 1024, run_dir, APPO)
    made["summary"] = json.loads((run_dir / "summary.json").read_text())
    return json.loads(json.dumps(made, allow_nan=False))


def test_a_record_says_what_was_run(record):
    assert (record["task"], record["algorithm"], record["seed"]) == (
        "InvertedPendulum-v5",
        "appo",
        3,
    )
    assert (record["frames_asked"], record["frames"]) == (1024, 1024)


def test_a_record_has_all_settings_and_apart_those_that_differ_from_the_defaults(record):
    config = APPOConfig.for_task("InvertedPendulum-v5", **APPO)
    assert record["settings"] == json.loads(json.dumps(dataclasses.asdict(config)))
    defaults = dataclasses.asdict(APPOConfig())
    changed = {name: value for name, value in APPO.items() if value != defaults[name]}
    changed |= {"lr": 1e-3, "log_std": -1.0}  # the task's own
    assert record["changed_settings"] == json.loads(json.dumps(changed))


def test_the_training_return_is_the_summarys(record):
    summary = record["summary"]
    assert record["training_return"] == summary["final_return"]
    assert record["curve"][-1] == [
        round(summary["seconds"], 2),
        1024,
        round(summary["final_return"], 2),
    ]


def test_a_record_has_ten_returns_without_noise(record):
    assert len(record["gymnasium_returns"]) == 10


def test_a_record_tells_the_machine_without_its_name(record):
    assert set(record["machine"]) == {"cores", "cpu", "system"}


def _summary(**changes: Any) -> dict[str, Any]:
    """What a run returns."""
    summary = {"interrupted": False, "frames": 9, "seconds": 1.0, "final_return": 2.0}
    summary |= {"eval_return": 3.0, "versions": {}, "busy": {}, "policy_lag": {}}
    return {**summary, "optim_steps": 1, "curve": [(0.5, 9, 2.0)], **changes}


def _run_quadruped(out, summaries, monkeypatch) -> int:
    seeds = [str(seed) for seed in range(len(summaries))]
    remaining = iter(summaries)
    monkeypatch.setattr(learn, "train_appo", lambda *_, **__: next(remaining))
    monkeypatch.setattr(learn.signal, "signal", lambda *_: None)
    return learn.main(["QuadrupedWalk", "appo", "--seeds", *seeds, "--out", str(out)])


def test_a_task_that_gymnasium_does_not_have_is_evaluated_in_ours_alone(tmp_path, monkeypatch):
    out = tmp_path / "results" / "out.jsonl"
    assert _run_quadruped(out, [_summary()], monkeypatch) == 0
    written = json.loads(out.read_text())
    assert (written["gymnasium_returns"], written["eval_return"]) == (None, 3.0)


@pytest.mark.parametrize("interrupted", [{"interrupted": True}, {"eval_return": None}])
def test_an_interrupted_run_writes_nothing(tmp_path, monkeypatch, interrupted):
    out = tmp_path / "out.jsonl"
    code = _run_quadruped(out, [_summary(), _summary(**interrupted), _summary()], monkeypatch)
    assert code == 130
    assert [json.loads(line)["seed"] for line in out.read_text().splitlines()] == [0]


def test_bad_input_is_one_line_and_trains_nothing(tmp_path, capsys):
    settings = ["--set", "epochs=0", "--set", "lr=1e-3"]
    out = ["--out", str(tmp_path / "o")]
    assert learn.main(["Hopper-v5", "appo", *settings, *out]) == 2
    assert capsys.readouterr().err.startswith("error: epochs: 0 (expected an integer")
