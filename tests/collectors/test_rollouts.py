from __future__ import annotations

import contextlib
import math
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torchrl.envs import CatFrames, DTypeCastTransform, EnvCreator, TransformedEnv, VecNorm
from torchrl.envs.utils import ExplorationType

from tests.support.acting import actions, make_policy
from tests.support.collecting import (
    BREAKING,
    ENVS,
    FRAMES,
    IDS,
    STEPS,
    VERSION,
    Agents,
    CountingEnv,
    actor,
    appo_collector,
    gym_env,
    parallel_env,
    publish,
    state_env,
    transformed_env,
)
from tests.support.processes import wait_for
from torchrl_unilab.collectors import base as base_module
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.errors import ConfigError, SegmentClosedError
from torchrl_unilab.modules import make_actor
from torchrl_unilab.runtime.workers import WorkerGroup
from torchrl_unilab.weight_update import UniLabShmScheme


def test_rollouts_come_in_torchrls_form_until_the_frames_are_there(inline):
    inline.total_frames = 3 * FRAMES - 1
    assert len(inline) == 3
    rollouts = list(inline)
    assert len(rollouts) == 3
    assert rollouts[0].batch_size == (ENVS, STEPS)
    assert set(rollouts[0].keys(True, True)) == {
        "observation",
        "action",
        "done",
        "terminated",
        "truncated",
        ("next", "observation"),
        ("next", "reward"),
        ("next", "done"),
        ("next", "terminated"),
        ("next", "truncated"),
        VERSION,
        IDS,
    }
    together = torch.cat(rollouts, 1)
    assert together["observation"][0, :, 1].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert list(inline) == []
    assert (inline.dropped, inline.stale, inline.pids) == (0, 0, [])
    assert repr(inline) == "APPOCollector(num_workers=1, frames_per_batch=8, lockstep=True)"


def test_metrics_follow_the_rollouts(inline):
    inline.total_frames = 6 * FRAMES
    together = torch.cat(list(inline), 1)
    metrics = inline.metrics()
    assert metrics.frames == together.numel()
    assert metrics.episodes == together["next", "done"].sum() == 4 + 4
    assert metrics.episode_length == 5.5
    assert metrics.timeout_rate == 1.0
    drawn = together["observation"][together["next", "done"].squeeze(-1)][:, 0]
    lengths = torch.tensor([5.0] * 4 + [6.0] * 4)
    assert metrics.episode_return == pytest.approx((drawn * lengths).mean().item())
    inline.reset()
    inline.total_frames += FRAMES
    assert (next(iter(inline))["observation"][:, 0, 1] == 0).all()
    assert inline.metrics().episodes == 8


@pytest.mark.parametrize(
    ("create_env", "shape", "keys"),
    [
        (state_env, (2, 4), {("critic", "state"), ("next", "critic", "state")}),
        (transformed_env, (4, 2), {"step_count", "episode_reward", ("next", "critic", "state")}),
        (gym_env, (8,), {"observation"}),
    ],
)
def test_any_environments_keys_travel(create_env, shape, keys):
    with appo_collector(actor(), create_env, inline=True, total_frames=2 * FRAMES) as collector:
        for rollout in collector:
            assert rollout.batch_size == shape
            assert keys | {"action_log_prob", VERSION} <= set(rollout.keys(True, True))
        if ("critic", "state") in keys:
            expected = rollout["next", "observation"] * 10
            assert torch.equal(rollout["next", "critic", "state"], expected)


def test_a_worker_may_have_processes_of_its_own():
    with appo_collector(actor(), parallel_env, total_frames=2 * FRAMES) as collector:
        rollouts = list(collector)
        assert [rollout.batch_size for rollout in rollouts] == [(2, 4)] * 2
        assert collector.metrics().frames >= 2 * FRAMES


def test_seeds_are_repeatable_and_the_process_keeps_its_own_randomness():
    policy = actor()
    rollouts = []
    for own, seed in enumerate((1, 1, 2)):
        before = torch.manual_seed(own).get_state()
        collector = appo_collector(policy, inline=True, seed=seed, total_frames=3 * FRAMES)
        rollouts.append(torch.stack(list(collector)))
        collector.shutdown()
        assert torch.equal(torch.get_rng_state(), before)
    assert (rollouts[0] == rollouts[1]).all()
    assert not (rollouts[0]["action"] == rollouts[2]["action"]).any()
    assert not (rollouts[0]["observation"][..., 0] == rollouts[2]["observation"][..., 0]).any()


