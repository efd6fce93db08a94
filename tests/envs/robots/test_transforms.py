from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.transforms import ActionScaling, Compose, FrameSkipTransform, Transform
from torchrl.envs.utils import check_env_specs

from torchrl_unilab.envs import MujocoBatchEnv, make_task
from torchrl_unilab.envs.robots.transforms import ActionDelay, ObservationDelay, ObservationNoise
from torchrl_unilab.errors import ConfigError

N = 4


def hopper(*transforms: Transform, **settings: object) -> TransformedEnv:
    settings = {"num_envs": N, "seed": 0, "num_threads": 1, **settings}
    env = MujocoBatchEnv("Hopper-v5", **settings)
    return TransformedEnv(env, Compose(*transforms)) if transforms else env


def step(env: EnvBase, root: TensorDictBase, action: torch.Tensor, **entries: torch.Tensor):
    """Take a step in rows that `_step` may select; return the next root."""
    td = root.set("action", action).update(entries)
    return env.step_mdp(env.step(td)).exclude(*entries)


def actions(steps: int) -> torch.Tensor:
    return torch.rand(steps, N, 3, generator=torch.Generator().manual_seed(1)) * 2 - 1


def play(env: EnvBase, steps: int) -> tuple[TensorDictBase, TensorDictBase]:
    """Steps and the roots they started from, stacked along time."""
    root = env.reset()
    data = []
    for action in actions(steps):
        taken, root = env.step_and_maybe_reset(root.set("action", action))
        data.append(taken)
    return torch.stack(data, 1), root


@pytest.mark.parametrize("make", [ObservationDelay, ActionDelay])
def test_a_clone_has_a_past_of_its_own(make):
    delay = make(2)
    env = hopper(delay)
    play(env, 3)
    state = delay.get_extra_state()
    other = hopper(delay.clone(), seed=5)
    play(other, 2)
    for key, known in state["history"].items():
        assert torch.equal(delay.get_extra_state()["history"][key], known)


@pytest.mark.parametrize(
    ("made", "num_envs", "message"),
    [(4, N, r"\[5, 4\] steps and simulations \(expected \[2, 4\]"), (1, 2, r"\[2, 2\] steps")],
)
def test_a_state_of_another_delay_or_number_of_simulations_is_refused(made, num_envs, message):
    other, env = hopper(ObservationDelay(made), num_envs=num_envs), hopper(ObservationDelay(1))
    other.reset()
    env.reset()
    with pytest.raises(ConfigError, match=f"state of ObservationDelay: {message}"):
        env.load_state_dict(other.state_dict())


