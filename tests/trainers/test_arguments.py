from __future__ import annotations

import dataclasses
import inspect
import re
from unittest.mock import Mock

import numpy as np
import pytest
from torchrl.checkpoint import Checkpoint
from torchrl.trainers import Trainer

from torchrl_unilab.collectors import ReplayCollector
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.hydra.nodes import TAKEN
from torchrl_unilab.trainers import APPOConfig, APPOTrainer, OffPolicyConfig, OffPolicyTrainer
from torchrl_unilab.trainers.arguments import REPLACEMENTS, check_arguments

BOTH = pytest.mark.parametrize(
    ("trainer", "config"), [(APPOTrainer, APPOConfig()), (OffPolicyTrainer, OffPolicyConfig())]
)
STOCK = inspect.signature(Trainer.__init__).parameters


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_epochs", 1),
        ("optim_steps_per_batch", 3),
        ("optimizer", Mock()),
        ("optimization_stepper", Mock()),
        ("frame_skip", 1),
        ("replay_buffer", Mock()),
        ("target_net_updater", Mock()),
        ("batch_size", 8),
        ("clip_norm", 0.5),
        ("clip_grad_norm", False),
        ("async_collection", True),
        ("learner_backend", "ray"),
        ("learner_backend_options", {"num_gpus": 1}),
        ("learner_poll_interval", 1.0),
    ],
)
@BOTH
def test_arguments_of_stock_trainers_that_would_have_no_effect_are_refused(
    trainer, config, name, value
):
    given = {"collector": Mock(ReplayCollector), "loss_module": None, "total_frames": 1}
    given["collector"].storage.max_size = 1_000_000
    message = rf"^{name}: given \(expected to follow from config\)\. Leave out {name}"
    with pytest.raises(ConfigError, match=message):
        trainer(config=config, **given, **{name: value})


@BOTH
def test_defaults_of_stock_trainers_are_accepted(trainer, config):
    defaults = {
        "replay_buffer": None,
        "target_net_updater": None,
        "batch_size": None,
        "clip_norm": None,
        "clip_grad_norm": True,
        "async_collection": False,
        "learner_backend": "local",
        "learner_backend_options": None,
        "learner_poll_interval": 0.05,
    }
    check_arguments(defaults, config, type(config))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("checkpoint", "x", r"'x' \(expected Checkpoint \| None\)"),
        ("checkpoint_metadata", {}, r"\{\} \(expected Callable\[.*\] \| None\)"),
        ("logger", "csv", r"'csv' \(expected Logger \| None\)"),
        ("save_trainer_file", 5, r"5 \(expected str \| pathlib.Path \| None\)"),
        ("log_interval", "often", r"'often' \(expected int\)"),
    ],
)
@BOTH
def test_arguments_of_stock_trainers_of_another_type_are_refused(
    trainer, config, name, value, expected
):
    with pytest.raises(ConfigError, match=rf"^{name}: {expected}\. Correct it, or leave it out"):
        check_arguments({name: value}, config, type(config))


@BOTH
def test_a_checkpoint_where_none_can_be_made_is_refused_on_the_rank_that_saves(
    trainer, config, tmp_path, monkeypatch
):
    (tmp_path / "file").touch()
    given = {"save_trainer_file": tmp_path / "file" / "new" / "trained.pt"}
    with pytest.raises(ConfigError, match=r"^save_trainer_file .*trained.pt: cannot .*/file \(exp"):
        check_arguments(given, config, type(config))
    monkeypatch.setenv("RANK", "1")
    check_arguments(given, config, type(config))


@BOTH
def test_arguments_of_stock_trainers_of_their_types_are_accepted(trainer, config, tmp_path):
    given = {"checkpoint": Checkpoint(), "checkpoint_metadata": len, "save_trainer_file": tmp_path}
    given |= {"log_interval": np.int64(5), "logger": Mock()}  # as a client of a logger elsewhere is
    check_arguments(given, config, type(config))


@BOTH
def test_each_argument_of_the_stock_trainer_is_of_ours_or_passed_on_or_refused(trainer, config):
    own = inspect.signature(trainer.__init__).parameters
    assert {*STOCK} - {*own} - TAKEN == {*STOCK} & {*REPLACEMENTS[type(config)]}


@pytest.mark.parametrize("kind", REPLACEMENTS)
def test_each_setting_that_stands_for_an_argument_exists(kind):
    told = re.findall(r"set (.*?) in config", " | ".join(REPLACEMENTS[kind].values()))
    settings = {name for names in told for name in re.split(r", | or ", names)}
    assert {"tau", "gamma"} <= settings <= {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize(
    ("config", "remedy"),
    [
        (APPOConfig(), r"set max_grad_norm in config"),
        (OffPolicyConfig(), "gradients are not clipped"),
    ],
)
def test_the_error_for_gradient_clipping_says_what_the_algorithm_does(config, remedy):
    with pytest.raises(ConfigError, match=rf"Leave out clip_norm \({remedy}\)\.$"):
        check_arguments({"clip_norm": 0.5}, config, type(config))
