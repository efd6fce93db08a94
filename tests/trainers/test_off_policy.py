from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from functools import partial
from unittest.mock import Mock, call

import pytest
import torch

from tests.support.collecting import flat_state_env
from tests.support.off_policy_training import BOTH, QUICK, equal_states, off_policy_trainer, trained
from torchrl_unilab.configs.file import read_config
from torchrl_unilab.envs import MujocoBatchEnv, make_task
from torchrl_unilab.errors import CheckpointError, SegmentClosedError
from torchrl_unilab.limits import available_cores
from torchrl_unilab.objectives import FusedSACUpdate, FusedTD3Update
from torchrl_unilab.trainers import (
    OffPolicyConfig,
    build_reward_comparison_metrics,
    compute_train_start_threshold,
    evaluate,
    evaluate_run,
    replay_buffer_ready_for_learning,
    train_off_policy,
)

MOSTLY_SAC = pytest.mark.parametrize(
    "algorithm", ["sac", pytest.param("td3", marks=pytest.mark.slow)]
)

LEARNS = {
    "env_steps_per_sync": 4,
    "updates_per_step": 16,
    "num_envs": 8,
    "replay_buffer_n": 500,
    "batch_size": 64,
    "learning_starts": 50,
    "hidden": (64, 64),
    "obs_normalization": True,
    "gamma": 0.98,
    "tau": 0.02,
    "alpha": 0.1,
    "lr_actor": 1e-3,
    "lr_critic": 3e-3,
    "lr_alpha": 1e-3,
}


# When learning starts


@pytest.mark.parametrize(
    ("batch", "starts", "envs", "rows"),
    [(256, 0, 16, 256), (256, 100, 16, 1600), (256, -1, 16, 256), (8192, 1, 4096, 8192)],
)
def test_learning_starts_when_the_replay_has_a_batch_and_each_environments_steps(
    batch, starts, envs, rows
):
    assert compute_train_start_threshold(batch, starts, envs) == rows
    ready = partial(
        replay_buffer_ready_for_learning, batch_size=batch, learning_starts=starts, num_envs=envs
    )
    assert ready(rows)
    assert not ready(rows - 1)


def test_runs_are_compared_by_the_latest_mean_of_a_hundred_episodes_if_there_is_one():
    assert build_reward_comparison_metrics([1000.0, 1.0, 3.0], 7.0) == {"mean_ep100": 3.0}
    assert build_reward_comparison_metrics([], 5.0) == {}


def test_no_update_is_taken_before_and_the_stated_number_after():
    trainer = off_policy_trainer(ticks=20)  # 4 rows a tick, from 32 rows on: ticks 8 to 20
    trained(trainer)
    assert trainer.collected_frames == 80
    assert trainer.updates == trainer._optim_count == 2 * 13


# One update after the other


@MOSTLY_SAC
def test_runs_in_lockstep_are_repeatable_bit_for_bit_in_one_process_and_in_two(algorithm):
    inline = trained(off_policy_trainer(algorithm=algorithm))
    assert equal_states(trained(off_policy_trainer(algorithm=algorithm)), inline)
    assert equal_states(trained(off_policy_trainer(algorithm=algorithm, inline=False)), inline)


@BOTH
def test_known_networks_are_updated_by_the_fused_step_and_others_by_the_loss(algorithm):
    kinds = {"sac": FusedSACUpdate, "td3": FusedTD3Update}
    trainer = off_policy_trainer(algorithm=algorithm)
    assert type(trainer.update) is kinds[algorithm]
    trainer.collector.shutdown()
    general = off_policy_trainer(algorithm=algorithm, fused=False)
    assert type(general.update) is not kinds[algorithm]
    before = {key: value.clone() for key, value in general.loss_module.state_dict().items()}
    assert not equal_states(trained(general), before)
    assert "loss_qvalue" in general._log_dict


@pytest.mark.parametrize(("prefetch", "packer"), [(True, "thread"), (False, "inline")])
def test_the_next_sample_is_started_while_this_one_is_learnt_from_with_prefetch(prefetch, packer):
    trainer = off_policy_trainer(9, prefetch=prefetch)
    assert trainer.pipeline.transfer_manifest["packer"] == packer
    trainer.pipeline = noted = Mock(wraps=trainer.pipeline)
    trained(trainer)
    ticks = [
        [call.sample_large_batch(tick, 32), call.start_prepare(tick + 1, 32), call.after_tick()]
        for tick in range(2)
    ]
    expected = [*itertools.chain(*ticks), call.close()]
    assert noted.mock_calls == [c for c in expected if prefetch or c[0] != "start_prepare"]


@BOTH
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_update_takes_the_same_step(algorithm, fused):
    from torch._inductor import config as compiler

    moved = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        trainer = off_policy_trainer(8, algorithm=algorithm, fused=fused, compile=compiled)
        # compiled code draws its noise by a generator of its own, unless told
        with compiler.patch(fallback_random=True):
            moved.append(trained(trainer))
        assert bool(torch._dynamo.utils.counters["frames"]["ok"]) is compiled
    for key, eager in moved[0].items():
        torch.testing.assert_close(eager, moved[1][key], rtol=1e-4, atol=1e-6)


