from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import get_overloads, get_type_hints
from unittest.mock import Mock, call

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Composite, OneHot, TensorSpec, Unbounded
from torchrl.envs import (
    DoubleToFloat,
    DTypeCastTransform,
    EnvBase,
    GymEnv,
    RenameTransform,
    SerialEnv,
    TransformedEnv,
)

from torchrl_unilab.cli import main
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.objectives import APPOLoss
from torchrl_unilab.trainers import (
    APPOConfig,
    OffPolicyConfig,
    evaluate_run,
    load_policy,
    resume_run,
    train_appo,
    train_off_policy,
)
from torchrl_unilab.trainers.runs import builders
from torchrl_unilab.trainers.runs.builders import Learner, build_learner

CONFIGS = [
    pytest.param(APPOConfig(hidden=(8,), num_envs=2, num_steps=16, minibatches=1), id="appo"),
    *(
        pytest.param(
            OffPolicyConfig(
                algorithm,
                hidden=(8,),
                num_envs=2,
                batch_size=8,
                learning_starts=2,
                obs_normalization=True,
            ),
            id=algorithm,
        )
        for algorithm in ("sac", "td3")
    ),
]
every_algorithm = pytest.mark.parametrize("config", CONFIGS)


def test_type_checkers_know_that_appo_s_learner_has_the_loss_that_its_trainer_takes():
    hints = [get_type_hints(each) for each in get_overloads(build_learner)]
    assert {each["config"]: each["return"] for each in hints}[APPOConfig] == Learner[APPOLoss]


