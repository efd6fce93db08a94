from __future__ import annotations

import inspect
import threading
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.data import Unbounded
from torchrl.envs import TensorDictPrimer, TransformedEnv
from torchrl.envs.utils import ExplorationType

from tests.support.acting import StillEnv, make_policy
from tests.support.collecting import CountingEnv, EndingForAgents, actor
from tests.support.processes import live_children
from torchrl_unilab.collectors import APPOCollector, ReplayCollector
from torchrl_unilab.collectors.arguments import WorkerSettings, find_device, resolve_policy
from torchrl_unilab.errors import (
    ConfigError,
    LayoutKeyError,
    SegmentClosedError,
    UsageError,
    WorkerError,
)
from torchrl_unilab.weight_update import UniLabShmScheme

FRAMES = 2 * 16
# As `RayCollector` gives them to each collector that it makes, and what collectors always do.
FROM_RAY: dict[str, Any] = {
    "max_frames_per_traj": -1,
    "init_random_frames": 0,
    "reset_at_each_iter": False,
    "split_trajs": False,
    "device": None,
    "storing_device": None,
    "env_device": None,
    "policy_device": None,
    "track_policy_version": True,
    "trust_policy": None,
    "worker_idx": 0,
}


def collected(**settings: Any) -> Any:
    """Three rollouts of an inline collector, end to end in time."""
    make_env = partial(CountingEnv, limit=3)
    settings = {"seed": 5, "inline": True, "total_frames": 3 * FRAMES, **settings}
    with APPOCollector(make_env, make_policy(), frames_per_batch=FRAMES, **settings) as collector:
        return torch.cat([rollout.clone() for rollout in collector], dim=1)


def test_what_ray_collectors_hand_on_changes_nothing():
    assert (collected(**FROM_RAY) == collected()).all()


@pytest.mark.parametrize("stock", [Collector, MultiSyncCollector])
def test_the_default_of_each_argument_of_torchrls_collectors_changes_nothing(stock):
    given = inspect.signature(stock.__init__).parameters.values()
    defaults = {p.name: p.default for p in given if p.kind is p.KEYWORD_ONLY}
    for other in (*WorkerSettings.__annotations__, "frames_per_batch", "track_policy_version"):
        defaults.pop(other, None)
    assert (collected(**defaults) == collected()).all()


@pytest.mark.parametrize("cpu", ["cpu", torch.device("cpu")])
def test_the_processor_may_be_named_as_the_place_of_all_that_is_collected(cpu):
    places = dict.fromkeys(("device", "storing_device", "env_device", "policy_device"), cpu)
    assert (collected(**places) == collected()).all()


def test_workers_explore_by_the_collectors_exploration_type():
    settings = {"frames_per_batch": FRAMES, "inline": True}
    for kind in (ExplorationType.DETERMINISTIC, ExplorationType.RANDOM, None):  # as TorchRL's
        with APPOCollector(CountingEnv, actor(), exploration_type=kind, **settings) as collector:
            rollout = next(iter(collector))
        found = torch.equal(rollout["action"], rollout["loc"])
        assert found is (kind == ExplorationType.DETERMINISTIC)


def test_a_scheme_is_disconnected_when_its_collector_is_shut_down(monkeypatch):
    monkeypatch.setattr(UniLabShmScheme, "disconnect", disconnect := Mock())
    with _inline():
        assert not disconnect.called
    assert disconnect.called


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("max_frames_per_traj", 10),
        ("weight_recv_schemes", {}),
        ("split_trajs", True),
        ("reset_at_each_iter", True),
        ("set_truncated", True),
        ("num_workers", 2),
        ("storing_device", "cuda"),
        ("compile_policy", True),
        ("replay_buffer", object()),
    ],
)
def test_a_stock_argument_that_asks_for_something_is_refused_by_name(argument, value):
    with pytest.raises(ConfigError, match=argument):
        collected(**{argument: value})


