from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import CatFrames, Compose, StepCounter, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tests.support.acting import make_policy, set_action
from tests.support.collecting import (
    SIZE,
    CountingEnv,
    actor,
    gym_env,
    linear_policy,
    single_env,
    state_env,
    transformed_env,
)
from torchrl_unilab.collectors.metrics import SharedMetrics
from torchrl_unilab.collectors.worker import (
    POLICY_VERSION,
    TRAJECTORIES,
    RolloutWorker,
    example_rollout,
    reward_terms,
)
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.errors import LayoutKeyError, LayoutShapeError
from torchrl_unilab.modules import PerEnvNoise, make_actor
from torchrl_unilab.modules.gaussian import GaussianActor
from torchrl_unilab.weight_update import UniLabShmScheme


def _pendulum() -> MujocoBatchEnv:
    return MujocoBatchEnv("InvertedPendulum-v5", num_envs=3, num_threads=1, max_episode_steps=9)


def _collect(worker: RolloutWorker, count: int = 1) -> list:
    """The worker's next rollouts, written into memory that held something else."""
    rollouts = []
    for _ in range(count):
        slot = example_rollout(worker.env, worker.policy, worker.num_steps).clone()
        for value in slot.values(True, True):
            value.fill_(1)
        worker.rollout(slot)
        rollouts.append(slot)
    return rollouts


def _scheme(policy, acting, **kwargs) -> tuple[UniLabShmScheme, UniLabShmScheme]:
    sender, receiver = UniLabShmScheme(**kwargs), UniLabShmScheme()
    sender.init_on_sender(model=policy, devices=[torch.device("cpu")])
    sender.connect()
    receiver.__setstate__(sender.__getstate__())
    receiver.init_on_receiver(model_id="policy", model=acting, worker_idx=0)
    receiver.connect()
    return sender, receiver


ENVS = {
    "batch": (CountingEnv, actor),
    "state": (state_env, actor),
    "transforms": (transformed_env, actor),
    "no batch": (single_env, actor),
    "gym": (gym_env, actor),
    "mujoco": (_pendulum, lambda: actor(size=4)),
    "own tensordict": (transformed_env, partial(linear_policy, inplace=False)),
    "empty tensordict": (transformed_env, partial(linear_policy, inplace="empty")),
    "own tensordict of a sequence": (
        transformed_env,
        lambda: TensorDictSequential(linear_policy(inplace=True), inplace=False),
    ),
}


@pytest.mark.parametrize("case", ENVS)
def test_rollouts_equal_those_of_torchrls_collector_bit_for_bit(case):
    create_env, create_policy = ENVS[case]
    steps, env = 8, create_env()
    policy = create_policy()
    collector = Collector(
        create_env(),
        policy,
        frames_per_batch=steps * env.numel(),
        total_frames=-1,
        auto_register_policy_transforms=False,
    )
    collector.env.set_seed(5)
    collector.reset()
    torch.manual_seed(7)
    batches = iter(collector)
    expected = [next(batches).clone() for _ in range(3)]
    collector.shutdown()

    worker = RolloutWorker(env, policy, steps)
    slots = [example_rollout(create_env(), policy, steps).clone() for _ in range(3)]
    worker.seed(5, 7)
    for slot, theirs in zip(slots, expected, strict=True):
        worker.rollout(slot)
        ours = slot.exclude(POLICY_VERSION, TRAJECTORIES)
        theirs = theirs.exclude(TRAJECTORIES)
        assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
        for key, value in theirs.items(True, True):
            assert torch.equal(ours[key], value), key
    assert any(slot["next", "done"].any() for slot in slots) is (case != "gym")
    worker.close()
    worker.close()


def test_a_seed_repeats_noise_that_follows_the_step_before_whatever_the_policy_did_before():
    def policy() -> GaussianActor:
        torch.manual_seed(0)
        return make_actor(SIZE, 1, hidden=(8,), noise_correlation=0.9)

    def actions(worker: RolloutWorker) -> torch.Tensor:
        worker.seed(5, 7)
        slot = example_rollout(CountingEnv((3,)), policy(), 4).clone()
        worker.rollout(slot)
        return slot["action"]

    used = policy()
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        used(CountingEnv((3,)).reset())
    workers = [RolloutWorker(CountingEnv((3,)), each, 4) for each in (policy(), used)]
    assert used.snapshot() is None
    first, again, other = actions(workers[0]), actions(workers[0]), actions(workers[1])
    assert torch.equal(first, again)
    assert torch.equal(first, other)


def test_trajectories_continue_over_rollouts_and_are_unique_over_workers():
    seen = {}
    for number in range(2):
        worker = RolloutWorker(CountingEnv((3,)), actor(), 4, worker=number, workers=2)
        rollouts = torch.cat(_collect(worker, 3), dim=1)
        ids, done = rollouts[TRAJECTORIES], rollouts["next", "done"].squeeze(-1)
        changes = ids[:, 1:] != ids[:, :-1]
        assert torch.equal(changes, done[:, :-1])  # also where a rollout begins
        assert (ids % 2 == number).all()
        seen[number] = ids.unique()
        worker.reset()
        [after] = _collect(worker)
        assert not torch.isin(after[TRAJECTORIES], seen[number]).any()
    assert not torch.isin(seen[0], seen[1]).any()
    assert len(seen[0]) == 3 + int(done[:, :-1].sum())