@pytest.mark.parametrize("setting", ["device", "collector_device"])
def test_a_run_on_a_device_that_is_not_there_writes_nothing(setting, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    run_dir = tmp_path / "run"
    asked = ["--env", "Hopper-v5", "--frames", "9999", "--run-dir", str(run_dir)]
    assert main(["train", "appo", *asked, f"--{setting}".replace("_", "-"), "cuda"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {setting}: 'cuda' (expected one that torch")
    assert not run_dir.exists()


@every_algorithm
def test_all_of_the_learner_moves_to_its_device(config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    moved = []
    monkeypatch.setattr(
        torch.nn.Module, "to", lambda module, device: moved.append((module, device))
    )
    env = MujocoBatchEnv("InvertedPendulum-v5", num_envs=1, num_threads=1)
    learner = build_learner(env, dataclasses.replace(config, device="cuda:1"))
    env.close()
    assert len(learner.normalizers) == 1
    for module in (learner.loss, learner.actor, *learner.normalizers.values()):
        assert any(one is module and device == torch.device("cuda:1") for one, device in moved)


@pytest.mark.gpu
@every_algorithm
def test_a_run_learns_on_a_gpu_and_is_evaluated_on_the_cpu(config, tmp_path: Path):
    train = train_appo if config.algorithm == "appo" else train_off_policy
    summary = train(
        "InvertedPendulum-v5",
        frames=256,
        run_dir=tmp_path / "run",
        config=dataclasses.replace(config, device="cuda"),
        progress_bar=False,
        eval_episodes=2,
    )
    assert summary["optim_steps"] > 0
    assert evaluate_run(tmp_path / "run", episodes=2)["mean"] == pytest.approx(
        summary["eval_return"]
    )
    resumed = resume_run(tmp_path / "run", frames=512, progress_bar=False, eval_episodes=2)
    assert resumed["optim_steps"] > summary["optim_steps"]


def _acting(action_spec: TensorSpec) -> SimpleNamespace:
    """The specs of an environment with these actions."""
    observation = Composite(observation=Unbounded(4))
    shape = torch.Size([])
    return SimpleNamespace(batch_size=shape, observation_spec=observation, action_spec=action_spec)


@every_algorithm
def test_actions_that_are_not_continuous_are_refused(config):
    with pytest.raises(ConfigError, match=r"actions: OneHot \(expected continuous ones"):
        build_learner(_acting(OneHot(2)), config)


@pytest.mark.parametrize("algorithm", ["sac", "td3"])
def test_actions_without_bounds_are_refused_by_sac_and_td3(algorithm):
    with pytest.raises(ConfigError, match=r"(?s)action bounds: .* finite difference"):
        build_learner(_acting(Unbounded(3)), OffPolicyConfig(algorithm))


@every_algorithm
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_observations_of_another_dtype_are_refused_and_the_remedy_is_one(config, dtype):
    env = _acting(Bounded(-1.0, 1.0, shape=(3,)))
    env.observation_spec["observation"] = Unbounded(4, dtype=dtype)
    remedy = rf"DTypeCastTransform\({dtype}, torch\.float32, in_keys=\['observation'\]\)"
    with pytest.raises(ConfigError, match=rf"'observation' is {dtype} .*{remedy}"):
        build_learner(env, config)
    cast = DTypeCastTransform(dtype, torch.float32, in_keys=["observation"])
    env.observation_spec = cast.transform_observation_spec(env.observation_spec)
    build_learner(env, config)


@pytest.mark.parametrize("key", ["pixels", "depth"])
def test_what_is_no_vector_cannot_be_observed_and_is_not_offered(key):
    env = _acting(Bounded(-1.0, 1.0, shape=(3,)))
    env.observation_spec["pixels"] = Unbounded((4, 8, 8))
    env.observation_spec["depth"] = Unbounded(())
    env.observation_spec["nested", "vector"] = Unbounded(2)
    with pytest.raises(ConfigError, match=rf"'{key}' \(expected 'observation'\)"):
        build_learner(env, APPOConfig(observation=key))


@pytest.mark.parametrize(
    "spec",
    [Bounded(-1.0, 1.0, (2, 3)), Bounded(-1.0, 1.0, ()), Bounded(-1, 1, (3,), dtype=torch.int)],
)
@every_algorithm
def test_actions_that_are_no_vector_of_floats_are_refused(config, spec):
    with pytest.raises(ConfigError, match=r"actions: torch\..* \(expected one vector of"):
        build_learner(_acting(spec), config)


@pytest.mark.parametrize("key", ["action", "reward"])
@every_algorithm
def test_keys_of_actions_and_rewards_that_no_run_knows_are_refused(config, key, tmp_path: Path):
    def make() -> TransformedEnv:
        renamed = {"in_keys": [key], "out_keys": ["other"]}
        if key == "action":
            renamed = {
                "in_keys": [],
                "out_keys": [],
                "in_keys_inv": [key],
                "out_keys_inv": ["other"],
            }
        return TransformedEnv(_pendulums(), RenameTransform(**renamed))

    train = train_appo if isinstance(config, APPOConfig) else train_off_policy
    with pytest.raises(ConfigError, match=rf"environment: its keys are .*'{key}'.*'other'"):
        train("p", frames=5000, run_dir=tmp_path / "run", create_env=make, config=config)


@every_algorithm
def test_rewards_of_several_numbers_are_refused_before_anything_starts(config, tmp_path: Path):
    def make() -> EnvBase:
        env = _pendulums().set_spec_lock_(False)
        env.reward_spec = Unbounded((2, 2))
        return env

    train = train_appo if isinstance(config, APPOConfig) else train_off_policy
    with pytest.raises(ConfigError, match=r"rewards of shape \(2, 2\) for a batch \(2,\)"):
        train("p", frames=5000, run_dir=tmp_path / "run", create_env=make, config=config)


def _pendulums(env: str = "InvertedPendulum-v5") -> SerialEnv:
    """Environments of a kind that is closed until it is first reset."""
    return SerialEnv(2, lambda: TransformedEnv(GymEnv(env), DoubleToFloat()))


@every_algorithm
def test_a_batch_of_torchrls_environments_is_trained_loaded_and_evaluated(config, tmp_path: Path):
    train = train_appo if isinstance(config, APPOConfig) else train_off_policy
    options = {"frames": 64, "run_dir": tmp_path / "run", "progress_bar": False, "eval_episodes": 1}
    train("pendulums", create_env=_pendulums, config=config, **options)
    policy = load_policy(tmp_path / "run", create_env=_pendulums)
    assert policy(TensorDict(observation=torch.zeros(4)))["action"].shape == (1,)
    assert evaluate_run(tmp_path / "run", episodes=2, create_env=_pendulums)["episodes"] == 2


def test_what_is_wrong_with_a_batch_of_torchrls_environments_is_said(tmp_path: Path):
    config = APPOConfig(hidden=(8,), num_envs=2, num_steps=16, minibatches=1, observation="eyes")
    with pytest.raises(ConfigError, match=r"observation: 'eyes' \(expected '.*Choose a vector"):
        train_appo("p", frames=64, run_dir=tmp_path / "r", create_env=_pendulums, config=config)


def test_appos_networks_and_loss_are_made_as_the_settings_say(monkeypatch):
    monkeypatch.setattr(builders, "make_actor", actor := Mock())
    monkeypatch.setattr(builders, "APPOLoss", loss := Mock())
    of_actor = {"log_std": -2.0, "noise_correlation": 0.5, "hidden": (8,)}
    of_loss = {"clip_epsilon": 0.1, "value_clip": 0.3, "entropy_coeff": 0.01, "critic_coeff": 0.5}
    of_loss |= {"gamma": 0.9, "lambda_": 0.8, "rho_bar": 2.0, "c_bar": 3.0, "tau": 0.7}
    of_loss |= {"target_update_freq": 5}
    config = APPOConfig(**of_actor, **of_loss)
    builders.build_appo(_acting(Bounded(-1.0, 1.0, shape=(3,))), config)
    assert of_actor.items() <= actor.call_args.kwargs.items()
    assert loss.call_args.kwargs == of_loss


@pytest.mark.parametrize("algorithm", ["sac", "td3"])
def test_the_value_targets_of_sac_and_td3_are_discounted_as_the_settings_say(algorithm):
    config = OffPolicyConfig(algorithm, gamma=0.9, hidden=(8,))
    loss = build_learner(_acting(Bounded(-1.0, 1.0, shape=(3,))), config).loss
    assert loss.value_estimator.gamma == pytest.approx(0.9)


def test_sacs_temperature_begins_as_the_settings_say():
    config = OffPolicyConfig("sac", alpha=0.3, hidden=(8,))
    loss = build_learner(_acting(Bounded(-1.0, 1.0, shape=(3,))), config).loss
    assert loss.log_alpha.exp().item() == pytest.approx(0.3)


BOTH = {"num_envs": 2, "num_collectors": 3, "restart_workers": 5, "collector_device": "cuda:1"}
OF_BOTH = {"num_collectors": 3, "restart_workers": 5, "policy_device": "cuda:1", "seed": 7}
OF_BOTH |= {"lockstep": False, "weight_sync_schemes": {"policy": "scheme"}}


@pytest.mark.parametrize(
    ("make", "kind", "config", "arguments"),
    [
        (
            builders.ring_collector,
            "APPOCollector",
            APPOConfig(**BOTH, num_steps=8, slots=6, overflow="overwrite", max_policy_lag=4),
            {"frames_per_batch": 16, "slots": 6, "overflow": "overwrite", "max_policy_lag": 4},
        ),
        (
            builders.replay_collector,
            "ReplayCollector",
            OffPolicyConfig(**BOTH, env_steps_per_sync=2, learning_starts=5, n_step=3, gamma=0.9),
            {"frames_per_batch": 12, "capacity": 375_000, "init_random_frames": 30, "explore": None}
            | {"replay": {"n_step": 3, "gamma": 0.9}},
        ),
    ],
    ids=["appo", "sac"],
)
def test_a_collector_is_made_as_the_settings_say(make, kind, config, arguments, monkeypatch):
    monkeypatch.setattr(builders, kind, made := Mock())
    make("create_env", "actor", "scheme", config, 7, inline=True)
    expected = {**OF_BOTH, **arguments, "inline": True}
    assert made.call_args == call("create_env", "actor", **expected)