@pytest.mark.parametrize("found", [3.0, {"a": "b"}, {"a": torch.zeros(3)}])
def test_what_is_measured_is_refused_unless_it_is_numbers_by_name(found):
    for measure in (lambda env: found, found):
        with pytest.raises(ConfigError, match=r"^measure: .* \(expected a function"):
            collected(measure=measure)


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2)])
def test_environments_of_another_size_than_the_first_workers_are_refused(sizes):
    factories = [partial(CountingEnv, (size,)) for size in sizes]
    with pytest.raises(WorkerError, match=rf"worker 1: batch size \({sizes[1]},\) \(expected"):
        APPOCollector(factories, make_policy(), frames_per_batch=FRAMES)


def test_an_environment_of_another_size_than_the_example_is_closed_in_this_process_too():
    made = [CountingEnv((size,)) for size in (2, 4)]
    for env in made:
        env.is_closed = False  # TorchRL says so of what has been stepped
    unused = iter(made)
    with pytest.raises(ConfigError, match=r"environment of worker 0: batch size \(4,\)"):
        APPOCollector(lambda: next(unused), make_policy(), frames_per_batch=FRAMES, inline=True)
    assert [env.is_closed for env in made] == [True, True]


def primed(primer: TensorDictPrimer) -> TransformedEnv:
    return TransformedEnv(CountingEnv(), primer)


def test_a_function_may_hold_a_transform_for_its_environment():
    primer = TensorDictPrimer(state=Unbounded((3,)), expand_specs=True)
    make_env = partial(primed, primer)
    with APPOCollector(make_env, make_policy(), frames_per_batch=FRAMES, num_collectors=2) as one:
        assert next(iter(one))["state"].shape == (2, 16, 3)
    assert primer.parent is None


@pytest.mark.parametrize("what", ["policy", "create_env_fn"])
def test_what_cannot_be_sent_to_a_worker_is_refused_by_name(what):
    policy, lock = make_policy(), threading.Lock()
    policy.lock = lock if what == "policy" else None
    make_env = partial(lambda _: CountingEnv(), None if what == "policy" else lock)
    with pytest.raises(ConfigError, match=rf"^{what}.*: cannot pickle '_thread.lock' object"):
        APPOCollector(make_env, policy, frames_per_batch=FRAMES)


def test_an_argument_that_no_collector_has_is_a_type_error():
    with pytest.raises(TypeError, match="frames_per_bach"):
        collected(frames_per_bach=3)


def test_collectors_of_other_machines_share_neither_trajectory_ids_nor_seeds():
    first, second = (collected(worker_idx=node) for node in (0, 1))
    ids = [one["collector", "traj_ids"].unique().tolist() for one in (first, second)]
    assert len(ids[0]) == len(ids[1]) > 4
    assert not {*ids[0]} & {*ids[1]}
    drawn = [one["observation"][..., 0].unique().tolist() for one in (first, second)]
    assert not {*drawn[0]} & {*drawn[1]}


def test_a_static_seed_is_the_same_on_all_machines():
    drawn = []
    for node in (None, 1):
        with _inline(worker_idx=node) as collector:
            assert collector.set_seed(5, static_seed=True) == 7
            drawn.append(next(iter(collector))["observation"].clone())
    assert torch.equal(*drawn)


def test_a_collector_that_is_started_again_repeats_neither_trajectory_ids_nor_seeds():
    first, again = (
        collected(
            worker_idx=1, weight_sync_schemes={"policy": UniLabShmScheme(first_version=version)}
        )
        for version in (0, 7)
    )
    for key in (("collector", "traj_ids"), "observation"):
        assert not {*first[key][..., 0].unique().tolist()} & {*again[key][..., 0].unique().tolist()}
    assert again["collector", "traj_ids"].min() >> 40 == 1


def test_a_factory_makes_the_policy_where_there_is_none():
    make_env = partial(CountingEnv, limit=3)
    settings = {"frames_per_batch": FRAMES, "inline": True, "seed": 5, "total_frames": FRAMES}
    with APPOCollector(make_env, policy_factory=make_policy, **settings) as collector:
        (made,) = (rollout.clone() for rollout in collector)
    assert (made["observation"] == collected()["observation"][:, : made.shape[1]]).all()


