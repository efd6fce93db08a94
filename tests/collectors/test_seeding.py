from __future__ import annotations

import sys
from unittest.mock import Mock

import pytest

from torchrl_unilab.collectors.seeding import (
    as_seed,
    first_seed,
    first_trajectory,
    random_seed,
    worker_seeds,
)


def test_seeds_that_were_drawn_leave_room_to_count_on_from():
    seeds = [random_seed() for _ in range(50)]
    seeds += [first_seed(7, 1, version, 4) for version in range(1, 50)]
    assert max(seeds) < 2**31
    assert len({*seeds}) == 99


def test_a_collector_that_is_started_again_has_other_seeds_and_the_first_ones_count_on():
    assert [first_seed(7, number, 0, 4) for number in (None, 0, 1, 2)] == [7, 7, 11, 15]
    assert first_seed(7, 1, 3, 4) not in {first_seed(7, 1, 0, 4), first_seed(7, 1, 4, 4)}


def test_trajectory_ids_stay_a_collectors_own_whatever_version_it_starts_with():
    assert {first_trajectory(1, version) >> 40 for version in (0, 1, 2**20, 2**40)} == {1}


def test_the_environments_of_workers_count_on_or_share_a_seed_while_their_noise_differs():
    counting, sharing = worker_seeds(7, 3, 4), worker_seeds(7, 3, 0)
    assert [env for env, _ in counting] == [7, 11, 15]
    assert [env for env, _ in sharing] == [7, 7, 7]
    assert len({noise for _, noise in counting}) == 3


@pytest.mark.parametrize("actor", ["a1", None])
@pytest.mark.parametrize("restarted", [True, False])
@pytest.mark.parametrize("running", [True, False])
def test_an_actor_that_ray_has_restarted_alone_draws_ids_and_seeds(
    monkeypatch, actor, restarted, running
):
    ray = Mock()
    ray.is_initialized.return_value = running
    context = ray.get_runtime_context.return_value
    context.get_actor_id.return_value = actor
    context.was_current_actor_reconstructed = restarted
    monkeypatch.setitem(sys.modules, "ray", ray)
    ids = [first_trajectory(1, 0) for _ in range(3)]
    seeds = [first_seed(7, 1, 0, 4) for _ in range(3)]
    assert {one >> 40 for one in ids} == {1}
    if actor and restarted and running:
        assert len({*ids, 1 << 40}) == len({*seeds, 11}) == 4
    else:
        assert {*ids} == {1 << 40}
        assert {*seeds} == {11}


def test_a_seed_that_is_given_stays_as_it_is():
    assert [as_seed(seed) for seed in (0, 7)] == [0, 7]
    assert as_seed(None) >= 0
