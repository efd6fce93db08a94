"""A task's simulations with their episodes, generators and rewards: an environment in NumPy.

It holds all that later steps follow from, so a snapshot of it is a snapshot of the environment.
`MujocoBatchEnv` is the TorchRL environment over it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torchrl_unilab.checks import as_choice, as_integer
from torchrl_unilab.envs.episodes import Episodes
from torchrl_unilab.envs.mujoco_engine import logger
from torchrl_unilab.envs.randomization import Ids, Randomize
from torchrl_unilab.envs.simulations import Simulations, all_finite
from torchrl_unilab.envs.task import Array, MujocoTask, checked_outcome
from torchrl_unilab.errors import ConfigError, UsageError
from torchrl_unilab.limits import available_cores
from torchrl_unilab.runtime.budget import plan_threads


class EnvState:
    """The state of an environment, one row per simulation.

    Args:
        task: The task.
        num_envs: Number of simulations.
        num_threads: Physics threads; None for one per CPU but the learner's.
        max_episode_steps: Steps after which an episode is truncated; None as the task says.
        randomization: How the models differ; None as the task says.
        stagger: Whether the first episodes after a seed have limits of their own, drawn
            between 1 and the limit, so that simulations are not in step with each other.

    Attributes:
        episodes: The progress of each episode.
        randomizer: Holds what differs between the models.
        dt: Seconds of simulated time that a step takes.
        reward_terms: The parts of the last step's reward, ``(n,)`` each.
        shown_terms: These as they are returned with observations: 0 where an episode starts.
        info: Further quantities of the last step, ``(n, ...)`` each; none after a restore.
        num_diverged: Simulations that have diverged so far.
        phase_seconds: Seconds so far by phase.

    Raises:
        ConfigError: A number is not positive.
    """

    def __init__(
        self,
        task: MujocoTask,
        num_envs: int,
        num_threads: int | None,
        max_episode_steps: int | None,
        randomization: Sequence[Randomize] | None,
        stagger: bool,
    ) -> None:
        if num_threads is None:
            num_threads = plan_threads(available_cores()).physics_threads
        limit = task.max_episode_steps if max_episode_steps is None else max_episode_steps
        as_integer("MujocoBatchEnv num_envs", num_envs, "Use 1 or more simulations.")
        as_integer("MujocoBatchEnv num_threads", num_threads, "Leave it out for the default.")
        as_integer("MujocoBatchEnv frame_skip", task.frame_skip, "Use 1 to skip none.")
        as_integer("MujocoBatchEnv max_episode_steps", limit, "Use 1000, for example.")
        as_choice("MujocoBatchEnv stagger", stagger, (False, True), "Leave it out for False.")
        if task.command_steps is not None:
            remedy = "Use None for one command per episode."
            as_integer("MujocoBatchEnv command_steps", task.command_steps, remedy)
        self.task = task
        self._physics: Simulations | None = Simulations(task, num_envs, num_threads, randomization)
        self.randomizer = self._physics.randomizer
        self._process = os.getpid() if num_threads > 1 else None  # one thread is the caller's
        self.dt = float(self._physics.batch.model.opt.timestep * task.frame_skip)
        self.episodes = Episodes(num_envs, limit)
        self._stagger = bool(stagger)
        self.reward_terms: dict[str, NDArray[Any]] = {}
        self.shown_terms: dict[str, NDArray[Any]] = {}
        self._shows_terms = False
        self.info: dict[str, NDArray[Any]] = {}
        self.num_diverged = 0
        self.phase_seconds = dict.fromkeys(("physics", "reward", "observation", "reset"), 0.0)

    def __len__(self) -> int:
        return len(self.episodes)

    @property
    def physics(self) -> Simulations:
        """The simulations.

        Raises:
            UsageError: The environment is closed, or its threads are another process's.
        """
        if self._physics is None:
            raise UsageError(
                "MujocoBatchEnv: the environment is closed (expected an open one). "
                "Create a new one."
            )
        if self._process not in (None, os.getpid()):
            raise UsageError(
                f"MujocoBatchEnv: made in process {self._process}, whose threads are not in its "
                f"fork {os.getpid()} (expected one of this process). Create a new one here."
            )
        return self._physics

    def close(self) -> None:
        """Free the simulations and their threads. Closing again does nothing."""
        self.randomizer.close()
        self._physics = None

    def seed(self, seed: int | None) -> None:
        """Seed simulation ``i`` with ``seed + i``; all from the operating system for None.

        Raises:
            ConfigError: The seed is below 0; nothing has changed.
        """
        if seed is not None:
            seed = as_integer("MujocoBatchEnv seed", seed, "Use 0, for example.", least=0)
        self._rngs = [
            np.random.default_rng(None if seed is None else seed + i) for i in range(len(self))
        ]
        self.randomizer.seed(self._rngs)
        self._to_stagger = np.full(len(self), self._stagger)

    def control_range(self) -> Array:
        """Return the lowest and highest controls, ``(2, nu)``.

        Raises:
            ConfigError: There is no actuator, or one has no control range.
        """
        model = self.physics.batch.model
        if not model.nu:
            raise ConfigError(
                f"MujocoBatchEnv: {self.task.name} has no actuators (expected at least one, which "
                "the actions move). Add actuators to the model."
            )
        limits: Array = model.actuator_ctrlrange.T.copy()
        endless = np.ptp(limits, axis=0) > np.finfo(np.float32).max  # no action is drawn there
        unlimited = np.flatnonzero((model.actuator_ctrllimited == 0) | endless)
        if len(unlimited):
            names = [model.actuator(int(i)).name for i in unlimited]
            raise ConfigError(
                f"MujocoBatchEnv: actuators {names} of {self.task.name} have no control range, or "
                "one without end (expected bounds of the action). Set their ctrlrange in the model."
            )
        return limits

    def expect_terms(self, dtype: type) -> Sequence[str]:
        """Show all reward terms as 0 until the first step; return their names."""
        physics, task = self.physics, self.task
        action: NDArray[Any] = np.zeros((len(self), physics.num_controls), dtype=dtype)
        before = task.before(physics.fields)
        terms = checked_outcome(task, physics.fields, before, action, self.dt).terms
        self.reward_terms = self.shown_terms = dict.fromkeys(terms, np.zeros(len(self)))
        self._shows_terms = True
        return list(terms)

    def step(self, action: NDArray[Any], ids: Ids | None) -> NDArray[Any]:
        """Take a control step in simulations `ids`, sorted; in all for None.

        Args:
            action: ``(n, nu)``, contiguous.
            ids: The simulations.

        Returns:
            Rewards, ``(n,)``, 0 in the others.

        Raises:
            ConfigError: The action has the wrong shape or is not finite, and nothing has
                changed then; or if the task's rewards are.
        """
        task, physics = self.task, self.physics
        self._check_action(action, physics)
        start = time.perf_counter()
        before = task.before(physics.fields)
        diverged = physics.step(action, ids)
        start = self.count("physics", start)
        outcome = checked_outcome(task, physics.fields, before, action, self.dt)
        reward, terminated = outcome.reward, outcome.terminated
        terms, info = outcome.terms, outcome.info
        if diverged is not None:
            self._report_divergence(diverged)
            # the task's outcome of the jump to the default pose is meaningless
            reward = np.where(diverged, 0.0, reward)
            terminated = terminated | diverged
            terms = {name: np.where(diverged, 0.0, term) for name, term in terms.items()}
            info = {name: np.where(diverged, 0, part.T).T for name, part in info.items()}
        self._check_finite(reward, terms)
        if ids is not None:
            stepped = np.isin(np.arange(len(reward)), ids)
            reward = np.where(stepped, reward, 0.0)
            terms = {name: np.where(stepped, term, 0.0) for name, term in terms.items()}
        self.reward_terms = self.shown_terms = terms
        self.info = info
        self.episodes.advance(terminated, ids)
        if task.command_steps is not None:
            due = self.episodes.elapsed % task.command_steps == 0
            self._draw_commands(np.flatnonzero(due) if ids is None else ids[due[ids]])
        self.count("reward", start)
        return reward

    def start(self, ids: Ids) -> None:
        """Start episodes of simulations `ids`, sorted, from states that the task draws."""
        if not len(ids):
            return
        start = time.perf_counter()
        default = self.physics.start
        states = [self.task.initial_state(self._rngs[i], *default) for i in ids]
        what = f"initial_state of {self.task.name}"
        if any(not isinstance(state, tuple | list) or len(state) != 2 for state in states):
            raise ConfigError(f"{what}: no pair (expected positions and velocities). Return both.")
        qpos, qvel = zip(*states, strict=True)
        self._place(ids, *self._checked_state(what, qpos, qvel, ids))
        staggered = ids[self._to_stagger[ids]]
        if len(staggered):
            elapsed = [self._rngs[i].integers(self.episodes.limit) for i in staggered]
            self.episodes.start(staggered, np.array(elapsed))
            self._to_stagger[staggered] = False
        self.count("reset", start)

    def set_state(self, qpos: ArrayLike, qvel: ArrayLike, ids: ArrayLike | None) -> Ids:
        """Start new episodes from given states; return the simulations, sorted.

        Raises:
            ConfigError: An argument has the wrong shape, is not finite, or names
                no simulation. Nothing has changed then.
        """
        rows = simulations_of("set_state: ids", ids, len(self))
        values = self._checked_state("set_state", qpos, qvel, rows)
        order = np.argsort(rows)  # the batch takes sorted ids
        self._place(rows[order], *(value[order] for value in values))
        return rows[order]

    def _checked_state(self, what: str, qpos: Any, qvel: Any, rows: Ids) -> list[Array]:
        """Return states for these simulations as arrays of finite numbers, a row for each."""
        fields, remedy = self.physics.fields, "Give a row of numbers for each simulation."
        return [
            _numbers(f"{what}: {name}", value, (len(rows), fields[name].shape[1]), remedy)
            for name, value in (("qpos", qpos), ("qvel", qvel))
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all that the next steps follow from."""
        return {
            **self.physics.state_dict(),
            "episodes": self.episodes.state_dict(),
            "to_stagger": self._to_stagger.copy(),
            "reward_terms": {name: term.copy() for name, term in self.shown_terms.items()},
            "num_diverged": self.num_diverged,
            "frame_skip": self.task.frame_skip,
            "generators": [rng.bit_generator.state for rng in self._rngs],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, here or in a state like this one.

        Raises:
            ConfigError: The state is of another task or number of simulations. Nothing has
                changed then.
        """
        generators = state.get("generators", ()) if isinstance(state, Mapping) else ()
        if (found := len(generators)) != len(self):
            raise ConfigError(
                f"restore: {found} generators (expected {len(self)}, one per simulation). Restore "
                "what `snapshot` returned."
            )
        skip = self.task.frame_skip
        if (saved_skip := state.get("frame_skip", skip)) != skip:  # old ones do not say
            raise ConfigError(
                f"restore: a snapshot of frame_skip {saved_skip} (expected {skip}, the task's). "
                "Restore it into an environment of the same task."
            )
        self.physics.load_state_dict(state)
        self.episodes.load_state_dict(state["episodes"])
        self._to_stagger[...] = state["to_stagger"]
        known = dict.fromkeys(self.shown_terms, np.zeros(len(self))) if self._shows_terms else {}
        saved = {name: term.copy() for name, term in state["reward_terms"].items()}
        self.reward_terms = self.shown_terms = known | saved
        self.info, self.num_diverged = {}, state["num_diverged"]
        for rng, generator in zip(self._rngs, state["generators"], strict=True):
            rng.bit_generator.state = generator

    def count(self, phase: str, start: float) -> float:
        """Count the time since `start` for a phase; return the present time."""
        now = time.perf_counter()
        self.phase_seconds[phase] += now - start
        return now

    def _check_finite(self, reward: NDArray[Any], terms: Mapping[str, NDArray[Any]]) -> None:
        if not all_finite(reward):
            bad = np.flatnonzero(~np.isfinite(reward))
            wrong = [name for name, term in terms.items() if not all_finite(term)]
            raise ConfigError(
                f"MujocoBatchEnv.step: {len(bad)} rewards of {self.task.name} are not finite, the "
                f"first in simulation {bad[0]}, by the terms {wrong} (expected none). Check "
                "whether actions are huge, or correct the task's rewards."
            )

    def _check_action(self, action: NDArray[Any], physics: Simulations) -> None:
        shape = (len(self), physics.num_controls)
        if action.shape != shape:
            raise ConfigError(
                f"MujocoBatchEnv.step: action has shape {action.shape} (expected "
                f"{shape}). Give one row of controls per simulation."
            )
        if not all_finite(action):
            seen = self.task.observations(physics.fields)
            wrong = [key for key, parts in seen.items() if not all(map(all_finite, parts))]
            remedy = f"Correct the task: its {wrong} is not finite" if wrong else "Check the policy"
            raise ConfigError(
                f"MujocoBatchEnv.step: action has {(~np.isfinite(action)).sum()} "
                f"non-finite values (expected none). {remedy}."
            )

    def _place(self, ids: Ids, qpos: Array, qvel: Array) -> None:
        """Start episodes of simulations `ids`, sorted, from these states: all else is drawn."""
        self.randomizer.reset(ids)
        self._draw_commands(ids)
        self.physics.place(ids, qpos, qvel)
        if self._shows_terms:
            started = np.isin(np.arange(len(self)), ids)
            terms = self.shown_terms.items()
            self.shown_terms = {name: np.where(started, 0.0, term) for name, term in terms}
        self.episodes.start(ids)

    def _draw_commands(self, ids: Ids) -> None:
        """Draw new commands for simulations `ids`, if the task has commands."""
        what, remedy = f"command of {self.task.name}", "Correct the task's `command`."
        for i in ids if self.task.command_size else ():
            drawn = self.task.command(self._rngs[i])
            numbers = _numbers(what, drawn, (self.task.command_size,), remedy)
            self.physics.fields["command"][i] = numbers

    def _report_divergence(self, diverged: NDArray[np.bool_]) -> None:
        """Count simulations that diverged; log the first, and each doubling of their number."""
        known, count = self.num_diverged, int(diverged.sum())
        self.num_diverged = known + count
        if self.num_diverged.bit_length() > known.bit_length():
            logger.warning(
                f"MujocoBatchEnv: simulations {np.flatnonzero(diverged).tolist()} of "
                f"{self.task.name} diverged (expected finite states); {self.num_diverged} have "
                "since the start. They were reset. Check the actions, or give the model a smaller "
                "timestep."
            )


def simulations_of(what: str, ids: ArrayLike | None, n: int) -> Ids:
    """Return the simulations that `ids` names, distinct; all for None.

    Raises:
        ConfigError: `ids` are not distinct integers from 0 to n - 1.
    """
    try:
        rows = np.arange(n) if ids is None else np.asarray(ids)
    except ValueError:  # nested lists of unequal lengths
        rows = np.empty(())
    if rows.shape == (0,):
        rows = rows.astype(np.intp)
    whole = rows.ndim == 1 and rows.dtype.kind in "iu"
    if not whole or len(np.unique(rows)) != len(rows) or ((rows < 0) | (rows >= n)).any():
        raise ConfigError(
            f"{what} is {ids!r} (expected distinct integers from 0 to {n - 1}). Pass each id once, "
            "from this range."
        )
    return rows


def _numbers(what: str, value: Any, shape: tuple[int, ...], remedy: str) -> Array:
    """Return finite numbers of a shape; else a ConfigError."""
    try:
        numbers = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:  # tensors raise the last
        raise ConfigError(
            f"{what} is no array, {error} (expected numbers of shape {shape}). {remedy}"
        ) from error
    if numbers.shape != shape or not all_finite(numbers):
        raise ConfigError(
            f"{what} has shape {numbers.shape} and {(~np.isfinite(numbers)).sum()} non-finite "
            f"values (expected {shape} and none). {remedy}"
        )
    return numbers