def test_a_collector_without_a_seed_takes_another_one_each_time():
    collectors = [appo_collector(make_policy(), inline=True, seed=None) for _ in range(2)]
    first, second = (next(iter(collector))["observation"] for collector in collectors)
    assert not torch.equal(first, second)
    for collector in collectors:
        collector.shutdown()


BAD = {
    "frames": ({"frames_per_batch": 7}, r"of 2, 1 worker\(s\) with 2 env.*Use 8\."),
    "no frames": ({"frames_per_batch": 0}, "frames_per_batch: 0"),
    "no workers": ({"num_collectors": 0}, r"num_collectors: 0 \(expected an integer of at least 1"),
    "half a worker": ({"num_collectors": 0.5}, r"num_collectors: 0.5 \(expected an integer"),
    "frames that are no integer": ({"frames_per_batch": 8.0}, "frames_per_batch: 8.0"),
    "no functions": ({"create_env": []}, "0 environment functions"),
    "no environment": ({"create_env": lambda: 3}, r"create_env returned: int \(expected EnvBase"),
    "no function": ({"create_env": [3]}, r"create_env: int \(expected a function that makes an"),
    "nothing": ({"create_env": None}, r"create_env: NoneType \(expected a function that makes an"),
    "another number": ({"create_env": [CountingEnv], "num_collectors": 2}, "1 environment func"),
    "no scheme of ours": ({"weight_sync_schemes": {"policy": object()}}, "UniLabShmScheme"),
    "a scheme alone": ({"weight_sync_schemes": UniLabShmScheme()}, r"schemes: .*\{'policy': UniL"),
    "no policy": ({"weight_sync_schemes": {"value": UniLabShmScheme()}}, "weight_sync_schemes"),
    "a scheme too many": (
        {"weight_sync_schemes": {"policy": UniLabShmScheme(), "value": UniLabShmScheme()}},
        "weight_sync_schemes: .*'value'",
    ),
    "two inline": ({"inline": True, "num_collectors": 2}, "Use lockstep=True"),
    "few slots": ({"lockstep": True, "num_collectors": 3, "slots": 2}, "one per worker"),
    "no slots": ({"slots": 0}, "slots"),
    "negative lag": ({"max_policy_lag": -1}, "max_policy_lag: -1"),
    "overflow": ({"overflow": "spill"}, "overflow"),
    "overflow in lock-step": ({"lockstep": True, "overflow": "spill"}, "overflow: 'spill'"),
    "restarts": ({"restart_workers": -1}, r"restart_workers: -1 \(expected an integer of at"),
    "half a restart": ({"restart_workers": 1.5}, r"restart_workers: 1.5 \(expected an integer"),
    "no number of frames": ({"total_frames": float("nan")}, "total_frames: nan .expected an int"),
    "half a seed": ({"seed": 1.5}, "seed: 1.5 .expected an integer of at least 0"),
    "too large a seed": (
        {"seed": 2**64},
        f"seed: {2**64} .expected an integer of 0 to {2**63 - 1}",
    ),
    "no threads": ({"num_threads": 0}, "num_threads: 0 .expected an integer"),
    "no way": ({"exploration_type": "wild"}, r"exploration_type: 'wild' \(expected 'mode', 'm"),
    "no place": ({"worker_idx": -1}, "worker_idx: -1 .expected an integer of at least 0"),
    "no time": ({"timeout": float("nan")}, "timeout: nan .expected seconds of at least 0"),
    "a switch of slots": ({"slots": True, "inline": True}, "slots: True .expected an integer"),
    "a switch of lag": ({"max_policy_lag": True}, "max_policy_lag: True .expected an integer"),
    "lockstep": ({"restart_workers": 1, "lockstep": True}, r"restart_workers: 1 .*0 in lock-step"),
    "inline": ({"restart_workers": 1, "inline": True}, r"restart_workers: 1 .*0 in lock-step"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_refused_before_any_process_starts(case, monkeypatch):
    settings, match = BAD[case]
    monkeypatch.setattr(base_module, "WorkerGroup", pytest.fail)
    with pytest.raises(ConfigError, match=match):
        appo_collector(make_policy(), **settings)


def test_after_shutdown_everything_is_refused_but_another_shutdown(inline):
    batches = iter(inline)
    next(batches)
    state, storage, metrics = inline.state_dict(), inline.storage, inline._metrics
    inline.shutdown()
    inline.shutdown()
    for read in (storage.acquire, metrics.total):
        with pytest.raises(SegmentClosedError):
            read()
    for use in (
        lambda: next(batches),
        lambda: next(iter(inline)),
        lambda: inline.set_seed(1),
        inline.reset,
        inline.metrics,
        inline.state_dict,
        lambda: inline.load_state_dict(state),
        lambda: inline.storage,
        lambda: inline.dropped,
        inline.update_policy_weights_,
    ):
        with pytest.raises(SegmentClosedError, match="Build a new one"):
            use()


def test_what_the_environment_raises_in_this_process_reaches_the_caller(inline):
    batches = iter(inline)
    next(batches)
    publish(inline, 2 * BREAKING)
    with pytest.raises(ArithmeticError, match="exploded"):
        next(batches)
    publish(inline, 0.5)
    assert actions(next(iter(inline))) == {0.5}


# Other devices, further metrics


def _pendulum(steps: int | None = None) -> MujocoBatchEnv:
    return MujocoBatchEnv("InvertedPendulum-v5", ENVS, num_threads=1, max_episode_steps=steps)


# "cpu:0" is another name of the processor, which is told from "cpu" as an accelerator is.
@pytest.mark.parametrize("device", ["cpu:0", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("inline", [True, False])
def test_a_policy_on_another_device_acts_as_on_the_processor(device, inline):
    policy, batches = make_actor(4, 1), []
    for policy_device in ("cpu", device):
        deterministic = {"exploration_type": ExplorationType.DETERMINISTIC, "inline": inline}
        collector = appo_collector(
            policy, _pendulum, policy_device=policy_device, lockstep=True, **deterministic
        )
        with collector:
            torch.nn.init.constant_(policy.module[0].net[-1].bias, 0.25)
            collector.update_policy_weights_()
            batches.append(next(iter(collector)).clone())
    for key in ("action", ("next", "observation"), VERSION):
        assert torch.equal(*(batch[key] for batch in batches))
        assert batches[1][key].device == torch.device("cpu")


@pytest.mark.parametrize("inline", [True, False])
def test_what_workers_measure_is_among_the_metrics(inline):
    def limit(env: MujocoBatchEnv) -> dict[str, float]:
        return {"limit": env.max_episode_steps}

    cases = ({}, {"reward_survive": 1.0}), ({"measure": limit}, {"limit": 1000.0})
    for measure, expected in cases:
        collector = appo_collector(make_actor(4, 1), _pendulum, inline=inline, **measure)
        with collector:
            next(iter(collector))
            wait_for(lambda started=collector: started.metrics().frames > 0)
            assert collector.metrics().values == expected


def test_workers_have_as_many_threads_of_torch_as_asked_for():
    def threads(_: CountingEnv) -> dict[str, float]:
        return {"threads": torch.get_num_threads()}

    with appo_collector(make_policy(0.0), num_threads=2, measure=threads) as collector:
        next(iter(collector))
        assert collector.metrics().values == {"threads": 2.0}


def _named(env: MujocoBatchEnv) -> dict[str, float]:
    return {"both": 1.0, str(env.max_episode_steps): 2.0}


def test_what_the_first_worker_does_not_measure_is_left_out():
    envs = [partial(_pendulum, steps) for steps in (5, 7)]
    with appo_collector(make_actor(4, 1), envs, measure=_named) as collector:
        for _ in collector:  # either worker may be the first
            if not math.isnan(collector.metrics().values["5"]):
                break
        assert collector.metrics().values == {"both": 1.0, "5": 2.0}


def test_returns_are_sums_over_all_rewards_of_an_environment():
    def mean_return(create_env) -> float:
        collector = appo_collector(make_policy(0.0), create_env, total_frames=64, inline=True)
        for _ in collector:
            found = collector.metrics().episode_return
        collector.shutdown()
        return found

    assert mean_return(Agents) == pytest.approx(mean_return(CountingEnv))


def test_rewards_of_bfloat16_are_summed():
    def rounded() -> TransformedEnv:
        cast = DTypeCastTransform(torch.float32, torch.bfloat16, in_keys=["reward"])
        return TransformedEnv(CountingEnv(), cast)

    with appo_collector(make_policy(0.0), rounded, total_frames=64, inline=True) as collector:
        assert {rollout["next", "reward"].dtype for rollout in collector} == {torch.bfloat16}
        assert math.isfinite(collector.metrics().episode_return)


def test_a_state_of_before_the_first_step_is_one_to_begin_from():
    def stacked() -> TransformedEnv:
        return TransformedEnv(CountingEnv(), CatFrames(2, -1, ["observation"], ["both"]))

    def rollout(state: dict | None = None) -> torch.Tensor:
        with appo_collector(make_policy(0.0), stacked, inline=True) as collector:
            if state is not None:
                collector.load_state_dict(state)
            states.append(collector.state_dict())
            return next(iter(collector))["observation"]

    states: list[dict] = []
    first = rollout()
    assert torch.equal(rollout(states[0]), first)
    assert torch.equal(rollout(states[1]), first)


@pytest.mark.filterwarnings("ignore:Support of VecNormV2:UserWarning")
def test_an_inline_collector_begins_with_an_environment_that_has_learnt_nothing():
    def make() -> TransformedEnv:
        return TransformedEnv(CountingEnv(), VecNorm(in_keys=["observation"], new_api=True))

    def first(**mode: bool) -> torch.Tensor:
        with appo_collector(make_policy(0.0), make, total_frames=FRAMES, **mode) as collector:
            return next(iter(collector))["observation"].clone()

    assert first(inline=True).equal(first(lockstep=True))


def test_an_inline_collector_leaves_open_the_one_environment_that_its_function_has():
    env = CountingEnv()
    env.is_closed = False  # TorchRL says so of what has not been stepped
    with appo_collector(
        make_policy(0.0), lambda: env, total_frames=FRAMES, inline=True
    ) as collector:
        assert not env.is_closed
        assert len(list(collector)) == 1


@pytest.mark.filterwarnings("ignore:This class is to be deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:VecNorm was.*initialized:UserWarning")
def test_workers_share_what_an_environment_creator_shares():
    def make() -> TransformedEnv:
        return TransformedEnv(CountingEnv(), VecNorm(in_keys=["observation"], new_api=False))

    def counted() -> float:
        with contextlib.closing(create()) as env:
            return float(env.state_dict()["_extra_state"]["observation_count"].sum())

    create = EnvCreator(make)
    before = counted()
    collector = appo_collector(make_policy(0.0), create, total_frames=2 * FRAMES)
    assert len(list(collector)) == 2
    collector.shutdown()
    assert counted() - before > 2 * FRAMES  # what the worker's process saw


def test_a_request_waits_as_long_as_a_worker_lives(monkeypatch):
    ask, waited = WorkerGroup.ask, []

    def recorded(group, worker, *request, timeout=0.0):
        waited.append(timeout)
        return ask(group, worker, *request, timeout=timeout)

    monkeypatch.setattr(WorkerGroup, "ask", recorded)
    collector = appo_collector(make_policy(0.0), timeout=None, total_frames=FRAMES)
    assert len(list(collector)) == 1
    collector.state_dict()
    collector.shutdown()
    assert set(waited) == {None}


@pytest.mark.parametrize("mode", [{"inline": True}, {"lockstep": True}, {}])
def test_a_rollout_whose_slot_an_interrupt_kept_is_yielded_and_counted_once(mode, monkeypatch):
    with appo_collector(actor(), total_frames=2 * FRAMES, **mode) as collector:
        with monkeypatch.context() as patch:
            patch.setattr(collector.storage, "release", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                next(iter(collector))
        assert len([*collector]) == 2