@BOTH
def test_the_policy_moves_once_in_policy_frequency_updates_and_the_critics_each_time(algorithm):
    for frequency, moves in ((3, True), (1000, False)):
        trainer = off_policy_trainer(algorithm=algorithm, policy_frequency=frequency)
        before = {key: value.clone() for key, value in trainer.loss_module.state_dict().items()}
        after = trained(trainer)
        moved = {key for key in before if not torch.equal(before[key], after[key])}
        assert any(key.startswith("qvalue_network_params") for key in moved)
        assert any(key.startswith("target_qvalue_network_params") for key in moved)
        assert any(key.startswith("actor_network_params") for key in moved) is moves


@BOTH
@pytest.mark.parametrize("fused", [True, False])
def test_the_rates_fall_to_nothing_in_the_last_share_of_the_run(algorithm, fused):
    rates = {"lr_actor": 1e-3, "lr_critic": 2e-3, "lr_alpha": 3e-3}
    trainer = off_policy_trainer(20, algorithm=algorithm, anneal=0.5, fused=fused, **rates)
    seen: dict[int, dict[str, float]] = {}

    def look() -> None:
        optimizers = trainer.update.optimizers.items()
        seen[trainer.collected_frames] = {k: o.param_groups[0]["lr"] for k, o in optimizers}

    trainer.register_op("post_optim", look)
    trainer.train()
    for frames, share in ((40, 1.0), (60, 0.5), (80, 0.0)):
        assert seen[frames] == {k: pytest.approx(share * rates[f"lr_{k}"]) for k in seen[frames]}


@BOTH
@pytest.mark.parametrize("old", [False, True])
def test_a_resumed_trainer_whose_first_updates_leave_the_policy_has_not_diverged(algorithm, old):
    settings = {"algorithm": algorithm, "policy_frequency": 4, "updates_per_step": 1}
    before, trainer = off_policy_trainer(20, **settings), off_policy_trainer(20, **settings)
    before.train()
    before._optim_count -= before.updates % 4  # as after a step of the policy
    state = before._own_state()
    assert state["observed"].isfinite().all()
    if old:  # a checkpoint of before they were kept
        del state["observed"]
    trainer._load_own_state(state)
    trainer._optim_count = before.updates
    assert trainer.update.observed.equal(before.update.observed) is not old
    trainer.train()
    assert trainer.updates > before.updates + 4
    for one in (before, trainer):
        one.close()


def test_a_trainer_is_closed_at_the_end_of_a_with_block():
    with off_policy_trainer(2) as trainer:
        trained_by, count = trainer.pipeline, trainer.pipeline.sample_count
    trainer.close()  # again
    trainer.collector.shutdown()
    with pytest.raises(SegmentClosedError):
        trained_by.sample_large_batch(0, count)


def test_what_is_learnt_reaches_the_collector():
    for ticks in (8, 9):  # in the eighth the first updates are taken
        trainer = off_policy_trainer(ticks)
        worker = trainer.collector._team.service.rollouts.policy
        before = {key: value.clone() for key, value in worker.state_dict().items()}
        trainer.train()
        assert equal_states(dict(worker.state_dict()), before) is (ticks == 8)


def test_the_normaliser_counts_each_row_once_though_rows_are_drawn_often():
    trainer = off_policy_trainer(obs_normalization=True, ticks=130)  # 520 rows in a replay of 400
    rows = []
    storage = trainer.storage
    trainer.register_op(
        "pre_steps_log", lambda _: rows.append(storage.get(_last(storage))["observation"].clone())
    )
    trained(trainer)
    (normalizer,) = trainer.normalizers.values()
    assert normalizer.count == 520
    seen = torch.cat(rows).double()
    torch.testing.assert_close(normalizer.mean, seen.mean(0))
    torch.testing.assert_close(normalizer.variance, seen.var(0, correction=0))


def test_a_trainer_that_continues_with_an_empty_replay_counts_its_first_rows_too():
    seen = {"critic_observation": "state", "obs_normalization": True}  # by a normaliser for each
    before, states = off_policy_trainer(20, flat_state_env, **seen), []
    before.register_op("post_steps", lambda: states.append(before.state_dict()))
    trained(before)
    trainer = off_policy_trainer(21, flat_state_env, **seen)
    trainer.load_state_dict(states[-1])
    trained(trainer)
    counted = {key: one.count.item() for key, one in trainer.normalizers.items()}
    assert counted == {"observation": 84, "state": 84}  # 4 are of the one tick that was left


def _last(storage) -> torch.Tensor:
    return torch.arange(storage.ptr - 4, storage.ptr) % storage.max_size


# Whole runs


