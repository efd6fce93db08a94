from __future__ import annotations

import pytest

from torchrl_unilab.configs.off_policy import ALGORITHM_TASKS, OFF_POLICY_TASKS, OffPolicyConfig
from torchrl_unilab.errors import ConfigError


def test_a_task_may_have_other_settings_for_one_algorithm():
    td3 = OffPolicyConfig.for_task("Hopper-v5", "td3")
    sac = OffPolicyConfig.for_task("Hopper-v5", "sac")
    own = ALGORITHM_TASKS["td3", "Hopper-v5"]
    assert {name: getattr(td3, name) for name in own} == own
    assert all(getattr(sac, name) != value for name, value in own.items())
    shared = OFF_POLICY_TASKS["Hopper-v5"].keys() - own.keys()
    assert all(getattr(td3, name) == getattr(sac, name) for name in shared)


def test_what_is_asked_for_overrides_all():
    assert OffPolicyConfig.for_task("Hopper-v5", "td3", batch_size=64).batch_size == 64


@pytest.mark.parametrize(
    ("anneal", "progress", "share"),
    [
        (0.0, 0.75, 1.0),
        (0.5, 0.25, 1.0),
        (0.5, 0.75, 0.5),
        (0.5, 1.25, 0.0),  # a run may end with more frames than were asked for
    ],
)
def test_rates_fall_to_0_in_the_last_share_of_the_run(anneal, progress, share):
    assert OffPolicyConfig(anneal=anneal).lr_share(progress) == share


@pytest.mark.parametrize(
    ("settings", "frames"),
    [({"learning_starts": 3}, 12), ({"init_random": False}, 0), ({"learning_starts": -1}, 0)],
)
def test_actions_are_random_until_learning_starts_in_each_environment(settings, frames):
    config = OffPolicyConfig(num_envs=2, num_collectors=2, **settings)
    assert config.init_random_frames == frames


def test_sizes_count_the_environments_of_all_collectors():
    sizes = {"num_envs": 2, "num_collectors": 3, "env_steps_per_sync": 5, "replay_buffer_n": 70}
    config = OffPolicyConfig(learning_starts=50, batch_size=1, **sizes)
    assert (config.capacity, config.min_frames, config.frames_per_tick) == (420, 300, 30)


def test_a_thread_looks_for_samples_only_in_runs_that_need_not_be_repeatable():
    with pytest.raises(ConfigError, match="prefetch: True with sync_collection"):
        OffPolicyConfig(prefetch=True, sync_collection=True)
