from __future__ import annotations

import copy
import math
import warnings
from collections import Counter
from collections.abc import Sequence
from unittest.mock import Mock

import pytest
import torch
from tensordict import TensorDict

from torchrl_unilab.collectors.metrics import CollectorMetrics
from torchrl_unilab.errors import ConfigError, LayoutKeyError
from torchrl_unilab.trainers import EpisodeReturns, LogPolicyLag
from torchrl_unilab.trainers.reports import KEPT, CollectorReport, register_reports
from torchrl_unilab.weight_update import UniLabShmScheme


def _batch(ids, rewards, done) -> TensorDict:
    shape = [len(ids), len(ids[0])]
    return TensorDict(
        {
            "collector": {"traj_ids": torch.tensor(ids)},
            "next": {
                "reward": torch.tensor(rewards, dtype=torch.float32).unsqueeze(-1),
                "done": torch.tensor(done).unsqueeze(-1),
            },
        },
        batch_size=shape,
    )


@pytest.mark.parametrize("count", [0, -1, 2.0, True])
def test_counts_of_episodes_and_of_batches_are_positive_integers(count):
    with pytest.raises(ConfigError, match="window"):
        EpisodeReturns(window=count)
    with pytest.raises(ConfigError, match="patience"):
        LogPolicyLag(UniLabShmScheme(), patience=count)


def test_returns_are_summed_over_batches_by_trajectory():
    returns = EpisodeReturns()
    returns(_batch([[0, 0], [1, 1]], [[1, 2], [10, 20]], [[False, False], [False, True]]))
    assert list(returns.finished) == [30.0]
    returns(_batch([[2, 2], [0, 0]], [[5, 5], [3, 4]], [[False, False], [False, True]]))
    assert list(returns.finished) == [30.0, 10.0]
    assert list(returns.lengths) == [2, 4]
    assert returns.mean == 20.0


def test_a_return_is_the_sum_over_agents():
    batch = _batch([[0, 0], [1, 1]], [[1, 2], [10, 20]], [[False, True], [False, True]])
    of_agents = batch["next", "reward"].unsqueeze(-2) * torch.tensor([[0.25], [0.75]])
    returns = EpisodeReturns()
    returns(batch.set(("next", "reward"), of_agents))
    assert list(returns.finished) == [3.0, 30.0]


def test_batches_without_trajectory_ids_are_refused():
    with pytest.raises(LayoutKeyError, match=r"no \('collector', 'traj_ids'\) .*track_traj_ids"):
        EpisodeReturns()(_batch([[0]], [[1]], [[True]]).exclude(("collector", "traj_ids")))


def test_batches_without_the_reward_are_refused_by_its_key():
    with pytest.raises(LayoutKeyError, match=r"no 'gain' among \['done', 'reward'\] .*set_keys"):
        EpisodeReturns(reward="gain")(_batch([[0]], [[1]], [[True]]))


def test_two_episodes_of_one_environment_in_one_batch_are_distinct():
    returns = EpisodeReturns()
    returns(_batch([[0, 0, 1]], [[1, 2, 4]], [[False, True, True]]))
    assert sorted(returns.finished) == [3.0, 4.0]


def test_the_mean_is_over_the_last_episodes_only():
    returns = EpisodeReturns(window=2)
    for i, reward in enumerate([1, 2, 3]):
        returns(_batch([[i]], [[reward]], [[True]]))
    assert returns.mean == 2.5


def test_a_curve_begins_with_the_first_return_and_goes_with_the_trainers_frames():
    curve, trainer = EpisodeReturns(window=1), Mock()
    curve.register(trainer)
    curve.start()
    for frames, reward, done in [(10, 0.0, False), (20, 1.0, True), (30, 3.0, True)]:
        trainer.collected_frames = frames
        logged = curve(_batch([[frames]], [[reward]], [[done]]))
    assert [(frames, value) for _, frames, value in curve.curve] == [(20, 1.0), (30, 3.0)]
    assert curve.mean == logged["return"] == 3.0
    assert logged["fps"] == pytest.approx(30 / curve.seconds)
    assert curve.curve[-1][0] == curve.seconds > curve.curve[0][0]


def test_return_rate_and_lag_are_for_the_progress_bar_and_the_rest_is_logged_alone():
    curve, trainer = EpisodeReturns(), Mock(collected_frames=1)
    curve.register(trainer)
    shown = curve.log(_batch([[0]], [[3.0]], [[True]]))
    assert (shown["return"], shown["log_pbar"]) == (3.0, True)
    assert shown.keys() == {"return", "fps", "log_pbar"}
    trainer._log.assert_called_once_with(episode_length=1.0)
    lag = LogPolicyLag(Mock(version=7, applied_versions={0: 5}))
    lag.register(trainer)
    assert lag.log(None) == {"policy_lag": 2.0, "log_pbar": True}


class _Reporting:
    """What the report reads of a collector."""

    episodes = 0

    def status(self) -> dict[str, float]:
        return {"ring_occupancy": 0.25, "dropped": 3, "stale": 2}

    def metrics(self) -> CollectorMetrics:
        seconds = {"physics": 2.0, "policy": 4.0, "write": 0.5, "wait": 0.0}
        values = {"forward": 0.5, "new": math.nan}  # of which no worker has told yet
        return CollectorMetrics(8, self.episodes, 5.0, 7.0, 0.25, 0.75, seconds, values)


