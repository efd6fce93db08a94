"""SAC as a user of TorchRL writes it, with TorchRL's own parts alone.

`tests.benchmarks.bench_off_policy` runs it. One `Collector` steps one gymnasium environment in the
learner's process, as TorchRL's own SAC example does; one update of 256 rows for each frame,
networks of two layers of 256. For `tests.benchmarks.bench_peers` an `AsyncBatchedCollector` steps
four environments, each in a process of its own, beside the learner:

``STARTED=0 python -m tests.benchmarks.stock_sac TASK SEED SECONDS``, where the clock starts then.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import mujoco
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.collectors import AsyncBatchedCollector, BaseCollector, Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import DoubleToFloat, GymEnv, RewardSum, TransformedEnv
from torchrl.envs.utils import ExplorationType
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss

from tests.support.off_policy import StockStepper
from torchrl_unilab.limits import available_cores

FRAMES, BATCH, RANDOM = 1000, 256, 4000
WORKERS = 4


def make_env(task: str) -> TransformedEnv:
    """Make an environment of a task that observes float32 and sums its rewards."""
    handler = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda message: None)
    try:
        env = TransformedEnv(GymEnv(task))
    finally:
        mujoco.set_mju_user_warning(handler)
    env.append_transform(DoubleToFloat(in_keys=["observation"]))
    env.append_transform(RewardSum())
    return env


def make_collector(
    task: str, env: TransformedEnv, actor: ProbabilisticActor, *, asynchronous: bool
) -> BaseCollector:
    """Collect in this process, or by `WORKERS` others."""
    settings: dict[str, Any] = {"frames_per_batch": FRAMES, "total_frames": -1}
    if asynchronous:
        return AsyncBatchedCollector(
            [partial(make_env, task)] * WORKERS,
            policy=actor,
            env_backend="multiprocessing",
            env_exchange="shm",
            **settings,
        )
    return Collector(
        env, actor, init_random_frames=RANDOM, auto_register_policy_transforms=False, **settings
    )


class Learner:
    """SAC's update with the usual settings.

    Args:
        env: For the specs.
    """

    def __init__(self, env: TransformedEnv) -> None:
        actions = env.action_spec.shape[-1]
        net = nn.Sequential(
            MLP(out_features=2 * actions, num_cells=[256, 256], activation_class=nn.ReLU),
            NormalParamExtractor(scale_mapping="biased_softplus_1.0", scale_lb=0.1),
        )
        self.actor = ProbabilisticActor(
            TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
            spec=env.action_spec,
            in_keys=["loc", "scale"],
            distribution_class=TanhNormal,
            distribution_kwargs={"low": -1.0, "high": 1.0, "tanh_loc": False},
            default_interaction_type=ExplorationType.RANDOM,
        )
        critic = ValueOperator(
            MLP(out_features=1, num_cells=[256, 256], activation_class=nn.ReLU),
            in_keys=["action", "observation"],
        )
        with torch.no_grad():
            critic(self.actor(env.reset()))
        self.loss = SACLoss(self.actor, critic, num_qvalue_nets=2, loss_function="l2")
        self.loss.make_value_estimator(gamma=0.99)
        groups = ("actor_network_params", "qvalue_network_params", "log_alpha")
        self.stepper = StockStepper(self.loss, dict.fromkeys(groups, 3e-4), tau=0.005)
        self.buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1_000_000), batch_size=BATCH)

    def update(self) -> None:
        """Take one step."""
        self.stepper.step(self.buffer.sample())


def train(
    task: str,
    *,
    seed: int,
    threads: int,
    stop: Callable[[int, int], bool],
    asynchronous: bool = False,
    record: Callable[[TensorDictBase], object] = len,
) -> float:
    """Train with SAC until it is told to stop.

    Args:
        task: Gymnasium's name of the task.
        seed: Seeds networks, environment and sampling.
        threads: Torch's threads.
        stop: Asked after each batch of frames and each update, with the frames and updates so far.
        asynchronous: Collect in other processes, by the policy from the first frame on.
        record: Given each batch of frames.

    Returns:
        Updates per second of all time after the random frames.
    """
    torch.manual_seed(seed)
    frames = updates = 0
    began = None
    with warnings.catch_warnings():
        env = make_env(task)
        env.set_seed(seed)
        learner = Learner(env)
        collector = make_collector(task, env, learner.actor, asynchronous=asynchronous)
        torch.set_num_threads(threads)
        try:
            for data in collector:
                frames += data.numel()
                record(data)
                learner.buffer.extend(data.reshape(-1))
                over = stop(frames, updates)
                if frames >= RANDOM:
                    began = time.monotonic() if began is None else began
                    for _ in range(0 if over else data.numel()):
                        learner.update()
                        updates += 1
                        over = stop(frames, updates)
                        if over:
                            break
                    collector.update_policy_weights_(TensorDict.from_module(learner.actor))
                if over:
                    break
        finally:
            collector.shutdown()
    return updates / (time.monotonic() - began) if began is not None else 0.0


def main() -> None:
    """Print the record of a run with an asynchronous collector."""
    task, seed, limit = sys.argv[1:]
    started, finished = float(os.environ["STARTED"]), deque[float](maxlen=64)
    curve: list[tuple[float, int, float]] = []
    frames = updates = 0

    def clock() -> float:
        return time.monotonic() - started

    def record(data: TensorDictBase) -> None:
        finished.extend(data["next", "episode_reward"][data["next", "done"]].tolist())
        if finished:
            curve.append((clock(), frames + data.numel(), sum(finished) / len(finished)))

    def stop(frames_now: int, updates_now: int) -> bool:
        nonlocal frames, updates
        frames, updates = frames_now, updates_now
        return clock() >= float(limit)

    threads = available_cores()
    settings: dict[str, Any] = {"asynchronous": True, "record": record}
    train(task, seed=int(seed), threads=threads, stop=stop, **settings)
    counts = {"frames": frames, "seconds": clock(), "optim_steps": updates}
    print(json.dumps({**counts, "curve": curve}))


if __name__ == "__main__":
    main()
