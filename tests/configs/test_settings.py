from __future__ import annotations

import argparse
import dataclasses
import math
import re
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_unilab.cli import _parser, main
from torchrl_unilab.configs.flags import given as given_of
from torchrl_unilab.configs.run import RunConfig
from torchrl_unilab.configs.settings import (
    REQUIRED,
    Count,
    Device,
    Fraction,
    Kind,
    LoggerNames,
    Natural,
    NonNegative,
    Positive,
    Text,
    Widths,
    nearest,
)
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.trainers import APPOConfig, OffPolicyConfig

CONFIGS = (APPOConfig, OffPolicyConfig, RunConfig)
FIELDS = [(config, field) for config in CONFIGS for field in dataclasses.fields(config)]
every_field = pytest.mark.parametrize(
    ("config", "field"), FIELDS, ids=lambda value: getattr(value, "name", None)
)


def _build(config: type, **settings: object) -> object:
    required = {"env": "Hopper-v5", "frames": 1000} if config is RunConfig else {}
    return config(**{**required, **settings})


KINDS = [
    (Count, [1, 7], [0, -1, 1.0, True, "1", None], "an integer of at least 1"),
    (int, [-3, 0], [0.0, False], "an integer"),
    (Natural | None, [None, 0], [-1, math.nan], "None or an integer of at least 0"),
    (float, [-1, 0.5], [math.nan, math.inf, -math.inf, True, "1"], "a finite number"),
    (NonNegative, [0, 0.5], [-1e-9], "a finite number of at least 0"),
    (Fraction, [0.0, 1], [-0.1, 1.1], "a finite number within [0, 1]"),
    (Positive, [1e-9], [0, 0.0, -1.0, None], "a finite number above 0"),
    (Literal["a", "b"], ["a", "b"], ["c", None, ["a"]], "'a' or 'b'"),
    (
        LoggerNames,
        ["csv", "wandb,csv"],
        ["", "c", "csv,c", "csv,csv", "csv, wandb", None, ("csv",)],
        "some of csv, tensorboard, wandb, mlflow, trackio, with commas between",
    ),
    (bool, [True, False], [1, 0, None, "yes"], "True or False"),
    (
        Device,
        ["cpu", "cuda", "cuda:1", "cuda:12"],
        ["gpu", "cuda:", "cuda:x", "cpu\n", 0],
        "cpu, cuda or",
    ),
    (Text, ["a"], ["", None, 1, ("a",)], "a text"),
    (Widths, [(), (1,), [8, 8]], [(0,), (True,), (8.0,), "8", 8, None], "a tuple of integers of"),
]
each_kind = pytest.mark.parametrize(
    ("hint", "good", "bad", "words"), KINDS, ids=[case[3] for case in KINDS]
)


@each_kind
def test_a_kind_accepts_its_values(hint, good, bad, words):
    for value in good:
        Kind(hint).check("name", value)


@each_kind
def test_a_refused_value_is_named_with_what_is_expected(hint, good, bad, words):
    for value in bad:
        with pytest.raises(ConfigError) as caught:
            Kind(hint).check("name", value, "Mend it.")
        assert str(caught.value).startswith(f"name: {value!r} (expected {words}")
        assert str(caught.value).endswith("). Mend it.")


@every_field
@given(junk=st.sampled_from([object(), {}, b"8", 1j, math.nan, (0,), "\0"]))
def test_every_setting_refuses_a_value_of_another_type(config, field, junk):
    if junk == "\0" and field.type == "Text":
        return  # any text may be a key or a task
    with pytest.raises(ConfigError, match=rf"^{field.name}: "):
        _build(config, **{field.name: junk})


@every_field
def test_no_number_is_a_flag_and_no_flag_a_number(config, field):
    other = 1 if field.type == "bool" else True
    with pytest.raises(ConfigError, match=rf"^{field.name}: "):
        _build(config, **{field.name: other})


SHARES = ("gamma", "final_gamma", "lambda_", "tau", "noise_correlation", "anneal")
POSITIVE = ("lr", "lr_actor", "lr_critic", "lr_alpha", "alpha", "desired_kl", "max_grad_norm")
POSITIVE += ("reward_scale", "value_clip", "max_seconds", "rho_bar")
NON_NEGATIVE = ("clip_epsilon", "critic_coeff", "c_bar", "target_noise")
NON_NEGATIVE += ("target_noise_clip", "noise_std_min", "noise_std_max", "max_policy_lag", "seed")
FREE = ("log_std", "final_log_std", "entropy_coeff", "stop_at", "learning_starts")