@BOTH
def test_a_run_leaves_what_an_appo_run_leaves_and_can_be_evaluated(off_policy_runs, algorithm):
    run_dir, summary = vars(off_policy_runs[algorithm]).values()
    assert (summary["algo"], summary["frames"]) == (algorithm, 192)
    assert summary["optim_steps"] == 4 * (48 - 7)  # from 32 rows on
    files = {path.name for path in run_dir.iterdir()}
    assert {"summary.json", "config.yaml", "returns.png", "checkpoint"} <= files
    assert read_config(run_dir / "config.yaml")["algo"] == algorithm
    result = evaluate_run(run_dir, episodes=1, seed=0)
    assert result["mean"] == pytest.approx(summary["eval_return"])


@MOSTLY_SAC
def test_several_collectors_feed_one_learner_whose_critics_see_more(tmp_path, algorithm):
    config = OffPolicyConfig(
        algorithm,
        **QUICK | {"obs_normalization": True},
        num_collectors=2,
        critic_observation="state",
        layer_norm=True,
        n_step=3,
    )
    summary = train_off_policy(
        "Counting",
        create_env=flat_state_env,
        config=config,
        frames=400,
        run_dir=tmp_path,
        progress_bar=False,
    )
    assert summary["optim_steps"] == 2 * (50 - 7)
    assert len(summary["busy"]["collectors"]) == 2
    assert summary["collector"]["timeout_rate"] == 1.0
    assert summary["collector"]["replay_size"] >= 400
    assert 0.0 < summary["final_return"] < 8.0


@BOTH
@pytest.mark.learning
def test_a_pendulum_is_balanced_for_nine_tenths_of_its_time(algorithm):
    task = replace(make_task("InvertedPendulum-v5"), max_episode_steps=100)
    create_env = partial(MujocoBatchEnv, task, num_envs=8, num_threads=1)
    trainer = off_policy_trainer(300, create_env, algorithm=algorithm, **LEARNS)
    env, returns = create_env(seed=1), []  # seeds 0 to 4 need at most 4,160 of 9,600 frames

    def look() -> None:
        if trainer.collected_frames % 320 == 0:
            returns.append(evaluate(env, trainer.collector.policy).mean().item())
            if returns[-1] >= 90.0:
                trainer.request_stop("it is learnt")

    trainer.register_op("post_steps", look)
    trained(trainer)
    env.close()
    assert returns[0] < 20.0  # nothing is learnt before the 400th frame
    assert returns[-1] >= 90.0


# Threads


@pytest.mark.parametrize(
    ("settings", "torch_threads", "others"),
    [
        ({"learner_threads": 1}, 1, 0),
        ({"learner_threads": 2}, 1, 1),
        ({"learner_threads": 6}, 3, 1),
        ({"learner_threads": None}, 1, min(1, available_cores() - 1)),
        ({"learner_threads": None, "fused": False}, 1, 0),
        ({"learner_threads": 3, "fused": False}, 3, 0),
    ],
)
def test_half_of_the_learners_threads_are_the_policys_while_it_trains(
    settings, torch_threads, others
):
    found, before = torch.get_num_threads(), {*threading.enumerate()}
    trainer = off_policy_trainer(30, **settings)
    seen: list[tuple[int, int]] = []

    def look() -> None:
        new = {*threading.enumerate()} - before
        seen.append(
            (torch.get_num_threads(), sum(thread.name.startswith("policy") for thread in new))
        )

    trainer.register_op("post_optim", look)
    trained(trainer)
    assert set(seen) == {(torch_threads, others)}
    assert not any(thread.name.startswith("policy") for thread in {*threading.enumerate()} - before)
    assert torch.get_num_threads() == found


@BOTH
@pytest.mark.parametrize("fused", [True, False])
def test_a_state_of_another_kind_of_update_is_refused_before_anything_is_loaded(algorithm, fused):
    saved = off_policy_trainer(algorithm=algorithm, fused=fused)
    other = off_policy_trainer(algorithm=algorithm, fused=not fused)
    state = saved.state_dict()
    with torch.no_grad():
        state["loss_module"] = {key: value + 1 for key, value in state["loss_module"].items()}
    before = {key: value.clone() for key, value in other.loss_module.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"an optimiser of \d+ tensors .* fused in config"):
        other.load_state_dict(state)
    assert equal_states(dict(other.loss_module.state_dict()), before)
    for trainer in (saved, other):
        trainer.collector.shutdown()
        trainer.close()


@BOTH
def test_a_state_of_the_other_algorithm_is_refused_before_anything_is_loaded(algorithm):
    saved = off_policy_trainer(algorithm="sac" if algorithm == "td3" else "td3")
    other = off_policy_trainer(algorithm=algorithm)
    other.loss_module.load_state_dict = loaded = Mock()
    with pytest.raises(
        CheckpointError, match=r"^state of OffPolicyTrainer: \['optimizer_actor'.* \(exp"
    ):
        other.load_state_dict(saved.state_dict())
    assert not loaded.called
    for trainer in (saved, other):
        trainer.collector.shutdown()
        trainer.close()