MAKERS = {
    "noise": lambda: ObservationNoise(0.1),
    "observation delay": lambda: ObservationDelay((0, 3)),
    "action delay": lambda: ActionDelay((0, 3)),
    "scaling": ActionScaling,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_specs_hold(make: Callable[[], Transform], dtype: torch.dtype) -> None:
    env = hopper(make(), dtype=dtype, max_episode_steps=3)
    check_env_specs(env)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_torch_seed_repeats_a_run(make: Callable[[], Transform]) -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append(play(hopper(make(), max_episode_steps=4), 10)[0])
    assert (runs[0] == runs[1]).all()


# Noise


def test_noise_has_the_deviation_asked_for_and_leaves_reward_and_physics_alone() -> None:
    torch.manual_seed(0)
    std = torch.zeros(11)
    std[3] = 0.5
    noisy, _ = play(hopper(ObservationNoise(std)), 100)
    clean, _ = play(hopper(), 100)
    noise = noisy["next", "observation"] - clean["next", "observation"]
    assert noise[..., 3].std().item() == pytest.approx(0.5, rel=0.15)
    assert abs(noise[..., 3].mean().item()) < 0.1
    assert not noise[..., [i for i in range(11) if i != 3]].any()
    assert torch.equal(noisy["next", "reward"], clean["next", "reward"])


def test_a_step_begins_with_the_noise_with_which_the_last_one_ended() -> None:
    data, _ = play(hopper(ObservationNoise(0.1), max_episode_steps=6), 20)
    done = data["next", "done"][:, :-1, 0]
    here, there = data["observation"][:, 1:], data["next", "observation"][:, :-1]
    assert torch.equal(here[~done], there[~done])
    assert (here[done] != there[done]).all()


def test_the_first_observation_of_an_episode_is_noisy_too() -> None:
    clean, noisy = hopper(), hopper(ObservationNoise(0.1))
    noise = noisy.reset()["observation"] - clean.reset()["observation"]
    assert (noise != 0).all()
    assert noise.abs().max() < 0.6


def test_rows_that_do_not_step_keep_the_noise_that_they_had() -> None:
    env = hopper(ObservationNoise(0.1))
    root = step(env, env.reset(), actions(1)[0])
    mask = torch.tensor([[True], [False], [True], [False]])
    after = step(env, root.clone(), actions(1)[0], _step=mask)["observation"]
    assert torch.equal(after[1::2], root["observation"][1::2])
    assert (after[::2] != root["observation"][::2]).all()


def test_noise_may_exceed_the_bounds_of_an_observation() -> None:
    spec = Composite(observation=Bounded(-1.0, 1.0, (3,)))
    noisy = ObservationNoise(0.1).transform_observation_spec(spec)["observation"]
    assert noisy == Unbounded((3,), dtype=torch.float32)


def test_noise_leaves_the_critics_group_alone() -> None:
    from torchrl_unilab.envs.robots.quadruped import QuadrupedWalk

    rooms = [MujocoBatchEnv(QuadrupedWalk(), 2, seed=0) for _ in range(2)]
    noisy, clean = TransformedEnv(rooms[0], ObservationNoise(0.1)).reset(), rooms[1].reset()
    assert torch.equal(noisy["critic_observation"], clean["critic_observation"])
    assert (noisy["observation"] != clean["observation"]).all()


# Delays


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_observations_come_late_by_the_delay(delay: int) -> None:
    late, _ = play(hopper(ObservationDelay(delay)), 12)
    clean, _ = play(hopper(), 12)
    true = torch.cat((clean["observation"][:, :1], clean["next", "observation"]), 1)
    for t in range(12):
        expected = true[:, max(t + 1 - delay, 0)]
        ongoing = ~clean["next", "done"][:, : t + 1].any(1).flatten()
        assert torch.equal(late["next", "observation"][ongoing, t], expected[ongoing])


@pytest.mark.parametrize("delay", [0, 2])
def test_actions_take_effect_late_by_the_delay(delay: int) -> None:
    late, _ = play(hopper(ActionDelay(delay, before=0.25)), 6)
    clean = hopper()
    root = clean.reset()
    effective = [torch.full((N, 3), 0.25)] * delay + list(actions(6))
    for t in range(6):
        data, root = clean.step_and_maybe_reset(root.set("action", effective[t]))
        for key in ("observation", "reward"):
            assert torch.equal(late["next", key][:, t], data["next", key])
        assert not data["next", "done"].any()
    assert torch.equal(late["action"], actions(6).transpose(0, 1))


def test_an_episode_that_starts_knows_nothing_of_the_one_before() -> None:
    late = hopper(ObservationDelay(1), ActionDelay(1), max_episode_steps=3)
    plain = hopper(max_episode_steps=3)
    root, true = late.reset(), plain.reset()
    for t, action in enumerate(actions(9)):
        first = true["observation"].clone()
        effective = actions(9)[t - 1] if t % 3 else torch.zeros(N, 3)
        data, root = late.step_and_maybe_reset(root.set("action", action))
        _, true = plain.step_and_maybe_reset(true.set("action", effective))
        # a step late: what was seen when the action was chosen
        assert torch.equal(data["next", "observation"], first)
        assert data["next", "done"].all() == (t % 3 == 2)


def test_a_partial_reset_forgets_the_delayed_of_its_rows_only() -> None:
    env, twin = (hopper(ObservationDelay(2), ActionDelay(2)) for _ in range(2))
    root, twin_root = env.reset(), twin.reset()
    for action in actions(6)[:4]:
        root, twin_root = step(env, root, action), step(twin, twin_root, action)
    mask = torch.tensor([[True], [False], [True], [False]])
    before = root["observation"].clone()
    root = env.reset(root.set("_reset", mask))
    assert torch.equal(root["observation"][1::2], before[1::2])
    started = root["observation"][::2].clone()
    for action in actions(6)[4:]:
        root, twin_root = step(env, root, action), step(twin, twin_root, action)
        assert torch.equal(root["observation"][1::2], twin_root["observation"][1::2])
        assert torch.equal(root["observation"][::2], started)


@pytest.mark.parametrize("delay", [ObservationDelay, ActionDelay])
def test_rows_that_do_not_step_keep_what_is_delayed(delay: type) -> None:
    env, twin = hopper(delay(2)), hopper(delay(2))
    root, twin_root = env.reset(), twin.reset()
    mask = torch.tensor([[True], [True], [False], [True]])
    root = step(env, root, actions(1)[0] * 0.5, _step=mask)
    for action in actions(6):
        root, twin_root = step(env, root, action), step(twin, twin_root, action)
        assert torch.equal(root["observation"][2], twin_root["observation"][2])
    assert (root["observation"][:2] != twin_root["observation"][:2]).any()


@pytest.mark.parametrize("make", [ObservationDelay, ActionDelay])
def test_delays_of_a_range_are_drawn_for_each_row_and_episode(make: type) -> None:
    torch.manual_seed(0)
    delay = make((1, 3))
    env = hopper(delay, num_envs=64)
    root = env.reset()
    first = delay.delays.clone()
    assert set(first.tolist()) == {1, 2, 3}
    mask = torch.arange(64)[:, None] < 32
    env.reset(root.set("_reset", mask))
    assert torch.equal(delay.delays[32:], first[32:])
    assert not torch.equal(delay.delays[:32], first[:32])


def test_each_row_has_its_own_delay() -> None:
    torch.manual_seed(0)
    delay = ObservationDelay((0, np.int64(4)))
    env, clean = hopper(delay), hopper()
    root, true = env.reset(), clean.reset()
    seen = [true["observation"]]
    assert len(set(delay.delays.tolist())) > 1
    for action in actions(8):
        root, true = step(env, root, action), step(clean, true, action)
        seen.append(true["observation"])
        for row, late in enumerate(delay.delays.tolist()):
            assert torch.equal(root["observation"][row], seen[max(len(seen) - 1 - late, 0)][row])


def test_delays_work_on_an_environment_without_batch() -> None:
    from torchrl.envs import GymEnv

    env = TransformedEnv(
        GymEnv("InvertedPendulum-v5"), Compose(ObservationDelay(1), ActionDelay(1))
    )
    check_env_specs(env)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ObservationDelay(-1),
        lambda: ActionDelay((2, 1)),
        lambda: ActionDelay((0, 1, 2)),
        lambda: ActionDelay(1.0),
        lambda: ObservationNoise(-0.1),
        lambda: ObservationNoise([0.1, float("nan")]),
        lambda: ObservationNoise("a"),
        lambda: ObservationNoise([0.1, [0.2]]),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], Transform]) -> None:
    with pytest.raises(ConfigError, match=r"\(expected "):
        make()


