"""Steps per second of the batched environment against the bare physics.

Run as a script::

    python tests/benchmarks/bench_env.py --envs 64 --threads 2

All ways of stepping take turns within one run, so that load from elsewhere falls
on each alike; the table shows the median round of each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from mujoco.batch import Batch
from torchrl.envs import EnvBase

from torchrl_unilab.envs import MujocoBatchEnv, make_task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="HalfCheetah-v5")
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100, help="steps per round")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()

    torch.set_num_threads(1)
    task = make_task(args.task)

    def make() -> MujocoBatchEnv:
        return MujocoBatchEnv(task, args.envs, num_threads=args.threads, seed=0)

    step_env, lean_env, base_env = make(), make(), make()
    roots = {id(env): env.reset() for env in (step_env, lean_env, base_env)}
    space = step_env.action_spec.space
    noise = torch.rand(args.steps, *space.low.shape)
    actions = space.low + (space.high - space.low) * noise
    controls = actions.double().numpy()

    batch = Batch(task.load_model(), args.envs, args.threads)
    batch.reset()
    ctrl, qpos, qvel = batch.bind("ctrl"), batch.bind("qpos"), batch.bind("qvel")

    def restart_raw() -> None:
        # physics costs what its state makes it cost, so all start from like states
        batch.reset()
        qpos[:], qvel[:] = step_env.get_state()
        batch.forward()

    def raw() -> None:
        for i in range(args.steps):
            ctrl[:] = controls[i]
            batch.step(nstep=task.frame_skip)

    def restart(env: MujocoBatchEnv) -> None:
        env.set_seed(0)
        roots[id(env)] = env.reset()

    def step() -> None:
        root = roots[id(step_env)]
        for i in range(args.steps):
            step_env.step(root.set("action", actions[i]))
            root.pop("next")

    def step_and_maybe_reset(
        env: MujocoBatchEnv, method: Callable[..., tuple[object, object]]
    ) -> None:
        root = roots[id(env)]
        for i in range(args.steps):
            _, root = method(root.set("action", actions[i]))

    ways: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "mujoco.batch": (restart_raw, raw),
        "step": (lambda: restart(step_env), step),
        "step_and_maybe_reset": (
            lambda: restart(lean_env),
            lambda: step_and_maybe_reset(lean_env, lean_env.step_and_maybe_reset),
        ),
        "step_and_maybe_reset of EnvBase": (
            lambda: restart(base_env),
            lambda: step_and_maybe_reset(
                base_env, lambda root: EnvBase._step_and_maybe_reset(base_env, root)
            ),
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds + 1):
        restart(step_env)
        for name, (prepare, way) in ways.items():
            prepare()
            start = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - start)

    times = {name: median(rounds[1:]) / args.steps for name, rounds in seconds.items()}
    ratios = {
        name: median(np.divide(seconds["mujoco.batch"][1:], rounds[1:]))
        for name, rounds in seconds.items()
    }
    print(f"{args.task}, {args.envs} environments, {args.threads} threads\n")
    print("| stepping with | env steps/s | us per call | of mujoco.batch |")
    print("|---|---:|---:|---:|")
    for name, value in times.items():
        speed = args.envs / value
        print(f"| {name} | {speed:,.0f} | {value * 1e6:.0f} | {ratios[name]:.2f} |")


if __name__ == "__main__":
    main()