def test_a_report_says_what_the_workers_tell_and_returns_once_there_are_some():
    collector = _Reporting()
    report = CollectorReport(collector)
    logged = report(TensorDict())
    assert logged["ring_occupancy"] == 0.25
    assert (logged["dropped"], logged["stale"]) == (3, 2)
    assert (logged["fps_physics"], logged["fps_write"]) == (4.0, 16.0)
    assert logged["forward"] == 0.5
    assert not {"return", "new"} & {*logged}
    assert report.curve == []
    collector.episodes = 1
    logged = report(TensorDict())
    assert (logged["return"], logged["episode_length"]) == (5.0, 7.0)
    assert (logged["timeout_rate"], logged["termination_rate"]) == (0.25, 0.75)
    assert report.mean == 5.0
    assert report.last.items() <= logged.items()


class _Versions:
    """What the hook reads of a scheme."""

    version = 0
    applied_versions: dict[int, int]


def _lags(lags: list[int]) -> list[float]:
    scheme = _Versions()
    hook = LogPolicyLag(scheme, patience=3)
    seen = []
    for lag in lags:
        scheme.version = 100
        scheme.applied_versions = {0: 100, 1: 100 - lag, 2: None}
        seen.append(hook(TensorDict())["policy_lag"])
    return seen


def test_the_lag_is_that_of_the_worker_furthest_behind():
    assert _lags([0, 2, 1]) == [0.0, 2.0, 1.0]


def test_there_is_no_lag_before_a_worker_has_weights():
    scheme = _Versions()
    scheme.version, scheme.applied_versions = 7, {0: None}
    assert LogPolicyLag(scheme).of(None) == 0.0


def test_the_lag_is_that_of_the_samples_where_they_carry_their_version():
    scheme = _Versions()
    scheme.version = 7
    versions = torch.tensor([[4], [5], [6], [6]])
    lag = LogPolicyLag(scheme)
    assert lag(TensorDict({"next": {"policy_version": versions}}, [4]))["policy_lag"] == 1.75
    assert lag.histogram == {2: 1}


def _logged(lags: Sequence[int]) -> list[dict[str, float]]:
    """What is logged of batches so far behind."""
    scheme = _Versions()
    hook = LogPolicyLag(scheme, patience=10**9)
    logged = []
    for lag in lags:
        scheme.version = lag
        batch = TensorDict({"next": {"policy_version": torch.zeros(4, dtype=torch.int64)}}, [4])
        logged.append(hook(batch))
    assert hook.histogram == Counter(lags)
    return logged


def test_shares_count_how_far_behind_the_batches_were():
    *_, logged = _logged([1, 2, 3, 4, 7, 8, 15, 16, 10**6, 0])
    assert logged == {
        "policy_lag": 0.0,
        "policy_version": 0,
        "policy_lag_max": 10**6,
        "policy_lag_0": 0.1,
        "policy_lag_1": 0.1,
        "policy_lag_2_3": 0.2,
        "policy_lag_4_7": 0.2,
        "policy_lag_8_15": 0.2,
        "policy_lag_16_up": 0.2,
    }


def test_a_lag_that_only_grows_is_warned_of_once():
    with pytest.warns(UserWarning, match="policy lag only grows: 3 versions") as caught:
        _lags([0, 1, 2, 3, 4, 5])
    assert len(caught) == 1


def test_a_lag_that_comes_and_goes_is_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _lags([0, 1, 2, 1, 2, 3, 3, 4])


def test_a_restored_curve_continues_with_its_points_its_clock_and_open_episodes():
    hook, restored = EpisodeReturns(window=2), EpisodeReturns(window=2)
    hook.start()
    hook(_batch([[0, 0], [1, 1]], [[1, 2], [5, 6]], [[False, True], [False, False]]))
    restored.load_state_dict(copy.deepcopy(hook.state_dict()))
    assert restored.curve == hook.curve
    assert (restored.mean, restored.seconds) == (3.0, hook.seconds)
    restored.start()
    more = _batch([[1]], [[4]], [[True]])
    assert restored(more)["return"] == hook(more)["return"] == (3.0 + 15.0) / 2
    assert restored(more)["episode_length"] == hook(more)["episode_length"]
    assert restored.seconds > restored.curve[0][0]
    assert len(restored.curve) == 3
    assert isinstance(restored.curve[0][1], int)
    assert (restored.finished, restored.lengths) == (hook.finished, hook.lengths)


def test_a_restored_lag_counts_on():
    scheme = UniLabShmScheme()
    hook, restored = LogPolicyLag(scheme), LogPolicyLag(scheme)
    hook.histogram.update({0: 3, 2: 1})
    hook._last, hook._grown = 2.0, 7
    restored.load_state_dict(hook.state_dict())
    assert restored.histogram == {0: 3, 2: 1}
    assert restored.state_dict() == hook.state_dict()
    restored.histogram.update([5])
    assert hook.histogram.total() == 4


def test_a_trainer_keeps_the_last_of_what_it_logs_and_not_all():
    trainer = Mock()
    register_reports(trainer, collector=None, scheme=None)
    for i in range(3 * KEPT):
        trainer._log_dict["value"].append(i)
    assert list(trainer._log_dict["value"]) == list(range(2 * KEPT, 3 * KEPT))