def test_noise_of_another_size_than_the_observation_is_refused_with_the_environment() -> None:
    env = TransformedEnv(MujocoBatchEnv("Hopper-v5", 1), ObservationNoise([0.1, 0.2]))
    with closing(env), pytest.raises(ConfigError, match=r"2 numbers in std \(expected one, or 11"):
        env.observation_spec  # noqa: B018


@pytest.mark.parametrize("make", [ObservationNoise, ObservationDelay])
def test_one_key_may_be_given_as_it_is(make: type) -> None:
    assert make(1, in_keys="observation").in_keys == ["observation"]
    assert ActionDelay(1, in_keys_inv="action").in_keys_inv == ["action"]
    env = TransformedEnv(hopper(), make(1, in_keys="obs"))
    with pytest.raises(KeyError, match="obs"):
        env.rollout(1)


def test_a_delay_without_an_environment_says_so() -> None:
    env = hopper()
    data = env.rand_action(env.reset())
    with pytest.raises(RuntimeError, match="has no environment"):
        ActionDelay(1).inv(data)


# TorchRL's own

PENDULUM = partial(MujocoBatchEnv, "InvertedPendulum-v5", 2, seed=0)


def test_action_scaling_maps_one_to_the_end_of_the_control_range() -> None:
    scaled, plain = TransformedEnv(PENDULUM(), ActionScaling()), PENDULUM()
    space, high = scaled.action_spec.space, plain.action_spec.space.high
    assert (space.low.unique().tolist(), space.high.unique().tolist()) == ([-1.0], [1.0])
    assert high.unique().tolist() == [3.0]
    one = scaled.step(scaled.reset().set("action", torch.ones(2, 1)))
    other = plain.step(plain.reset().set("action", high))
    assert torch.equal(one["next", "observation"], other["next", "observation"])
    assert one["action"].unique().tolist() == [1.0]


def test_torchrls_frame_skip_repeats_the_action_and_adds_rewards_before_action_scaling() -> None:
    skipping = TransformedEnv(PENDULUM(), Compose(FrameSkipTransform(3), ActionScaling()))
    plain = PENDULUM()
    once = skipping.step(skipping.reset().set("action", torch.full((2, 1), 0.25)))["next"]
    after, total = plain.reset(), torch.zeros(2, 1)
    for _ in range(3):
        after = plain.step(after.set("action", torch.full((2, 1), 0.75)))["next"]
        total += after["reward"]
    assert torch.equal(once["observation"], after["observation"])
    assert torch.equal(once["reward"], total)


def test_a_tasks_frame_skip_is_physics_steps_per_action() -> None:
    slow = MujocoBatchEnv(replace(make_task("Hopper-v5"), frame_skip=8), N, seed=0)
    fast = hopper()
    action = actions(1)[0]
    once, root = step(slow, slow.reset(), action), fast.reset()
    for _ in range(2):
        root = step(fast, root, action)
    assert torch.equal(once["observation"], root["observation"])
    assert slow.dt == 2 * fast.dt
