"""Interquartile mean and stratified bootstrap intervals of a few runs' scores.

The method of Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical
Precipice" (2021), https://arxiv.org/abs/2108.13264: the mean of the middle half of all runs, and
percentiles of that mean over resamples that draw each task's runs from that task alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]


def interquartile_mean(scores: Scores) -> Scores:
    """Return the mean over the last axis without its lowest and its highest quarter.

    Where a quarter is no whole number, it is rounded down: of five scores the middle three count.
    """
    count = scores.shape[-1]
    cut = count // 4
    return np.sort(scores, axis=-1)[..., cut : count - cut].mean(axis=-1)


def bootstrap_interval(
    strata: Sequence[Scores], *, level: float = 0.95, resamples: int = 20_000, seed: int = 0
) -> tuple[float, float]:
    """Return the percentile interval of the interquartile mean over all scores.

    Args:
        strata: The scores of each task's runs, drawn from apart.
        level: Share of the resamples within the interval.
        resamples: How often all runs are drawn, with replacement.
        seed: Seed of the draws.
    """
    rng = np.random.default_rng(seed)
    drawn = [scores[rng.integers(len(scores), size=(resamples, len(scores)))] for scores in strata]
    means = interquartile_mean(np.concatenate(drawn, axis=1))
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