@every_field
def test_each_number_has_the_bounds_of_what_it_stands_for(config, field):
    """Counts are at least 1; what is none of a count, a share or a strength is listed above."""
    kind, name = config.kinds()[field.name], field.name
    words = str(kind).removeprefix("None or ")
    if not words.startswith(("an integer", "a finite number")):
        return
    if name in SHARES:
        outside, inside = (-0.01, 1.01), (0.0, 0.5)
    elif name in POSITIVE:
        outside, inside = (0.0, -1.0), (1e-9, 1e9)
    elif name in NON_NEGATIVE or name == "restart_workers":
        outside, inside = (-1,), (0, 1)
    elif name in FREE:
        outside, inside = (), (-3, 3)
    else:
        outside, inside = (0, -1), (1,)
    for value in inside:
        kind.check(name, value)
    for value in outside:
        with pytest.raises(ConfigError):
            kind.check(name, value)


def test_of_many_names_that_begin_alike_three_are_suggested():
    assert nearest("a", ["ab", "b", "ac", "ad", "ae"]) == " Did you mean ab or ac or ad?"


def test_of_names_that_are_only_similar_the_most_similar_is_suggested():
    assert nearest("abcx", ["abce", "abcdx"]) == " Did you mean abcdx?"


def test_a_setting_without_a_default_says_what_to_set():
    with pytest.raises(ConfigError, match=r"env: '' .* Set the task, for example .*\.$"):
        RunConfig("", 1000)


def test_a_run_without_settings_of_its_algorithm_has_those_of_the_task():
    run, config = RunConfig.given(APPOConfig, None, "Hopper-v5", 1000, 3, stop_at=5.0)
    assert run == RunConfig("Hopper-v5", 1000, seed=3, stop_at=5.0)
    assert config == APPOConfig.for_task("Hopper-v5") != APPOConfig()


def test_the_pool_the_threads_the_seed_and_correlations_have_an_end():
    APPOConfig(pool=8)
    RunConfig("Hopper-v5", 1, seed=2**32 - 1)
    of_appo = [
        (APPOConfig, {name: value})
        for name, value in (("pool", 9), ("physics_threads", 1025), ("noise_correlation", 0.9995))
    ]
    of_others = [(OffPolicyConfig, {"learner_threads": 1025}), (RunConfig, {"seed": 2**32})]
    for config, settings in (*of_appo, *of_others):
        with pytest.raises(ConfigError, match=r"within \["):
            _build(config, **settings)


@pytest.mark.parametrize(("letters", "shown"), [(98, f"'{98 * 'x'}'"), (99, f"'{99 * 'x'}...")])
def test_of_a_refused_value_100_characters_are_shown(letters, shown):
    with pytest.raises(ConfigError, match=rf"epochs: {re.escape(shown)} \(expected an integer"):
        Kind(Count).check("epochs", letters * "x")


def test_a_refused_setting_names_its_default():
    with pytest.raises(ConfigError, match=r"epochs: 0 .* Leave it out for the default\.$"):
        APPOConfig(epochs=0)


def test_numbers_of_numpy_are_taken_as_pythons():
    config = APPOConfig(num_envs=np.int64(4), lr=np.float32(0.5), hidden=(np.int64(8), 8))
    assert config == APPOConfig(num_envs=4, lr=0.5, hidden=(8, 8))
    values = (config.num_envs, config.lr, *config.hidden)
    assert [type(value) for value in values] == [int, float, int, int]
    for bad in (np.float64(4.0), np.int64(0), np.bool_(True), np.array([4])):
        with pytest.raises(ConfigError, match=r"num_envs: .*expected an integer of at least 1"):
            APPOConfig(num_envs=bad)


# Settings that depend on each other


def test_a_rollout_has_a_frame_for_each_minibatch():
    APPOConfig(num_envs=2, num_steps=2, minibatches=4)
    with pytest.raises(ConfigError, match=r"minibatches: 5 \(expected an integer of 1 to 4\)"):
        APPOConfig(num_envs=2, num_steps=2, minibatches=5)


def test_collectors_are_not_replaced_in_lockstep():
    with pytest.raises(ConfigError, match="restart_workers: 1 with lockstep"):
        APPOConfig(restart_workers=1, lockstep=True)
    with pytest.raises(ConfigError, match="restart_workers: 2 with sync_collection"):
        OffPolicyConfig("sac", restart_workers=2, sync_collection=True)


def test_lockstep_needs_a_slot_for_each_collector():
    APPOConfig(lockstep=True, num_collectors=2, slots=2)
    APPOConfig(num_collectors=2, slots=1)
    with pytest.raises(ConfigError, match=r"slots in lock-step: 1 \(expected"):
        APPOConfig(lockstep=True, num_collectors=2, slots=1)


@pytest.mark.parametrize(
    ("envs", "batch_size", "learning_starts", "rows"),
    [(1, 256, 256, 256), (1, 1, -5, 1), (1, 256, 0, 256), (3, 256, 0, 86)],
)
def test_the_replay_holds_what_the_first_update_needs(envs, batch_size, learning_starts, rows):
    sizes = {"num_envs": envs, "batch_size": batch_size, "learning_starts": learning_starts}
    OffPolicyConfig(replay_buffer_n=rows, **sizes)
    if rows > 1:
        with pytest.raises(ConfigError, match=rf"replay_buffer_n: .* \(expected at least {rows},"):
            OffPolicyConfig(replay_buffer_n=rows - 1, **sizes)


