"""When and where workers apply what was published."""

from __future__ import annotations

import itertools
import math
import tempfile

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.data import LazyTensorStorage, ReplayBuffer

from tests.support.acting import StillEnv, actions, begun, collecting, make_policy, set_action
from tests.support.bounds import DEADLINE
from torchrl_unilab.errors import ConfigError, ContentionError, WaitTimeoutError
from torchrl_unilab.shm import SnapshotCell
from torchrl_unilab.weight_update import UniLabShmScheme

CPU = torch.device("cpu")


def _collecting(policy, scheme, cls=MultiSyncCollector, **settings):
    return collecting(cls, [StillEnv], policy, weight_sync_schemes={"policy": scheme}, **settings)


def _publish(collector, policy, value: float) -> None:
    set_action(policy, value)
    collector.update_policy_weights_()


class Notes:
    """A user's hook that notes that it ran, by creating a file per call."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def __call__(self, *_: object) -> None:
        tempfile.mkstemp(dir=self.directory)


def test_building_a_collector_and_publishing_leave_the_learners_tensors_alone():
    policy = make_policy(0.25)
    before = [(t.data_ptr(), t.requires_grad) for t in (*policy.parameters(), *policy.buffers())]
    with _collecting(policy, UniLabShmScheme()) as collector:
        next(iter(collector))
        collector.update_policy_weights_()
    tensors = (*policy.parameters(), *policy.buffers())
    assert [(t.data_ptr(), t.requires_grad) for t in tensors] == before
    assert not any(t.is_shared() for t in tensors)


def test_hooks_of_the_user_run_and_never_disconnect_the_pull(tmp_path):
    before, after, replaced = (tmp_path / name for name in ("before", "after", "replaced"))
    for directory in (before, after, replaced):
        directory.mkdir()
    policy = make_policy(0.25)
    with _collecting(
        policy,
        UniLabShmScheme(),
        pre_collect_hook=Notes(str(before)),
        post_collect_hook=Notes(str(after)),
    ) as collector:
        batches = iter(collector)
        assert actions(next(batches)) == {0.25}
        _publish(collector, policy, 0.5)
        assert actions(next(batches)) == {0.5}
        assert len(list(before.iterdir())) == len(list(after.iterdir())) == 2
        collector.pre_collect_hook = Notes(str(replaced))
        collector.post_collect_hook = None
        _publish(collector, policy, 0.75)
        assert actions(next(batches)) == {0.75}
        assert len(list(before.iterdir())) == len(list(after.iterdir())) == 2
        assert len(list(replaced.iterdir())) == 1


def test_pulling_by_hand_waits_for_receive():
    policy = make_policy(0.25)
    scheme = UniLabShmScheme(pull="manual")
    with _collecting(policy, scheme) as collector:
        batches = begun(collector)
        _publish(collector, policy, 0.75)
        assert actions(next(batches)) == {0.25}
        collector.map_fn("_receiver_schemes['policy'].pull")
        assert actions(next(batches)) == {0.75}


@pytest.mark.parametrize("pull", ["step", "rollout"])
def test_only_pull_step_takes_a_version_in_mid_rollout(pull):
    policy = make_policy(0.25)
    buffer = ReplayBuffer(storage=LazyTensorStorage(1 << 16, shared_init=True), shared=True)
    scheme = UniLabShmScheme(pull=pull)
    with _collecting(
        policy,
        scheme,
        MultiAsyncCollector,
        replay_buffer=buffer,
        frames_per_batch=128,
        track_policy_version=True,
    ) as collector:
        collector.start()
        enough = math.inf
        for value in itertools.count(1):
            _publish(collector, policy, float(value))
            scheme.wait_applied(value, timeout=DEADLINE)
            if value == 4:  # of these one at least came in mid-rollout
                enough = buffer.write_count + 4 * 128
            if buffer.write_count >= enough:
                break
    rollouts = buffer[: 128 * (buffer.write_count // 128)]["action"].reshape(-1, 128)
    mixed = any(len(rollout.unique()) > 1 for rollout in rollouts)
    assert mixed is (pull == "step")


def test_trajectories_and_random_frames_pull_too():
    policy = make_policy(0.25)
    scheme = UniLabShmScheme()
    with _collecting(
        policy,
        scheme,
        init_random_frames=8,
        max_frames_per_traj=4,
        trajs_per_batch=2,
        traj_format="cat",
    ) as collector:
        batches = begun(collector)
        _publish(collector, policy, 0.75)
        for _ in range(3):
            batch = next(batches)
        assert actions(batch) == {0.75}


def test_a_paused_worker_answers_with_what_was_published():
    policy = make_policy(0.25)
    scheme = UniLabShmScheme()
    buffer = ReplayBuffer(storage=LazyTensorStorage(64, shared_init=True), shared=True)
    with _collecting(policy, scheme, MultiAsyncCollector, replay_buffer=buffer) as collector:
        collector.start()
        with collector.pause():
            _publish(collector, policy, 0.75)
            collector.map_fn("stats")
            assert scheme.applied_versions == {0: 1}


def test_a_state_that_was_loaded_acts_until_the_next_publish_and_is_not_called_published():
    policy = make_policy(0.25)
    scheme = UniLabShmScheme()
    with _collecting(policy, scheme) as collector:
        batches = begun(collector)
        state = collector.state_dict()
        _publish(collector, policy, 0.5)
        collector.load_state_dict(state)
        assert actions(next(batches)) == {0.25}
        assert scheme.applied_versions == {0: None}
        with pytest.raises(WaitTimeoutError, match="weights that it loaded itself"):
            scheme.wait_applied(timeout=0.01)
        _publish(collector, policy, 0.75)
        assert actions(next(batches)) == {0.75}
        assert scheme.applied_versions == {0: 2}


def test_an_idle_workers_state_and_policy_show_what_was_published():
    policy = make_policy(0.25)
    with _collecting(policy, UniLabShmScheme()) as collector:
        next(iter(collector))
        _publish(collector, policy, 0.75)
        module = collector.getattr_policy("module")
        module = module[0] if isinstance(module, list) else module
        assert module[2].bias.item() == 0.75
        _publish(collector, policy, 0.5)
        state = collector.state_dict()["worker0"]["policy_state_dict"]
        assert state["module.2.bias"].item() == 0.5


def test_a_replaced_model_is_filled_even_if_its_first_pull_was_overtaken(pair, monkeypatch):
    _, receiver = pair(make_policy(0.25), make_policy())
    receiver.model = moved = make_policy(-1.0)

    def overtaken(*_, **__):
        raise ContentionError("overtaken")

    with monkeypatch.context() as patch:
        patch.setattr(SnapshotCell, "read", overtaken)
        with pytest.raises(ContentionError):
            receiver.pull()
    assert receiver.pull()
    assert moved(TensorDict(observation=torch.zeros(3)))["action"].item() == 0.25


def test_a_version_whose_report_was_interrupted_is_reported_by_the_next_pull(pair, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    sender, receiver = pair(make_policy(0.25), make_policy())
    sender.send()
    with monkeypatch.context() as patch:
        patch.setattr(SnapshotCell, "report_applied", interrupted)
        with pytest.raises(KeyboardInterrupt):
            receiver.pull()
    receiver.pull()
    assert sender.applied_versions == {0: 1}


def test_receive_applies_and_says_what_or_nothing(pair):
    learner, acting = make_policy(0.25), make_policy()
    sender, receiver = pair(learner, acting, pull="manual")
    assert receiver.receive() is None
    assert receiver.receive(timeout=0.01) is None
    assert receiver.receive(timeout=math.nan) is None  # looks once, and does not wait for ever
    set_action(learner, 0.75)
    sender.send()
    assert receiver.receive()["module", "2", "bias"].item() == 0.75
    assert sender.lag == {0: 0}
    assert sender.statistics["publishes"] == 1
    assert sender.statistics["bytes"] > 0


@pytest.mark.slow
def test_a_compiled_policy_acts_with_published_weights():
    policy = make_policy(0.25)
    with _collecting(policy, UniLabShmScheme(), compile_policy=True) as collector:
        batches = iter(collector)
        assert actions(next(batches)) == {0.25}
        _publish(collector, policy, 0.75)
        assert actions(next(batches)) == {0.75}


@pytest.mark.gpu
def test_a_policy_on_the_gpu_acts_with_published_weights_and_graphs_stay_valid():
    policy = make_policy(0.25).cuda()
    with _collecting(
        policy, UniLabShmScheme(), policy_device="cuda", env_device="cpu", cudagraph_policy=True
    ) as collector:
        batches = iter(collector)
        assert actions(next(batches)) == {0.25}
        _publish(collector, policy, 0.75)
        assert actions(next(batches)) == {0.75}


BAD = [{"version": bad} for bad in ("2", 0.5, -1)] + [{"timeout": bad} for bad in (None, "2")]


@pytest.mark.parametrize("argument", BAD)
def test_a_wait_for_no_version_or_without_a_bound_is_refused(argument, make_sender):
    scheme, (name,) = make_sender(model=make_policy(), devices=[CPU]), argument
    with pytest.raises(ConfigError, match=rf"^{name}: .* \(expected "):
        scheme.wait_applied(**argument)
