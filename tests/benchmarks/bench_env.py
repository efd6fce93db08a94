"""Steps per second of the batched environment beside the bare physics and its peers.

Run as a script::

    python -m tests.benchmarks.bench_env --tasks HalfCheetah-v5 Humanoid-v5 --envs 64 1024

For each task, number of simulations and number of threads, all ways of stepping take turns of
a few hundredths of a second, so that load from elsewhere falls on each alike; the tables show
the median turn of each, and the median over the turns of each ratio.

*mujoco.batch* steps the task's physics and nothing else (no contact forces, which Gymnasium's
humanoids observe and MuJoCo computes on request), from the same states and with the
same controls as *step*, which is `EnvBase.step` of ours: neither restarts anything, and that
both end in the same states is checked. *unclocked* is the same without MuJoCo's own timing of
its steps, which ours switches off. *rollout* is ``EnvBase.rollout`` over the steps of a turn with
a policy that only looks an action up, which restarts what ended and stacks all of it.
*restarting* is our `step_and_maybe_reset`, which starts the next episodes, beside *EnvPool*,
which does the same inside its `step`. *ParallelEnv* and *AsyncEnvPool* (by shared memory) are
TorchRL's, *AsyncVectorEnv* Gymnasium's, of so many workers with one environment each, whatever
the number of simulations, by turns of 20 steps.
EnvPool is a dependency of this benchmark alone: ``pip install '.[peers]'``.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import envpool
import gymnasium
import mujoco
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv
from mujoco.batch import Batch
from numpy.typing import NDArray
from torchrl._utils import logger as torchrl_logger
from torchrl.envs import AsyncEnvPool, EnvBase, GymEnv, ParallelEnv, step_mdp

from torchrl_unilab.envs import MujocoBatchEnv, make_task
from torchrl_unilab.envs.mujoco_engine import stop_physics_clock

ACTIONS = 50
PEER_STEPS = 20  # of a turn


@dataclass(frozen=True)
class Way:
    """A way of stepping.

    Attributes:
        restart: Called before a round of turns, untimed.
        step: Takes the so-manieth step of a round.
        clocked: Whether MuJoCo times its steps meanwhile, as it does unless told.
        steps: Steps of a turn, where it is not that of the others.
    """

    restart: Callable[[], object]
    step: Callable[[int], object]
    clocked: bool = True
    steps: int | None = None


class Physics:
    """The bare physics of a task, from the states of an environment.

    Args:
        env: Where the rounds start.
        controls: ``(steps, envs, nu)``.
        threads: Threads that step it.
    """

    def __init__(self, env: MujocoBatchEnv, controls: NDArray[np.float64], threads: int) -> None:
        self.env, self.controls, self.frame_skip = env, controls, env.task.frame_skip
        bare = replace(env.task, reads=()).load_model()  # without what only observations need
        self.batch = Batch(bare, controls.shape[1], threads)
        self.batch.reset()
        self.ctrl, self.qpos, self.qvel = map(self.batch.bind, ("ctrl", "qpos", "qvel"))

    def restart(self) -> None:
        """Start where the environment is."""
        # physics costs what its state makes it cost, so all start from like states
        self.batch.reset()
        self.qpos[:], self.qvel[:] = self.env.get_state()
        self.batch.forward()

    def step(self, i: int) -> None:
        """Step."""
        self.ctrl[:] = self.controls[i]
        self.batch.step(nstep=self.frame_skip)

    def check(self) -> None:
        """Refuse to go on if the environment is elsewhere."""
        if not np.array_equal(self.qpos, self.env.get_state()[0]):
            raise RuntimeError("bench_env: physics and step ended in other states.")


class Stepping:
    """A task in so many simulations on so many threads, stepped in several ways.

    Args:
        name: The task.
        envs: Simulations.
        threads: Threads that step physics.
        steps: Steps of a round.
        turn: Steps of a turn.
    """

    def __init__(self, name: str, envs: int, threads: int, steps: int, turn: int) -> None:
        task = make_task(name)
        self.turn = turn
        self.rolling = MujocoBatchEnv(task, envs, num_threads=threads, seed=0)
        self.env = MujocoBatchEnv(task, envs, num_threads=threads, seed=0)
        self.restarting = MujocoBatchEnv(task, envs, num_threads=threads, seed=0)
        space = self.env.action_spec.space
        noise = torch.rand(steps, *space.low.shape)
        self.actions = space.low + (space.high - space.low) * noise
        self.controls = self.actions.double().numpy()
        self.physics = Physics(self.env, self.controls, threads)
        self.unclocked = Physics(self.env, self.controls, threads)
        self.peer = envpool.make(
            name, env_type="gymnasium", num_envs=envs, num_threads=threads, seed=0
        )

    def ways(self) -> dict[str, Way]:
        """The contenders, in the order in which they restart."""
        return {
            "step": Way(self._restart, self._step, clocked=False),
            "mujoco.batch": Way(self.physics.restart, self.physics.step),
            "unclocked": Way(self.unclocked.restart, self.unclocked.step, clocked=False),
            "rollout": Way(self._restart_rolling, self._roll, clocked=False),
            "restarting": Way(self._restart_restarting, self._restart_and_step, clocked=False),
            "EnvPool": Way(self.peer.reset, lambda i: self.peer.step(self.controls[i])),
        }

    def check(self) -> None:
        """Refuse to go on if the bare physics did other work than ours."""
        self.physics.check()
        self.unclocked.check()

    def close(self) -> None:
        """Free all of it."""
        for env in (self.env, self.rolling, self.restarting):
            env.close()
        self.peer.close()

    def _restart(self) -> None:
        self.env.set_seed(0)
        root = self.env.reset()
        self.roots = [root.copy().set("action", action) for action in reversed(self.actions)]

    def _step(self, i: int) -> None:
        self.env.step(self.roots.pop())  # which lets go of what the step before returned

    def _restart_rolling(self) -> None:
        self.rolling.set_seed(0)
        self.rolling_root = self.rolling.reset()

    def _roll(self, i: int) -> None:
        if i % self.turn:
            return  # the first step of a turn took all
        actions = iter(self.actions[i : i + self.turn])
        rollout = self.rolling.rollout(
            self.turn,
            lambda td: td.set("action", next(actions)),  # a name that TorchRL knows
            auto_reset=False,
            break_when_any_done=False,
            tensordict=self.rolling_root,
        )
        self.rolling_root = step_mdp(rollout[..., -1])

    def _restart_restarting(self) -> None:
        self.restarting.set_seed(0)
        self.restarting_root = self.restarting.reset()

    def _restart_and_step(self, i: int) -> None:
        root = self.restarting_root.set("action", self.actions[i])
        _, self.restarting_root = self.restarting.step_and_maybe_reset(root)


@contextlib.contextmanager
def gym_workers(name: str, workers: int) -> Iterator[dict[str, Way]]:
    """TorchRL's and Gymnasium's environments of processes, stepped by random actions."""
    makers = [partial(GymEnv, name)] * workers
    with contextlib.ExitStack() as stack:
        ways = {}
        for kind, env in (
            ("ParallelEnv", ParallelEnv(workers, makers)),
            ("AsyncEnvPool", AsyncEnvPool(makers, backend="multiprocessing", exchange="shm")),
        ):
            stack.callback(env.close)
            ways[kind] = torchrl_way(env)
        vector = AsyncVectorEnv([partial(gymnasium.make, name)] * workers)
        stack.callback(vector.close)
        actions = [vector.action_space.sample() for _ in range(ACTIONS)]
        ways["AsyncVectorEnv"] = Way(
            vector.reset, lambda i: vector.step(actions[i % ACTIONS]), steps=PEER_STEPS
        )
        yield ways


def torchrl_way(env: EnvBase) -> Way:
    """A way to step an environment of TorchRL's."""
    actions = [env.action_spec.rand() for _ in range(ACTIONS)]
    root = env.reset()

    def restart() -> None:
        nonlocal root
        root = env.reset()

    def step(i: int) -> None:
        nonlocal root
        root["action"] = actions[i % ACTIONS]
        _, root = env.step_and_maybe_reset(root)

    return Way(restart, step, steps=PEER_STEPS)


