"""Integers as arguments."""

from __future__ import annotations

import re

import numpy as np
import pytest

from torchrl_unilab.errors import ConfigError
from torchrl_unilab.integers import as_integer


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)], ids=repr)
def test_an_integer_is_returned_as_pythons(value):
    assert type(as_integer("count", value, "Change it.")) is int
    assert as_integer("count", value, "Change it.", least=3) == 3


@pytest.mark.parametrize("value", [2, -1, 3.0, np.float64(3), True, "3", None], ids=repr)
def test_what_is_no_integer_or_too_small_is_refused_with_what_is_expected(value):
    message = f"count: {value!r} (expected an integer of at least 3). Change it."
    with pytest.raises(ConfigError, match=re.escape(message)):
        as_integer("count", value, "Change it.", least=3)
