from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.transforms import Compose

from tests.support.playing import assert_same, play
from tests.support.processes import wait_for
from tests.support.striking import forked
from torchrl_unilab.envs import MujocoBatchEnv, Outcome, make_task
from torchrl_unilab.envs.gymnasium.pendulums import InvertedPendulum
from torchrl_unilab.envs.randomization import Randomize
from torchrl_unilab.envs.robots.transforms import ActionDelay, ObservationDelay
from torchrl_unilab.envs.task import MujocoTask
from torchrl_unilab.errors import ConfigError

N = 3
SLIPPERY = Randomize("geom_friction[0]", 0.5, 1.5, when="reset")
HEAVY = Randomize(("body_mass", "body_inertia"), 0.8, 1.2)


def make(task: str | MujocoTask, seed: int, **settings: object) -> MujocoBatchEnv:
    settings = {"num_threads": 1, "max_episode_steps": 20, **settings}
    return MujocoBatchEnv(task, N, seed=seed, **settings)


def assert_continues(one: EnvBase, other: EnvBase, played: int, steps: int) -> TensorDictBase:
    """Play `one`, restore `other` from it, and compare what both do then; return it."""
    torch.manual_seed(0)
    _, root = play(one, played)
    random, start = torch.get_rng_state(), root.clone()
    if isinstance(one, TransformedEnv):
        other.load_state_dict(one.state_dict())  # of the transforms, as TorchRL has it
        other.base_env.restore(one.base_env.snapshot())
    else:
        other.restore(one.snapshot())
    expected, _ = play(one, steps, root)
    torch.set_rng_state(random)
    found, _ = play(other, steps, start)
    assert_same(expected, found)
    return expected


RESTORED = {
    # these two compare what the physics derives before a step with what it derives after
    "humanoid": ("Humanoid-v5", {}),
    "ant": ("Ant-v5", {}),
    "arm": ("Pusher-v5", {}),
    "commands": (replace(make_task("QuadrupedWalk"), command_steps=4), {}),
    "models that differ": ("Hopper-v5", {"randomization": [SLIPPERY, HEAVY]}),
    "staggered": ("HalfCheetah-v5", {"stagger": True}),
}


@pytest.mark.parametrize(("task", "settings"), RESTORED.values(), ids=RESTORED)
def test_a_restored_environment_continues_bit_for_bit_over_the_ends_of_episodes(task, settings):
    one, other = (make(task, seed, with_reward_terms=True, **settings) for seed in (0, 9))
    play(other, 5)
    assert assert_continues(one, other, 3, 45)["next", "done"].any()
    if "randomization" in settings:
        for field in ("geom_friction", "body_mass"):
            assert np.array_equal(one.randomizer.values(field), other.randomizer.values(field))


def test_what_is_loaded_is_observed_before_the_physics_runs_and_saved_again_as_it_is():
    one, other, third = (make("Humanoid-v5", seed) for seed in (0, 5, 9))
    _, root = play(one, 7)
    other.restore(one.snapshot())
    third.restore(other.snapshot())
    for env in (other, third):
        placed = [state[:1] for state in env.get_state()]
        seen = env.set_state(*placed, ids=[0])["observation"]
        assert torch.equal(seen[1:], root["observation"][1:])
        assert not torch.equal(seen[0], root["observation"][0])  # derived for the new state


def test_partial_steps_after_loading_move_only_their_rows():
    one, other = make("Ant-v5", 0), make("Ant-v5", 9)
    _, root = play(one, 7)
    other.restore(one.snapshot())
    step = torch.tensor([[True], [False], [True]])
    for mask in (step, ~step, step):
        root = one.rand_action(root).set("_step", mask)
        expected, found = one.step(root.clone())["next"], other.step(root.clone())["next"]
        assert_same(expected.select("observation", "done"), found.select("observation", "done"))
        rows = mask.squeeze(1)
        assert torch.equal(expected["reward"][rows], found["reward"][rows])


