"""APPO's settings: how rate and noise fall."""

import math

import pytest

from torchrl_unilab.configs.appo import APPOConfig
from torchrl_unilab.errors import ConfigError


@pytest.mark.parametrize(
    ("anneal", "progress", "share"),
    [
        (0.0, 0.9, 1.0),
        (1.0, 0.0, 1.0),
        (1.0, 0.75, 0.25),
        (0.5, 0.5, 1.0),
        (0.5, 0.75, 0.5),
        (1.0, 1.25, 0.0),  # a run may end with more frames than were asked for
    ],
)
def test_the_highest_rate_falls_to_0_in_the_last_share_of_the_run(anneal, progress, share):
    config = APPOConfig(lr=1e-3, anneal=anneal)
    assert config.highest_lr(progress) == pytest.approx(1e-3 * share)


@pytest.mark.parametrize(
    ("anneal", "progress", "bound"),
    [(0.0, 0.5, -2.0), (1.0, 0.5, -2.0), (0.2, 0.8, -1.0), (0.2, 0.9, -2.0), (0.2, 1.0, -3.0)],
)
def test_the_bound_of_the_deviation_falls_while_the_rate_does(anneal, progress, bound):
    config = APPOConfig(log_std=-1.0, final_log_std=-3.0, anneal=anneal)
    assert config.highest_log_std(progress) == pytest.approx(bound)


def test_without_a_last_deviation_there_is_no_bound():
    assert APPOConfig().highest_log_std(0.5) == math.inf


@pytest.mark.parametrize(
    ("progress", "horizon"), [(-0.1, 100), (0.0, 100), (0.5, 200), (1.0, 400), (1.1, 400)]
)
def test_the_horizon_of_the_discount_grows_by_one_factor_in_equal_shares_of_the_run(
    progress, horizon
):
    config = APPOConfig(gamma=0.99, final_gamma=0.9975)
    assert 1 / (1 - config.discount(progress)) == pytest.approx(horizon)


def test_without_a_last_discount_it_stays():
    assert APPOConfig(gamma=0.97).discount(0.7) == 0.97


@pytest.mark.parametrize(("gamma", "last"), [(0.99, 1.0), (1.0, 0.99)])
def test_an_infinite_horizon_grows_from_or_to_none(gamma, last):
    with pytest.raises(ConfigError, match=r"final_gamma: .* \(expected both below 1"):
        APPOConfig(gamma=gamma, final_gamma=last)
