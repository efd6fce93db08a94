from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torchrl_unilab.configs import SETTINGS, APPOConfig, OffPolicyConfig, RunConfig
from torchrl_unilab.configs.algorithms import run_settings, split_settings
from torchrl_unilab.configs.file import as_yaml, read_config
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.trainers.runs.builders import ALGORITHMS

RUN = RunConfig("Hopper-v5", 1000, seed=3, max_seconds=1e-5)
CONFIGS = [
    APPOConfig.for_task("Hopper-v5", hidden=(8,), lr=1e-5),
    OffPolicyConfig.for_task("Hopper-v5", "td3", hidden=()),
]


def _read(directory: Path, text: str) -> dict[str, Any]:
    """Read a file of that text."""
    (file := directory / "config.yaml").write_text(text)
    return read_config(file)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.algorithm)
def test_what_is_written_is_read_as_the_same_settings(config, tmp_path):
    read = _read(tmp_path, as_yaml(run_settings(RUN, config)))
    assert [*read.items()] == [*run_settings(RUN, config).items()]
    run, settings = split_settings(read, config.algorithm)
    assert RunConfig(**run) == RUN
    assert SETTINGS[config.algorithm].for_task("Hopper-v5", **settings) == config


TEXTS = ["", "[1]", "a: [", "nothing", "a: !!int abc", "a: !!timestamp abc", "a: " + 5000 * "["]
VALUES = ["env: 5", "env:", "frames: 1e-6", "frames: 1.0e+3", "frames:", "seed: x"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_file_without_settings_is_refused(text, tmp_path):
    with pytest.raises(ConfigError, match=r"config\.yaml: cannot be read.*expected the settings"):
        _read(tmp_path, text)


@pytest.mark.parametrize("text", VALUES)
def test_a_value_that_is_none_of_its_kind_is_refused_by_name(text, tmp_path):
    name = text.partition(":")[0]
    with pytest.raises(ConfigError, match=rf"config\.yaml: {name} is .* \(expected (int|str)\)\."):
        _read(tmp_path, text)


def test_a_setting_that_is_there_twice_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.yaml: cannot be read, 'seed' is there twice"):
        _read(tmp_path, "seed: 1\nlr: 0.1\nseed: 2\n")


def test_numbers_with_an_exponent_are_read_as_those_of_flags(tmp_path):
    text = "env: 1e6x\nframes: 1e6\nlr: 1e-3\ngamma: 1.0e+0\nentropy_coeff: -2.5e-1\n"
    assert (read := _read(tmp_path, text)) == {
        "env": "1e6x",
        "frames": 1_000_000,
        "lr": 0.001,
        "gamma": 1.0,
        "entropy_coeff": -0.25,
    }
    assert isinstance(read["frames"], int)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.yaml: cannot be read, No such file"):
        read_config(tmp_path / "nothing.yaml")


def test_settings_of_another_algorithm_are_refused():
    with pytest.raises(ConfigError, match=r"algo: 'appo' \(expected 'sac'\)"):
        split_settings(run_settings(RUN, CONFIGS[0]), "sac")
    with pytest.raises(ConfigError, match=r"algo: None \(expected 'sac'\)"):
        split_settings({}, "sac")


def test_an_unknown_setting_names_the_nearest():
    for name in ("epoch", "frame"):
        with pytest.raises(ConfigError, match=rf"{name}: unknown .*Did you mean {name}s\?"):
            split_settings({"algo": "appo", name: 3}, "appo")


def test_the_algorithm_has_one_name():
    with pytest.raises(ConfigError, match="algorithm: unknown"):
        split_settings({"algo": "td3", "algorithm": "sac"}, "td3")


def test_an_unknown_setting_like_no_other_names_none():
    with pytest.raises(ConfigError) as refused:
        split_settings({"algo": "appo", "zzzzz": 3}, "appo")
    message = (
        "zzzzz: unknown (expected a setting of appo). Correct the name, or remove the setting."
    )
    assert str(refused.value) == message


def test_each_algorithm_has_settings_and_parts():
    assert SETTINGS.keys() == ALGORITHMS.keys()