def test_delays_continue_with_what_went_in():
    one, other = (
        TransformedEnv(
            make("Hopper-v5", seed), Compose(ObservationDelay((0, 3)), ActionDelay((1, 2)))
        )
        for seed in (0, 9)
    )
    assert_continues(one, other, 30, 40)


def test_a_state_of_another_task_or_number_of_simulations_changes_nothing():
    env, ant = make("Hopper-v5", 0), make("Ant-v5", 0)
    more = MujocoBatchEnv("Hopper-v5", N + 1, num_threads=1)
    renamed = MujocoBatchEnv(replace(make_task("Hopper-v5"), name="Other"), N, num_threads=1)
    different = make("Hopper-v5", 0, randomization=[SLIPPERY])
    env.reset()
    qpos, _ = env.get_state()
    for other in (ant, more, renamed, different):
        with pytest.raises(ValueError, match=r"\(expected .*\)\. (Restore|Load)"):
            env.restore(other.snapshot())
        assert np.array_equal(env.get_state()[0], qpos)
    partly = {key: value for key, value in env.snapshot().items() if key != "derived"}
    with pytest.raises(ConfigError, match=r"restore: no \['derived'\] in it"):
        env.restore(partly)
    for none in ({**env.snapshot(), "generators": []}, None):
        with pytest.raises(ConfigError, match=r"restore: 0 generators \(expected 3, one per"):
            env.restore(none)
    nameless = {key: value for key, value in env.snapshot().items() if key != "task"}
    env.restore(nameless)  # as it was before names were part of it
    env.close()
    with pytest.raises(RuntimeError, match="is closed"):
        env.snapshot()


@dataclass(frozen=True, kw_only=True)
class Judged(InvertedPendulum):
    """A pendulum that is judged by a function of its outcome."""

    judge: Callable[[Outcome], Any]

    def outcome(self, *given: Any) -> Any:
        """What the function makes of the pendulum's."""
        return self.judge(super().outcome(*given))


