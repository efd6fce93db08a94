"""Arguments: numbers, seconds, names, choices and objects by kind."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

from torchrl_unilab.checks import (
    as_choice,
    as_instance,
    as_integer,
    as_names,
    as_number,
    as_range,
    as_seconds,
)
from torchrl_unilab.errors import ConfigError


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)], ids=repr)
def test_an_integer_is_returned_as_pythons(value):
    assert type(as_integer("count", value, "Change it.")) is int
    assert as_integer("count", value, "Change it.", least=3) == 3


@pytest.mark.parametrize("value", [0, -1, 3.0, np.float64(3), True, "3", None], ids=repr)
def test_what_is_no_integer_or_too_small_is_refused_with_what_is_expected(value):
    message = f"count: {value!r} (expected an integer of at least 1). Change it."
    with pytest.raises(ConfigError, match=re.escape(message)):
        as_integer("count", value, "Change it.")


@pytest.mark.parametrize("value", [9, 2**70])
def test_an_integer_that_is_too_large_is_refused_with_the_largest(value):
    with pytest.raises(ConfigError, match=rf"count: {value} \(expected an integer of 1 to 8\)"):
        as_integer("count", value, "Change it.", most=8)


def test_an_integer_of_more_than_64_bits_is_refused():
    with pytest.raises(ConfigError, match=rf"an integer of 1 to {2**63 - 1}\)"):
        as_integer("count", 2**63, "Change it.")


@pytest.mark.parametrize("value", [0, np.float32(0.5), np.int64(0), torch.tensor(0.5)], ids=repr)
def test_a_number_of_an_interval_is_returned_as_a_float_of_pythons(value):
    assert type(as_number("share", value, "Change it.", "[0, 1)")) is float
    assert as_number("share", value, "Change it.", "[0, 1)") == value


@pytest.mark.parametrize(
    ("interval", "taken", "refused"),
    [
        ("[0, 1)", [0, 0.5], [-1e-9, 1, math.inf]),
        ("(0, 1]", [1e-9, 1], [0, 1.1, -math.inf]),
        ("(0, inf]", [1, math.inf], [0, -1]),
        ("(-inf, inf)", [-1e300, 1e300], [math.inf, -math.inf]),
    ],
)
def test_an_interval_says_which_of_its_ends_it_has(interval, taken, refused):
    for value in taken:
        as_number("share", value, "Change it.", interval)
    for value in refused:
        expected = "a finite number" if "-inf" in interval else f"a number in {interval}"
        message = f"share: {value!r} (expected {expected}). Change it."
        with pytest.raises(ConfigError, match=re.escape(message)):
            as_number("share", value, "Change it.", interval)


@pytest.mark.parametrize(
    "value", [math.nan, True, "3", None, [1.0], np.zeros(2), torch.zeros(2)], ids=repr
)
def test_what_is_no_number_is_refused(value):
    with pytest.raises(ConfigError, match=r"\(expected a finite number\)"):
        as_number("share", value, "Change it.")


@pytest.mark.parametrize("value", [1.0, (1.0,), (1, 2, 3), (2, 1), (0, "1"), "01", (0, math.nan)])
def test_what_are_not_two_numbers_in_order_is_refused(value):
    with pytest.raises(ConfigError, match=r"^bounds: .* \(expected .*\)\. Change them\."):
        as_range("bounds", value, "Change them.")


def test_two_numbers_in_order_are_returned():
    assert as_range("bounds", [1, 1.0], "Change them.", "[0, 1]") == (1.0, 1.0)


@pytest.mark.parametrize("value", ["torso", 5, (1,), None], ids=repr)
def test_what_are_no_names_is_refused_with_the_tuple_that_was_meant(value):
    message = f"objects: {value!r} (expected a tuple of names). Give ({value!r},)."
    with pytest.raises(ConfigError, match=re.escape(message)):
        as_names("objects", value)


@pytest.mark.parametrize("value", [2, 0.5, math.inf, np.float32(3)], ids=repr)
def test_seconds_are_returned_as_a_float_of_pythons(value):
    assert type(as_seconds("timeout", value)) is float
    assert as_seconds("timeout", value) == value
    assert as_seconds("timeout", 0, zero=True) == 0.0


@pytest.mark.parametrize("value", [0, -1, math.nan, True, "3", None], ids=repr)
def test_what_are_no_seconds_is_refused(value):
    message = f"timeout: {value!r} (expected seconds above 0). Use 10.0, for example."
    with pytest.raises(ConfigError, match=re.escape(message)):
        as_seconds("timeout", value)


def test_seconds_below_0_are_refused_where_0_is_taken():
    with pytest.raises(ConfigError, match=r"-1 \(expected seconds of at least 0\)"):
        as_seconds("timeout", -1, zero=True)


def test_one_of_several_values_is_returned():
    assert as_choice("how", "b", ("a", "b", "c"), "Change it.") == "b"


@pytest.mark.parametrize("value", ["d", None, ["a"]], ids=repr)
def test_another_value_is_refused_with_those_that_are_known(value):
    message = f"how: {value!r} (expected 'a', 'b' or 'c'). Change it."
    with pytest.raises(ConfigError, match=re.escape(message)):
        as_choice("how", value, ("a", "b", "c"), "Change it.")


NONE = "none: there are none to choose from"


@pytest.mark.parametrize(("choices", "expected"), [(["a"], "'a'"), ([], NONE)])
def test_a_value_is_refused_though_there_is_one_choice_or_none(choices, expected):
    with pytest.raises(ConfigError, match=rf"^how: 'd' \(expected {expected}\)\. Change it\.$"):
        as_choice("how", "d", choices, "Change it.")


def test_an_object_of_a_kind_is_returned():
    assert as_instance("workers", True, int, "Use 1.") is True


@pytest.mark.parametrize(
    ("value", "found"), [("two", "str"), (None, "NoneType"), (int, "the class int")]
)
def test_another_object_is_refused_with_its_type_and_a_class_with_its_name(value, found):
    with pytest.raises(ConfigError, match=rf"^workers: {found} \(expected int\)\. Use 1\.$"):
        as_instance("workers", value, int, "Use 1.")
