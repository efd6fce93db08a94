from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_unilab.errors import ConfigError
from torchrl_unilab.trainers import APPOConfig, OffPolicyConfig
from torchrl_unilab.trainers.configs.settings import (
    Allowed,
    check_settings,
    choice,
    flag,
    integer,
    number,
    text,
    widths,
)

CONFIGS = (APPOConfig, OffPolicyConfig)
FIELDS = [(config, field.name) for config in CONFIGS for field in dataclasses.fields(config)]


@pytest.mark.parametrize(
    ("allowed", "good", "bad", "words"),
    [
        (integer(), [1, 7], [0, -1, 1.0, True, "1", None], "an integer of at least 1"),
        (integer(1, 8), [1, 8], [0, 9], "an integer within [1, 8]"),
        (integer(None), [-3, 0], [0.0, False], "an integer"),
        (integer(0).or_none(), [None, 0], [-1, math.nan], "an integer of at least 0, or None"),
        (number(), [-1, 0.5], [math.nan, math.inf, -math.inf, True, "1"], "a finite number"),
        (number(0), [0, 0.5], [-1e-9], "a finite number of at least 0"),
        (number(0, 1), [0.0, 1], [-0.1, 1.1], "a finite number within [0, 1]"),
        (number(above=0), [1e-9], [0, 0.0, -1.0, None], "a finite number above 0"),
        (choice("a", "b"), ["a", "b"], ["c", None, ["a"]], "'a' or 'b'"),
        (flag(), [True, False], [1, 0, None, "yes"], "True or False"),
        (text(), ["a"], ["", None, 1, ("a",)], "a text"),
        (widths(), [(), (1,), [8, 8]], [(0,), (True,), (8.0,), "8", 8, None], "a tuple of"),
    ],
)
def test_what_is_allowed_is_taken_and_all_else_refused(allowed: Allowed, good, bad, words):
    for value in good:
        check_settings({"name": value}, {"name": allowed})
    for value in bad:
        with pytest.raises(ConfigError) as caught:
            check_settings({"name": value}, {"name": allowed}, "Mend it.")
        assert str(caught.value).startswith(f"name: {value!r} (expected {words}")
        assert str(caught.value).endswith("). Mend it.")


@pytest.mark.parametrize(("config", "name"), FIELDS)
@given(junk=st.sampled_from([object(), {}, b"8", 1j, math.nan, (0,), "\0"]))
def test_every_setting_refuses_what_is_of_no_kind_and_is_named(config, name, junk):
    if junk == "\0" and name.endswith("observation"):
        return  # any text may be a key: the environment knows
    with pytest.raises(ConfigError, match=rf"^{name}: "):
        config(**{name: junk})


@pytest.mark.parametrize(("config", "name"), FIELDS)
def test_no_number_is_a_flag_and_no_flag_a_number(config, name):
    default = getattr(config(), name)
    other = int(default) if isinstance(default, bool) else True
    with pytest.raises(ConfigError, match=rf"^{name}: "):
        config(**{name: other})


@pytest.mark.parametrize("config", CONFIGS)
def test_settings_that_fit_each_other_only_are_taken_together(config):
    if config is APPOConfig:
        config(num_envs=2, num_steps=2, minibatches=4)
        config(lockstep=True, num_collectors=2, slots=2)
    else:
        config(num_envs=1, replay_buffer_n=256, batch_size=256, learning_starts=256)
        config(num_envs=1, replay_buffer_n=256, batch_size=1, learning_starts=-5)
        with pytest.raises(ConfigError, match=r"replay_buffer_n: 255 \(expected at least 256,"):
            config(num_envs=1, replay_buffer_n=255, batch_size=256, learning_starts=0)