STEP = "^MujocoBatchEnv.step: .*of Mine .*"
FLAGS = "terminations of Mine are"


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("reward", lambda one: one[:, None], rf"{STEP}shape \(3, 1\) \(expected an array of shape"),
        ("reward", lambda one: one / 0.0 * [0, 1, 1], f"{STEP}are not finite, .* simulation 0"),
        ("reward", lambda one: one * [1, 1, np.nan], f"{STEP}are not finite, .* simulation 2"),
        ("terminated", lambda _: False, rf"{FLAGS} \w+ of shape \(\)"),
        ("terminated", lambda one: one[:, None], rf"{FLAGS} \w+ of shape \(3, 1\)"),
        ("terminated", lambda one: one[:1], rf"{FLAGS} \w+ of shape \(1,\)"),
        ("terminated", lambda one: one * 1.0, rf"{FLAGS} .*of float64 \(expected"),
        ("terminated", lambda one: one.astype(np.int8), rf"{FLAGS} .*of int8 \(expected"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_rewards_and_terminations_that_are_none_are_refused_by_the_tasks_name(
    part, change, message
):
    def judge(outcome: Outcome) -> Outcome:
        return replace(outcome, **{part: change(getattr(outcome, part))})

    env = make(Judged(name="Mine", judge=judge), 0)
    action = env.rand_action(env.reset())
    with pytest.raises(ConfigError, match=message):
        env.step(action)


@pytest.mark.parametrize("terms", [False, True])
@pytest.mark.parametrize(
    ("judge", "message"),
    [
        (lambda _: None, r"^outcome of Mine: NoneType \(expected Outcome\)"),
        (
            lambda outcome: replace(outcome, terms={"part": outcome.reward[:, None]}),
            r"part of Mine are ndarray of shape \(3, 1\) \(expected an array of shape \(3,\)\)",
        ),
        (
            lambda outcome: replace(outcome, reward=torch.tensor(outcome.reward)),
            r"rewards of Mine are Tensor of shape \(3,\) \(expected an array of shape \(3,\)\)",
        ),
        (
            lambda outcome: replace(outcome, info={"speed": 1.0}),
            r"info 'speed' of Mine is float of shape \(\) \(expected an array, 3 sim",
        ),
        (
            lambda outcome: replace(outcome, info={"speed": [1.0, 2.0, 3.0]}),
            r"info 'speed' of Mine is list of shape \(3,\) \(expected an array, 3 sim",
        ),
    ],
)
def test_outcomes_and_parts_of_rewards_that_are_none_are_refused(judge, message, terms):
    task = Judged(name="Mine", judge=judge)
    with pytest.raises(ConfigError, match=message):
        make(task, 0, with_reward_terms=terms).rollout(1)


@dataclass(frozen=True, kw_only=True)
class Commanded(InvertedPendulum):
    """A pendulum with two commands."""

    command_size: int = 2
    drawn: Any = None

    def command(self, rng: Any) -> Any:
        """What it was given."""
        return self.drawn


@pytest.mark.parametrize("drawn", [0.5, None, np.zeros(3), [0.0, np.nan], ["a", "b"]])
def test_commands_that_are_none_are_refused_by_the_tasks_name(drawn):
    env = make(Commanded(name="Mine", drawn=drawn), 0)
    with pytest.raises(ConfigError, match=r"^command of Mine .*\(expected .*\(2,\)"):
        env.reset()


@pytest.mark.parametrize(
    "key", ["action", "done", "next", "pixels", "reward", "reward_terms", "terminated", "truncated"]
)
def test_observations_by_the_name_of_something_else_are_refused(key):
    class Named(InvertedPendulum):
        def observations(self, fields):
            return {key: self.observation(fields)}

    with pytest.raises(ConfigError, match=rf"of Mine returned \['{key}'\] \(expected groups"):
        make(Named(name="Mine"), 0)


@dataclass(frozen=True, kw_only=True)
class Observed(InvertedPendulum):
    """A pendulum that is observed by a function of its fields."""

    see: Callable[[Any], Any]

    def observation(self, fields: Any) -> Any:
        """What the function returns."""
        return self.see(fields)


@pytest.mark.parametrize(
    ("see", "error", "message"),
    [
        (lambda fields: (fields["qpos"][:, 0],), ValueError, r"'observation' of Mine .* \[.3,.\]"),
        (lambda fields: fields["qpos"], ValueError, r"'observation' of Mine .* \[\(2,\), "),
        (lambda fields: (fields["xpos"],), KeyError, r"'xpos': not read .* Add it to `reads`"),
    ],
    ids=["a part without width", "no parts", "a field that is not read"],
)
def test_observations_of_a_task_that_are_none_are_refused_when_it_is_made(see, error, message):
    with pytest.raises(error, match=message):
        make(Observed(name="Mine", see=see), 0)


def test_a_forked_process_may_not_step_the_threads_of_its_parent_but_drop_them_and_make_its_own():
    env = make("InvertedPendulum-v5", 0, num_threads=2)
    other = make("InvertedPendulum-v5", 0, num_threads=2)

    def use() -> None:
        nonlocal other
        with pytest.raises(
            RuntimeError, match=r"whose threads are not in its fork .* new one here"
        ):
            env.rollout(2)
        env.close()
        del other
        gc.collect()
        with contextlib.closing(make("InvertedPendulum-v5", 0, num_threads=2)) as own:
            own.rollout(2)

    with forked(use) as child:
        wait_for(lambda: os.waitpid(child, os.WNOHANG) == (child, 0))
    assert env.rollout(2).shape == (N, 2)


def test_what_is_moved_to_a_device_gives_tensors_of_it():
    env = make("InvertedPendulum-v5", 0)
    env.__dict__["_device"] = torch.device("meta")  # as `EnvBase.to` does, past its specs
    found = env._reset()
    assert {leaf.device.type for leaf in found.values()} == {found.device.type} == {"meta"}


@pytest.mark.parametrize(
    ("see", "message"),
    [
        (
            lambda qpos: qpos if (qpos < 1.0).all() else qpos[:, :1],
            r"has shape \(3, 1\) \(expected \(3, 2",
        ),
        (
            lambda qpos: qpos if (qpos < 1.0).all() else qpos[:2],
            r"has shape \(2, 2\) \(expected \(3, 2",
        ),
        (lambda qpos: qpos.astype(str), "cannot be observed, Cannot cast"),
    ],
)
def test_an_observation_that_changes_is_refused_by_its_name(see, message):
    env = make(Observed(name="Mine", see=lambda fields: (see(fields["qpos"]),)), 0)
    with pytest.raises(ConfigError, match=rf"'observation' of Mine {message}"):
        env.set_state([[2.0, 0.0]] * 3, [[0.0, 0.0]] * 3)


@dataclass(frozen=True, kw_only=True)
class Started(InvertedPendulum):
    """A pendulum whose episodes start where a function says."""

    begin: Callable[[NDArray[Any]], Any]

    def initial_state(self, rng: Any, qpos: Any, qvel: Any) -> Any:
        """What the function makes of the default pose."""
        begun = self.begin(qpos)
        return begun if begun is qpos else (begun, qvel)


@pytest.mark.parametrize(
    ("begin", "message"),
    [
        (lambda qpos: qpos * np.nan, r"qpos has shape \(3, 2\) and 6 non-finite values"),
        (lambda qpos: qpos[:1], r"qpos has shape \(3, 1\) and 0 non-finite"),
        (lambda _: "pose", "qpos is no array, could not convert"),
        (lambda _: torch.ones(2, requires_grad=True), "qpos is no array, Can't call numpy"),
        (lambda qpos: qpos, r"no pair \(expected pos"),  # without velocities
    ],
)
def test_states_to_start_from_that_are_none_are_refused_by_the_tasks_name(begin, message):
    env = make(Started(name="Mine", begin=begin), 0)
    with pytest.raises(ValueError, match=rf"initial_state of Mine: {message}"):
        env.reset()


def test_episodes_that_start_from_given_states_have_commands_and_models_of_their_own():
    heavy = Randomize("body_mass", 0.5, 2.0, objects=("torso",), when="reset")
    env = MujocoBatchEnv("QuadrupedWalk", N, seed=0, num_threads=1, randomization=[heavy])
    masses = []
    for _ in range(2):
        env.set_state(*env.get_state())
        assert (env._state.physics.fields["command"] >= 0.2).all()
        masses.append(env.randomizer.values("body_mass").copy())
    assert (masses[0] != masses[1]).any(1).all()


def test_a_longer_time_limit_than_that_of_a_snapshot_continues():
    one, other = (make("Hopper-v5", 0, max_episode_steps=steps) for steps in (5, 500))
    one.rollout(5)
    other.restore(one.snapshot())
    assert not other._state.episodes.truncated.any()


def test_a_snapshot_of_another_frame_skip_is_refused_and_an_old_one_that_has_none_is_restored():
    one, other = (make(make_task("Hopper-v5", frame_skip=skip), 0) for skip in (4, 8))
    with pytest.raises(ConfigError, match=r"of frame_skip 4 \(expected 8, the task's\)"):
        other.restore(snapshot := one.snapshot())
    del snapshot["frame_skip"]
    other.restore(snapshot)


def test_reward_terms_are_there_after_a_snapshot_that_has_none():
    one, other = (make("Hopper-v5", 0, with_reward_terms=terms) for terms in (False, True))
    one.reset()
    other.restore(one.snapshot())
    names = set(other.observation_spec["reward_terms"].keys())
    assert set(other.reset()["reward_terms"].keys()) == names
    third = make("Hopper-v5", 9)
    play(third, 2)
    third.restore(one.snapshot())
    assert third.snapshot()["reward_terms"] == {}


def test_a_reset_takes_a_seed():
    env = make("Hopper-v5", 0)
    first, again, other = (env.reset(seed=seed)["observation"] for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
