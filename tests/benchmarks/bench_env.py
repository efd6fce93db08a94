"""Steps per second of the batched environment beside the bare physics and its peers.

Run as a script::

    python -m tests.benchmarks.bench_env --tasks HalfCheetah-v5 Humanoid-v5 --envs 64 1024

For each task, number of simulations and number of threads, all ways of stepping take turns
within one run, so that load from elsewhere falls on each alike; the tables show the median
round of each, and the median over the rounds of each ratio.

*mujoco.batch* steps the task's physics and nothing else (no contact forces, which Gymnasium's
humanoids observe and MuJoCo computes on request), from the same states and with the
same controls as *step*, which is `EnvBase.step` of ours: neither restarts anything.
*restarting* is our `step_and_maybe_reset`, which starts the next episodes, beside *EnvPool*,
which does the same inside its `step`. *ParallelEnv* is TorchRL's, of so many workers with one
`GymEnv` each; it does not depend on the number of simulations, and is timed once per task.
EnvPool is a dependency of this benchmark alone: ``pip install '.[peers]'``.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import median

import envpool
import numpy as np
import torch
from mujoco.batch import Batch
from torchrl._utils import logger as torchrl_logger
from torchrl.envs import EnvBase, GymEnv, ParallelEnv

from torchrl_unilab.envs import MujocoBatchEnv, make_task

Way = tuple[Callable[[], object], Callable[[], object]]
"""What to do before a round, untimed, and a round."""


class Stepping:
    """A task in so many simulations on so many threads, stepped in several ways.

    Args:
        name: The task.
        envs: Simulations.
        threads: Threads that step physics.
        steps: Steps of a round.
    """

    def __init__(self, name: str, envs: int, threads: int, steps: int) -> None:
        self.task = make_task(name)
        self.steps = steps
        self.env = MujocoBatchEnv(self.task, envs, num_threads=threads, seed=0)
        self.restarting = MujocoBatchEnv(self.task, envs, num_threads=threads, seed=0)
        space = self.env.action_spec.space
        noise = torch.rand(steps, *space.low.shape)
        self.actions = space.low + (space.high - space.low) * noise
        self.controls = self.actions.double().numpy()
        bare = replace(self.task, reads=()).load_model()  # without what only observations need
        self.batch = Batch(bare, envs, threads)
        self.batch.reset()
        self.fields = [self.batch.bind(name) for name in ("ctrl", "qpos", "qvel")]
        self.peer = envpool.make(
            name, env_type="gymnasium", num_envs=envs, num_threads=threads, seed=0
        )

    def ways(self) -> dict[str, Way]:
        """The contenders."""
        return {
            "mujoco.batch": (self._restart_physics, self._physics),
            "step": (self._restart, self._step),
            "restarting": (self._restart_restarting, self._restart_and_step),
            "EnvPool": (self.peer.reset, self._step_peer),
        }

    def close(self) -> None:
        """Free all of it."""
        self.env.close()
        self.restarting.close()
        self.peer.close()

    def _restart(self) -> None:
        self.env.set_seed(0)
        root = self.env.reset()
        self.roots = [root.copy().set("action", action) for action in reversed(self.actions)]

    def _restart_physics(self) -> None:
        # physics costs what its state makes it cost, so both start from like states
        self._restart()
        self.batch.reset()
        self.fields[1][:], self.fields[2][:] = self.env.get_state()
        self.batch.forward()

    def _physics(self) -> None:
        for i in range(self.steps):
            self.fields[0][:] = self.controls[i]
            self.batch.step(nstep=self.task.frame_skip)

    def _step(self) -> None:
        for _ in range(self.steps):
            self.env.step(self.roots.pop())  # which lets go of what the step before returned

    def _restart_restarting(self) -> None:
        self.restarting.set_seed(0)
        self.restarting_root = self.restarting.reset()

    def _restart_and_step(self) -> None:
        root = self.restarting_root
        for i in range(self.steps):
            _, root = self.restarting.step_and_maybe_reset(root.set("action", self.actions[i]))

    def _step_peer(self) -> None:
        for i in range(self.steps):
            self.peer.step(self.controls[i])


@contextlib.contextmanager
def gym_workers(name: str, workers: int, steps: int) -> Iterator[Way]:
    """TorchRL's environment of processes, stepped by a random policy."""
    env: EnvBase = ParallelEnv(workers, partial(GymEnv, name))
    root = env.reset()
    actions = [env.action_spec.rand() for _ in range(steps)]

    def step() -> None:
        state = root
        for action in actions:
            _, state = env.step_and_maybe_reset(state.set("action", action))

    try:
        yield (lambda: None), step
    finally:
        env.close()


def race(ways: dict[str, Way], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, by contender; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            prepare, way = ways[name]
            prepare()
            start = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - start)
    return {name: taken[1:] for name, taken in seconds.items()}


def ratio(seconds: dict[str, list[float]], ours: str, theirs: str) -> float:
    """How many times as fast, the median of the rounds."""
    return float(median(np.divide(seconds[theirs], seconds[ours])))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=["HalfCheetah-v5", "Humanoid-v5"])
    parser.add_argument("--envs", nargs="+", type=int, default=[64, 1024])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--steps", type=int, default=6400, help="of one simulation, in a round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--workers", type=int, default=8, help="of ParallelEnv")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torchrl_logger.setLevel("ERROR")
    print(
        "| task | simulations | threads | mujoco.batch | step | of it | restarting | EnvPool | "
        "of it | ParallelEnv | of it |\n|---|" + "---:|" * 10
    )
    for name in args.tasks:
        with gym_workers(name, args.workers, 50) as gym_way:
            for envs in args.envs:
                for threads in args.threads:
                    steps = max(8, args.steps // envs)
                    stepping = Stepping(name, envs, threads, steps)
                    ways = stepping.ways() | {"ParallelEnv": gym_way}
                    seconds = race(ways, args.rounds)
                    stepping.close()
                    speeds = {way: envs * steps / median(taken) for way, taken in seconds.items()}
                    speeds["ParallelEnv"] = args.workers * 50 / median(seconds["ParallelEnv"])
                    cells = [
                        f"{speeds['mujoco.batch']:,.0f}",
                        f"{speeds['step']:,.0f}",
                        f"**{ratio(seconds, 'step', 'mujoco.batch'):.2f}**",
                        f"{speeds['restarting']:,.0f}",
                        f"{speeds['EnvPool']:,.0f}",
                        f"**{ratio(seconds, 'restarting', 'EnvPool'):.2f}**",
                        f"{speeds['ParallelEnv']:,.0f}",
                        f"**{speeds['step'] / speeds['ParallelEnv']:.0f}**",
                    ]
                    print(f"| {name} | {envs} | {threads} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
