from __future__ import annotations

import numpy as np
import pytest

from tests.benchmarks.bootstrap import bootstrap_interval, interquartile_mean


@pytest.mark.parametrize(
    ("scores", "mean"),
    [
        ([7.0], 7.0),
        ([1.0, 2.0, 6.0], 3.0),
        ([1000.0, 10.0, 12.0, 11.0, 0.0], 11.0),
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 60.0, 70.0], 3.5),
    ],
)
def test_the_interquartile_mean_leaves_out_a_quarter_at_each_end_rounded_down(scores, mean):
    assert interquartile_mean(np.array(scores)) == mean


def test_the_interquartile_mean_is_over_the_last_axis():
    assert interquartile_mean(np.array([[1.0, 3.0], [5.0, 7.0]])).tolist() == [2.0, 6.0]


def test_runs_that_agree_have_no_interval():
    assert bootstrap_interval([np.full(5, 3.0)]) == (3.0, 3.0)


# Two runs, 0 and 1: a quarter of the resamples has mean 0, a half 0.5, a quarter 1.
@pytest.mark.parametrize(("level", "interval"), [(0.95, (0.0, 1.0)), (0.4, (0.5, 0.5))])
def test_the_interval_has_the_percentiles_of_the_resampled_means(level, interval):
    assert bootstrap_interval([np.array([0.0, 1.0])], level=level) == interval


def test_each_task_is_resampled_apart():
    assert bootstrap_interval([np.zeros(4), np.ones(4)]) == (0.5, 0.5)
