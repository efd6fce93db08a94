"""Frames per second of our collectors beside TorchRL's: one policy, weights published per batch.

``python -m tests.benchmarks.bench_collect [--tasks HalfCheetah-v5] [--rounds 3]``

All collect batches of 1,024 frames by a policy of 2x64 units, and publish its weights after each.
*unilab* is `APPOCollector` and `ReplayCollector`, of 64 simulations in one worker, with as many
physics threads as cores. *Collector* steps Gymnasium's synchronous vector of 32 in the learner's
process, `MultiSyncCollector` two of them. *AsyncBatchedCollector* serves 8 environments in
processes of their own: *driver* is its thread in the learner's process with environments that
exchange by shared memory, *slots* its inference process, which `ProcessSlotTransport` connects
with the workers. Contenders take turns; what comes before the third batch does not count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl._utils import logger as torchrl_logger
from torchrl.collectors import AsyncBatchedCollector, BaseCollector, Collector, MultiSyncCollector
from torchrl.envs import DoubleToFloat, EnvBase, GymEnv, GymWrapper, TransformedEnv

from torchrl_unilab.collectors import APPOCollector, ReplayCollector
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.limits import available_cores

FRAMES, WARM_UP = 1024, 2
ENVS, WORKERS = 64, 8
ROWS = 262_144


def float32(env: EnvBase) -> TransformedEnv:
    """An environment that observes float32."""
    return TransformedEnv(env, DoubleToFloat(in_keys=["observation"]))


def gym_env(task: str) -> TransformedEnv:
    """One environment."""
    return float32(GymEnv(task))


def gym_vector(task: str) -> TransformedEnv:
    """32 environments in one process."""
    mode = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}
    vector = gymnasium.make_vec(task, 32, vectorization_mode="sync", vector_kwargs=mode)
    return float32(GymWrapper(vector))


def make_policy(task: str) -> TensorDictModule:
    """The policy of all contenders."""
    env = gymnasium.make(task)
    observation, action = (space.shape[0] for space in (env.observation_space, env.action_space))
    env.close()
    widths = (observation, 64, 64, action)
    layers = (layer for i in range(3) for layer in (nn.Linear(widths[i], widths[i + 1]), nn.Tanh()))
    return TensorDictModule(nn.Sequential(*layers), ["observation"], ["action"])


def contenders(task: str) -> dict[str, Callable[[], BaseCollector]]:
    """What makes each collector."""
    policy = partial(make_policy, task)
    settings: dict[str, Any] = {"frames_per_batch": FRAMES, "total_frames": -1}
    plain = {"auto_register_policy_transforms": False}
    batch_env = partial(MujocoBatchEnv, task, num_envs=ENVS, num_threads=available_cores())

    def served(**kind: Any) -> BaseCollector:
        environments = [partial(gym_env, task)] * WORKERS
        return AsyncBatchedCollector(
            environments, env_backend="multiprocessing", **kind, **settings
        )

    return {
        "unilab APPOCollector": lambda: APPOCollector(batch_env, policy(), **settings),
        "unilab ReplayCollector": lambda: ReplayCollector(
            batch_env, policy(), capacity=ROWS, **settings
        ),
        "Collector": lambda: Collector(partial(gym_vector, task), policy(), **settings, **plain),
        "MultiSyncCollector": lambda: MultiSyncCollector(
            [partial(gym_vector, task)] * 2, policy(), **settings, **plain
        ),
        "AsyncBatchedCollector, driver": lambda: served(policy=policy(), env_exchange="shm"),
        "AsyncBatchedCollector, slots": lambda: served(policy_factory=policy, transport="auto"),
    }


def frames_per_second(make: Callable[[], BaseCollector], task: str, seconds: float) -> float:
    """Collect for so long after the warm-up."""
    torch.set_num_threads(1)
    weights, collector = TensorDict.from_module(make_policy(task)).data, make()
    try:
        batches: Iterable[Any] = iter(collector)
        frames, started = 0, 0.0
        for number, batch in enumerate(batches):
            if number == WARM_UP:
                frames, started = 0, time.perf_counter()
            elif number > WARM_UP:
                frames += FRAMES if batch is None else batch.numel()
                if time.perf_counter() - started > seconds:
                    break
            collector.update_policy_weights_(weights)
        return frames / (time.perf_counter() - started)
    finally:
        collector.shutdown()


def main() -> None:
    """Print a table for each task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=["HalfCheetah-v5", "Humanoid-v5"])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torchrl_logger.setLevel("ERROR")
    print("Frames per second\n")
    for task in options.tasks:
        makers = contenders(task)
        rates: dict[str, list[float]] = {name: [] for name in makers}
        for _ in range(options.rounds):
            for name, make in makers.items():
                rates[name].append(frames_per_second(make, task, options.seconds))
                print(f"{task}, {name}: {rates[name][-1]:,.0f}", flush=True)
        ours = rates["unilab APPOCollector"]
        print("\n| task | collector | median | each round | of it by APPOCollector |")
        print("|---|---|---:|---|---:|")
        for name, turns in rates.items():
            ratio = statistics.median(a / b for a, b in zip(ours, turns, strict=True))
            each = " ".join(f"{rate:,.0f}" for rate in turns)
            print(
                f"| {task} | {name} | {statistics.median(turns):,.0f} | {each} | {ratio:.1f}x |",
                flush=True,
            )


if __name__ == "__main__":
    main()