def test_each_step_says_which_version_it_acted_with():
    policy, acting = make_policy(0.25), make_policy()

    class Publishes(CountingEnv):
        """Publishes 1/8, 2/8, ... after each step."""

        def _step(self, tensordict):
            out = super()._step(tensordict)
            set_action(policy, (sender.version + 1) / 8)
            sender.send()
            return out

    for pull, expected in [("step", [0, 1, 2, 3]), ("rollout", [0] * 4)]:
        set_action(policy, 0.0)
        sender, receiver = _scheme(policy, acting, pull=pull)
        worker = RolloutWorker(Publishes(), acting, 4, scheme=receiver)
        slot = example_rollout(CountingEnv(), policy, 4).clone()
        worker.rollout(slot)
        assert slot[POLICY_VERSION].tolist() == [expected] * 2
        assert (slot["action"].squeeze(-1) * 8).tolist() == [expected] * 2
        worker.rollout(slot)
        second = {"step": [4, 5, 6, 7], "rollout": [4] * 4}[pull]
        assert slot[POLICY_VERSION].tolist() == [second] * 2
        assert (slot["action"].squeeze(-1) * 8).tolist() == [second] * 2
        sender.shutdown()


def test_frames_episodes_and_time_are_counted_through_a_reset():
    worker = RolloutWorker(CountingEnv((2,), limit=3), actor(), 8)
    _collect(worker, 2)
    assert worker.frames == 32
    assert worker.log.episodes == 5 + 4  # after each 3 and each 4 steps
    worker.reset()
    _collect(worker)
    assert worker.log.episodes == 9 + 2 + 2
    assert worker.log.last[9:13, 1].tolist() == [3.0, 4.0, 3.0, 4.0]
    assert all(worker.clock.seconds[phase] > 0 for phase in ("physics", "policy", "write"))


def test_a_restored_worker_acts_with_the_same_noise_in_new_episodes():
    worker = RolloutWorker(CountingEnv(), actor(), 4)
    worker.seed(1, 2)
    _collect(worker)
    state = worker.state_dict()
    [first] = _collect(worker)
    worker.load_state_dict(state)
    assert worker.frames == 8
    [again] = _collect(worker)
    first_noise, noise = (rollout["action"] - rollout["loc"] for rollout in (first, again))
    torch.testing.assert_close(noise, first_noise, rtol=0.0, atol=1e-6)
    assert (again["observation"][:, 0, 1] == 0).all()


def test_a_worker_that_takes_a_place_counts_on_from_the_metrics_of_the_lost_one():
    lost, other = (RolloutWorker(CountingEnv((2,), limit=3), actor(), 8) for _ in range(2))
    _collect(lost, 2)
    with contextlib.closing(SharedMetrics(1)) as metrics:
        metrics.publish(0, lost.frames, lost.next_trajectory, lost.log, lost.clock)
        other.resume_from(metrics.snapshot(0))
    assert (other.frames, other.log.episodes) == (lost.frames, lost.log.episodes)
    assert (other.log.last == lost.log.last).all()
    assert other.clock.seconds == lost.clock.seconds


def test_ids_of_a_rollout_that_was_lost_uncounted_are_not_given_again():
    workers = (
        RolloutWorker(CountingEnv(limit=1), actor(), 8, worker=1, workers=2) for _ in range(2)
    )
    lost, other = workers
    with contextlib.closing(SharedMetrics(1)) as metrics:
        metrics.publish(0, lost.frames, lost.next_trajectory, lost.log, lost.clock)
        other.resume_from(metrics.snapshot(0))
    [uncounted], [after] = _collect(lost), _collect(other)
    assert not torch.isin(after[TRAJECTORIES], uncounted[TRAJECTORIES]).any()
    assert (after[TRAJECTORIES] % 2 == 1).all()


def test_a_worker_that_counts_on_from_less_gives_no_id_again():
    worker = RolloutWorker(CountingEnv(limit=1), actor(), 8)
    before = torch.cat(_collect(worker, 3))
    worker.count_on({"frames": 0})
    worker.reset()
    [after] = _collect(worker)
    assert after[TRAJECTORIES].min() > before[TRAJECTORIES].max()


class Halved(TensorDictModuleBase):
    """Halves actions by a parameter, of which its snapshot is a view."""

    in_keys = out_keys = ("action",)

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([0.5]))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("action", tensordict["action"] * self.factor)

    def snapshot(self) -> torch.Tensor:
        return self.factor[:]

    def restore(self, snapshot: torch.Tensor | None) -> None:
        if snapshot is not None:
            self.factor.data.copy_(snapshot)