def test_the_lowest_noise_is_at_most_the_highest():
    with pytest.raises(ConfigError, match=r"noise_std_min: 0.5 \(expected at most"):
        OffPolicyConfig(noise_std_min=0.5)


def test_a_checkpoint_is_written_each_quarter_of_a_run():
    assert [RunConfig("Hopper-v5", frames).interval for frames in (1, 1000)] == [1, 250]
    assert RunConfig("Hopper-v5", 1000, checkpoint_interval=7).interval == 7


# The command line


@pytest.fixture(scope="module")
def parsers() -> dict[tuple[str, str], argparse.ArgumentParser]:
    """The parser of each command and algorithm."""

    def commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
        (action,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        return action.choices

    return {
        (command, algorithm): leaf
        for command, parser in commands(_parser()).items()
        if command in ("train", "budget")
        for algorithm, leaf in commands(parser).items()
    }


@pytest.mark.parametrize("algorithm", ["appo", "sac", "td3"])
def test_each_setting_is_a_flag_whose_help_says_meaning_and_default(parsers, algorithm):
    kinds = (APPOConfig if algorithm == "appo" else OffPolicyConfig, RunConfig)
    shown = " ".join(parsers["train", algorithm].format_help().split()).replace("- ", "-")
    assert "MISSING" not in shown  # the default of a setting that has none
    for field in (field for kind in kinds for field in dataclasses.fields(kind)):
        if field.name in ("algorithm", "progress_bar"):  # the command itself, and --progress
            assert f"--{field.name.replace('_', '-')}" not in shown
            continue
        if field.metadata["of"] not in (None, algorithm):
            assert f" --{field.name.replace('_', '-')} " not in shown
            continue
        assert f" --{field.name.rstrip('_').replace('_', '-')}" in shown
        assert field.metadata["help"].replace("- ", "-") in shown
        assert field.default is REQUIRED or "default: " in shown


def test_the_help_shows_the_defaults_of_the_algorithm(parsers):
    shown = " ".join(parsers["train", "td3"].format_help().split())
    assert "critic updates per update of the policy; an integer of at least 1 (default: 2)" in shown


def test_the_help_shows_the_defaults_of_a_task(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["train", "appo", "--env", "Swimmer-v5", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "The defaults are those of Swimmer-v5." in shown
    assert "discount per step; a finite number within [0, 1] (default: 0.998)" in shown


def test_given_flags_are_parsed_by_the_type_of_the_setting(parsers):
    given = "--hidden 8 4 --lr 1e-4 --lambda 0.5 --no-fused --overflow overwrite --env x --frames 9"
    options = parsers["train", "appo"].parse_args([*given.split(), "--run-dir", "runs"])
    assert (options.hidden, options.lr, options.lambda_) == ([8, 4], 1e-4, 0.5)
    assert given_of(options, APPOConfig)["hidden"] == (8, 4)
    assert (options.fused, options.overflow, options.frames) == (False, "overwrite", 9)


def test_counts_may_be_written_as_powers_of_ten(parsers):
    given = "--frames 1e6 --eval-interval 2.5e4 --keep-checkpoints 9_007_199_254_740_993"
    options = parsers["train", "appo"].parse_args(given.split())
    assert (options.frames, options.eval_interval) == (1_000_000, 25_000)
    assert isinstance(options.frames, int)
    assert options.keep_checkpoints == 2**53 + 1  # what is an integer already keeps each digit


def test_a_flag_takes_back_what_the_configuration_of_a_run_says_of_its_progress(parsers):
    for flags, shown in (("--progress", True), ("--no-progress", False), ("", None)):
        assert parsers["train", "td3"].parse_args(flags.split()).progress_bar is shown


def test_none_is_a_value_in_any_case_where_a_setting_takes_it_and_else_a_text(parsers):
    options = parsers["train", "appo"].parse_args(
        ["--final-gamma", "none", "--observation", "none"]
    )
    values = given_of(options, APPOConfig)
    assert values == {"final_gamma": None, "observation": "none"}


def test_flags_that_are_not_given_leave_the_defaults_to_the_task(parsers):
    options = vars(parsers["train", "sac"].parse_args(["--run-dir", "runs"]))
    for kind in (OffPolicyConfig, RunConfig):
        fields = [f for f in dataclasses.fields(kind) if f.metadata["of"] in (None, "sac")]
        names = {field.name for field in fields} - {"algorithm"}
        assert {options[name] for name in names} == {None}


@pytest.mark.parametrize("kind", [APPOConfig, OffPolicyConfig])
def test_an_unknown_override_names_the_nearest_setting(kind):
    with pytest.raises(TypeError, match=r"'num_env' .* Did you mean num_envs\?"):
        kind.for_task("Hopper-v5", num_env=3)