@pytest.mark.parametrize("given", [{}, {"policy": 1, "policy_factory": make_policy}])
def test_a_policy_is_given_or_made(given):
    with pytest.raises(ConfigError, match="policy_factory"):
        APPOCollector(partial(CountingEnv, limit=3), frames_per_batch=FRAMES, **given)


@pytest.mark.parametrize("policy", [lambda td: td, torch.nn.Linear(3, 1)], ids=["call", "module"])
def test_a_policy_that_is_no_tensordict_module_is_refused_by_its_type(policy):
    with pytest.raises(ConfigError, match=rf"policy: {type(policy).__name__} \(expected Tenso"):
        APPOCollector(partial(CountingEnv, limit=3), policy, frames_per_batch=FRAMES)


@pytest.mark.parametrize("of", [APPOCollector, partial(ReplayCollector, capacity=100)])
def test_a_policy_that_writes_no_action_is_refused_by_the_key(of):
    policy = TensorDictModule(torch.nn.Linear(3, 1), ["observation"], ["loc"])
    with pytest.raises(LayoutKeyError, match=r"policy: no 'action' among .*'loc'.* out_keys"):
        of(partial(CountingEnv, limit=3), policy, frames_per_batch=FRAMES)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_a_compiled_policy_is_one():
    policy = torch.compile(make_policy())
    assert resolve_policy(policy, None) is policy


def test_an_environment_in_the_place_of_what_makes_one_is_refused():
    with pytest.raises(ConfigError, match=r"create_env: CountingEnv, an environment \(expected a"):
        APPOCollector(CountingEnv(limit=3), make_policy(), frames_per_batch=FRAMES)


def test_lock_step_ends_at_the_machine():
    with pytest.raises(ConfigError, match="lockstep"):
        collected(worker_idx=0, inline=False, lockstep=True)


def test_borrowed_memory_does_not_leave_the_machine():
    with pytest.raises(ConfigError, match="use_buffers"):
        collected(worker_idx=0, use_buffers=True)


def test_a_collector_without_end_is_true():
    make_env = partial(CountingEnv, limit=3)
    with APPOCollector(make_env, make_policy(), frames_per_batch=FRAMES, inline=True) as collector:
        assert collector


@pytest.mark.parametrize("close", [True, False])
def test_an_inline_collector_closes_what_it_made_unless_close_env_is_false(close):
    made: list[CountingEnv] = []

    def make_env() -> CountingEnv:
        made.append(CountingEnv())
        made[-1].is_closed = False  # TorchRL says so of what has been stepped
        return made[-1]

    collector = APPOCollector(make_env, make_policy(), frames_per_batch=FRAMES, inline=True)
    assert [env.is_closed for env in made] == [True, False]
    collector.shutdown(close_env=close)
    assert made[1].is_closed is close


def test_a_half_built_collector_can_be_shown():
    assert repr(APPOCollector.__new__(APPOCollector)) == "APPOCollector()"


def test_the_memory_is_freed_though_the_environment_cannot_be_closed(monkeypatch):
    collector = APPOCollector(CountingEnv, make_policy(), frames_per_batch=FRAMES, inline=True)
    env = Mock(is_closed=False, close=Mock(side_effect=ArithmeticError("does not close")))
    monkeypatch.setattr(collector._team.service.rollouts, "env", env)
    with pytest.raises(ArithmeticError, match="does not close"):
        collector.shutdown()
    with pytest.raises(SegmentClosedError):
        len(collector.storage)
    monkeypatch.undo()  # it is shut down again as it goes


def _inline(envs: int = 2, **settings: Any) -> APPOCollector:
    return APPOCollector(
        partial(CountingEnv, (envs,)),
        make_policy(),
        frames_per_batch=8 * envs,
        inline=True,
        **settings,
    )