def race(
    ways: dict[str, Way], rounds: int, turns: int, turn: int, check: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds of each turn, by contender.

    Args:
        ways: The contenders.
        rounds: All restart before each; the first one warms up.
        turns: Turns of each contender in a round.
        turn: Steps of a turn.
        check: Called after each round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(rounds + 1):
        for way in ways.values():
            way.restart()
        for first in range(0, turns * turn, turn):
            names = [*names[1:], names[0]]
            for name in names:
                set_clock(ways[name].clocked)
                step, count = ways[name].step, ways[name].steps or turn
                start = time.perf_counter()
                for i in range(first, first + count):
                    step(i)
                if number:
                    seconds[name].append(time.perf_counter() - start)
        check()
    return seconds


def set_clock(on: bool) -> None:
    """Have MuJoCo time its steps, or not."""
    if on:
        mujoco.set_mjcb_time(None)
    else:
        stop_physics_clock()


def ratio(
    seconds: dict[str, list[float]], ours: str, theirs: str, steps: tuple[int, int] = (1, 1)
) -> float:
    """How many times as fast, the median of the turns, given the steps of a turn of both."""
    mine, other = steps
    return float(median(np.divide(seconds[theirs], seconds[ours]))) * mine / other


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=["HalfCheetah-v5", "Humanoid-v5"])
    parser.add_argument("--envs", nargs="+", type=int, default=[64, 1024])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--steps", type=int, default=40, help="of each simulation, in a round")
    parser.add_argument("--turn", type=int, default=1280, help="steps of all, in a turn")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--workers", type=int, default=8, help="of ParallelEnv and its like")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torchrl_logger.setLevel("ERROR")
    print(
        "| task | simulations | threads | mujoco.batch | step | of it | of unclocked "
        "| rollout | of unclocked | restarting "
        "| EnvPool | of it | ParallelEnv | of it | AsyncEnvPool | of it | AsyncVectorEnv "
        "| of it |\n"
        "|---|" + "---:|" * 17
    )
    for task in args.tasks:
        with gym_workers(task, args.workers) as gym_ways:
            for envs in args.envs:
                for threads in args.threads:
                    turn = max(1, args.turn // envs)
                    turns = max(1, args.steps // turn)
                    stepping = Stepping(task, envs, threads, turn * turns, turn)
                    ways = stepping.ways() | gym_ways
                    seconds = race(ways, args.rounds, turns, turn, stepping.check)
                    stepping.close()
                    steps = {
                        name: args.workers * way.steps if way.steps else envs * turn
                        for name, way in ways.items()
                    }
                    speeds = {name: steps[name] / median(seconds[name]) for name in ways}
                    cells = [
                        f"{speeds['mujoco.batch']:,.0f}",
                        f"{speeds['step']:,.0f}",
                        f"**{ratio(seconds, 'step', 'mujoco.batch'):.2f}**",
                        f"{ratio(seconds, 'step', 'unclocked'):.2f}",
                        f"{speeds['rollout']:,.0f}",
                        f"{ratio(seconds, 'rollout', 'unclocked'):.2f}",
                        f"{speeds['restarting']:,.0f}",
                        f"{speeds['EnvPool']:,.0f}",
                        f"**{ratio(seconds, 'restarting', 'EnvPool'):.2f}**",
                    ]
                    for way in gym_ways:
                        counts = steps["restarting"], steps[way]
                        times = ratio(seconds, "restarting", way, counts)
                        cells += [f"{speeds[way]:,.0f}", f"**{times:.1f}**"]
                    print(f"| {task} | {envs} | {threads} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