def test_a_worker_of_mujoco_continues_in_the_midst_of_episodes_bit_for_bit(tmp_path):
    def worker() -> RolloutWorker:
        env = MujocoBatchEnv("InvertedPendulum-v5", 3, num_threads=1)
        noise = PerEnvNoise(-3.0, 3.0, std_min=0.5, std_max=2.0, init_key=None)
        policy = TensorDictSequential(actor(size=8), noise, Halved())
        env = TransformedEnv(env, Compose(StepCounter(), CatFrames(2, -1, ["observation"])))
        made = RolloutWorker(env, policy, 5, worker=1, workers=2)
        made.seed(1, 2)
        return made

    def collect(worker: RolloutWorker, count: int) -> list:
        rollouts = [slot.clone() for _ in range(count)]
        for rollout in rollouts:
            worker.rollout(rollout)
        return rollouts

    one, other = worker(), worker()
    slot = example_rollout(one.env, one.policy, 5)
    collect(one, 3)
    collect(other, 1)
    state = one.state_dict()
    assert state["carrier"]["step_count"].max() > 0
    expected = collect(one, 9)
    torch.save(state, tmp_path / "state.pt")
    from_file = torch.load(tmp_path / "state.pt", weights_only=True)
    for given in (state, state, from_file):  # what goes on writes to no state
        other.load_state_dict(given)
        found = collect(other, 9)
        for a, b in zip(expected, found, strict=True):
            for key in a.keys(True, True):
                assert torch.equal(a[key], b[key]), key
        assert one.frames == other.frames == 12 * 15
        assert one.log.episodes == other.log.episodes > 0
        assert (one.log.last == other.log.last).all()
    one.close()
    other.close()


class Staggered(RolloutWorker):
    """A worker of four cheetahs whose episodes last six steps, the first ones up to six."""

    def __init__(self, **transforms: int) -> None:
        env = MujocoBatchEnv("HalfCheetah-v5", 4, num_threads=1, max_episode_steps=6, stagger=True)
        if transforms:
            env = TransformedEnv(env, StepCounter(**transforms))
        super().__init__(env, actor(size=17, actions=6), 8)
        self._slot = example_rollout(env, self.policy, 8).clone()
        self.seed(0, 0)

    def lengths(self, rollouts: int) -> list[float]:
        """Collect, and return the lengths of all episodes that count."""
        for _ in range(rollouts):
            self.rollout(self._slot)
        return self.log.last[: self.log.episodes, 1].tolist()


def test_episodes_that_staggering_cut_do_not_count():
    worker = Staggered()
    assert set(worker.lengths(3)) == {6.0}
    worker.seed(1, 1)
    assert set(worker.lengths(3)) == {6.0}


def test_the_first_episodes_after_a_reset_without_a_seed_count():
    worker = Staggered()
    before = len(worker.lengths(1))
    worker.reset()
    assert len(worker.lengths(1)) == before + 4


def test_a_restored_worker_staggers_no_second_time():
    worker, other = Staggered(), Staggered()
    before = len(worker.lengths(1))
    other.load_state_dict(worker.state_dict())
    other.reset()
    assert len(other.lengths(1)) == before + 4


def test_staggered_episodes_that_a_transform_ends_count_from_the_second_on():
    assert Staggered(max_steps=2).lengths(1)


def test_parts_of_the_newest_rewards_are_measured_below_all_transforms():
    env = TransformedEnv(_pendulum(), StepCounter())
    steps = env.rollout(4)
    mean = steps["next", "reward"][:, -1].mean().item()
    assert reward_terms(env) == {"reward_survive": pytest.approx(mean)}
    assert reward_terms(CountingEnv()) == {}


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1])
def test_steps_of_another_shape_are_refused_and_what_lies_beside_the_memory_is_left(size):
    worker = RolloutWorker(CountingEnv(), make_policy(0.0), 4)
    slot = example_rollout(worker.env, worker.policy, 4).clone()
    memory = torch.full((4 * 2 * 4 * SIZE,), 7.0)
    slot["observation"] = memory[: 2 * 4 * size].view(2, 4, size)

    message = rf"'observation' of a step has shape \(2, {SIZE}\) \(expected \(2, {size}\)"
    with pytest.raises(LayoutShapeError, match=message):
        worker.rollout(slot)
    assert (memory == 7.0).all()
    worker.close()


def test_steps_without_what_the_memory_has_are_refused_by_the_key():
    worker = RolloutWorker(CountingEnv(), make_policy(0.0), 4)
    slot = example_rollout(worker.env, worker.policy, 4).clone().set("gone", torch.zeros(2, 4))
    with pytest.raises(LayoutKeyError, match="'gone' of a step is missing"):
        worker.rollout(slot)
    worker.close()


def test_reward_terms_where_an_episode_has_ended_are_those_of_its_last_step():
    env = MujocoBatchEnv(
        "InvertedPendulum-v5", 2, num_threads=1, max_episode_steps=1, with_reward_terms=True
    )
    _, root = env.step_and_maybe_reset(env.rand_action(env.reset()))
    assert root["reward_terms", "reward_survive"].flatten().tolist() == [0.0, 0.0]
    assert reward_terms(env) == {"reward_survive": 1.0}