def test_a_scheme_that_a_collector_publishes_by_is_refused_and_continues():
    scheme = UniLabShmScheme()
    with _inline(weight_sync_schemes={"policy": scheme}) as collector:
        with pytest.raises(UsageError, match="another collector publishes by"):
            _inline(weight_sync_schemes={"policy": scheme})
        collector.update_policy_weights_()
        assert (next(iter(collector))["next", "policy_version"] == 1).all()
        assert scheme.applied_versions == {0: 1}


def test_workers_in_which_nothing_would_pull_are_refused():
    with pytest.raises(ConfigError, match="pull of weight_sync_schemes: 'manual'"):
        _inline(weight_sync_schemes={"policy": UniLabShmScheme(pull="manual")})


def test_an_environment_that_no_time_limit_ends_is_collected_from():
    with APPOCollector(StillEnv, make_policy(), frames_per_batch=4, inline=True) as collector:
        after = next(iter(collector))["next"]
    assert "terminated" in after
    assert "truncated" not in after


def test_an_environment_that_ends_for_agents_alone_is_refused():
    with pytest.raises(ConfigError, match=r"done keys .*'agents'"):
        APPOCollector(EndingForAgents, make_policy(), frames_per_batch=16, inline=True)


def test_the_state_of_another_collector_is_refused_and_changes_nothing():
    replay = ReplayCollector(
        CountingEnv, make_policy(), capacity=64, frames_per_batch=2, inline=True
    )
    with _inline() as collector, _inline(3) as other, replay:
        next(iter(collector))
        for state, message in [
            (other.state_dict(), r"1 workers, of \[3\] environments \(expected \[2\]\)"),
            (replay.state_dict(), r"without \['stale', 'waiting', 'version'\]"),
        ]:
            with pytest.raises(ConfigError, match=message):
                collector.load_state_dict(state)
            assert collector.state_dict()["frames"] == 16


def test_hooks_that_would_never_be_called_are_refused():
    with _inline() as collector:
        for name in ("pre_collect_hook", "post_collect_hook"):
            with pytest.raises(ConfigError, match=r"hook of APPOCollector: .* \(expected None"):
                setattr(collector, name, print)
            setattr(collector, name, None)
        next(iter(collector))
        with pytest.raises(ConfigError, match=r"hook of APPOCollector: .*Profiler"):
            collector.enable_profile()


def test_a_seed_below_0_is_refused_and_the_collector_continues():
    with pytest.raises(ConfigError, match="seed: -1"):
        _inline(seed=-1)
    with _inline(seed=0) as collector:
        with pytest.raises(ConfigError, match="seed: -1"):
            collector.set_seed(-1)
        assert next(iter(collector)).batch_size == (2, 8)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize("name", ["cpu", "cpu:0", "cuda", "cuda:0", "cuda:1"])
def test_a_device_that_is_there_is_found(two_gpus, name):
    assert find_device("device", name) == torch.device(name)


def test_the_only_gpu_is_found_without_its_number(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert find_device("device", "cuda") == torch.device("cuda")


@pytest.mark.parametrize("name", ["cuda:2", "meta", "tpu", torch.device("mps"), 1.5])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(two_gpus, name):
    message = rf"device: '{name}' \(.* here: cpu, cuda:0, cuda:1\)"
    with pytest.raises(ConfigError, match=message):
        find_device("device", name)


def test_a_collector_on_a_device_that_is_not_there_starts_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"policy_device: 'cuda' \(.* finds here: cpu\)"):
        collected(inline=False, policy_device="cuda")
    assert not live_children()


@pytest.mark.parametrize("mode", [{"inline": True}, {"lockstep": True}, {}])
def test_attributes_of_the_first_environment_are_read_as_torchrls_trainers_do(mode, kept):
    collector = kept(**mode)
    next(iter(collector))
    assert collector.getattr_env("full_action_spec_unbatched")["action"].shape == (1,)
    with pytest.raises(AttributeError, match="nothing"):
        collector.getattr_env("nothing")
    assert len(next(iter(collector)))  # its worker lives
