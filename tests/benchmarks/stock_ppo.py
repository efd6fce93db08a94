"""PPO as a user of TorchRL writes it, with TorchRL's own parts alone.

`tests.benchmarks.bench_race` runs it. One `Collector` steps a gymnasium vector of 32 environments
in the learner's process, the fastest of the arrangements that were tried. Collecting alone, frames
per second on HalfCheetah and processor time per frame, on two cores that other work kept busy (one
thread of Torch, two turns where there are two numbers):

=====================================  ============  ============
Arrangement                            frames/s      us per frame
=====================================  ============  ============
Collector, vector of 32 (this one)     2976 | 2605   225 | 187
Collector, vector of 16                2454 | 1629   283 | 303
MultiSyncCollector, 2 vectors of 32    1565 | 2381   234 | 200
MultiSyncCollector, 2 vectors of 16    1328 | 1620   374 | 305
Collector, vector of 8                 1258          479
MultiSyncCollector, 2 vectors of 8     1178          508
MultiSyncCollector, 2 SerialEnv of 8   774           806
Collector, SerialEnv of 8              681           728
Collector, one GymEnv                  507 | 468     not taken
=====================================  ============  ============

`ParallelEnv` over two, of `GymEnv` or of vectors of 8, was not done with a batch of 2048 and its
start in 25 s. The update takes most of the time in training, 2.8 s of 3.5 s a batch under the same
load.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import deque

import gymnasium
import mujoco
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDictBase
from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import (
    ClipTransform,
    DoubleToFloat,
    ExplorationType,
    GymWrapper,
    RewardSum,
    StepCounter,
    TransformedEnv,
    VecNormV2,
)
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

ENVS = 32
FRAMES, EPOCHS, MINIBATCH = 2048, 10, 64


def make_env(task: str) -> TransformedEnv:
    """Make 32 environments of a task, with normalised observations and summed rewards."""
    # MuJoCo would print and log what it thinks of gymnasium's models.
    handler = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda message: None)
    try:
        vector = gymnasium.make_vec(
            task,
            num_envs=ENVS,
            vectorization_mode="sync",
            vector_kwargs={"autoreset_mode": AutoresetMode.DISABLED},
        )
    finally:
        mujoco.set_mju_user_warning(handler)
    # It comes again whenever a transform looks for its parent, so this filter stays.
    warnings.filterwarnings("ignore", message="Support of VecNormV2 for containers")
    env = TransformedEnv(GymWrapper(vector))
    env.append_transform(
        VecNormV2(in_keys=["observation"], decay=0.99999, eps=1e-2, reduce_batch_dims=True)
    )
    env.append_transform(ClipTransform(in_keys=["observation"], low=-10, high=10))
    env.append_transform(RewardSum())
    env.append_transform(StepCounter())
    env.append_transform(DoubleToFloat(in_keys=["observation"]))
    return env


def make_networks(env: TransformedEnv) -> tuple[ProbabilisticActor, ValueOperator]:
    """Make actor and critic of two layers of 64 tanh units for an environment."""
    size = env.observation_spec["observation"].shape[-1]
    space = env.action_spec_unbatched.space
    actions = env.action_spec.shape[-1]
    actor = ProbabilisticActor(
        TensorDictModule(
            nn.Sequential(_mlp(size, actions, gain=0.01), AddStateIndependentNormalScale(actions)),
            in_keys=["observation"],
            out_keys=["loc", "scale"],
        ),
        in_keys=["loc", "scale"],
        spec=env.action_spec_unbatched,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": space.low, "high": space.high, "tanh_loc": False},
        return_log_prob=True,
        default_interaction_type=ExplorationType.RANDOM,
    )
    return actor, ValueOperator(_mlp(size, 1, gain=1.0), in_keys=["observation"])


def train(task: str, *, seed: int, seconds: float, threads: int) -> list[tuple[float, int, float]]:
    """Train with PPO until the time is up.

    The clock starts when the set-up is done and the first rollout begins.

    Args:
        task: Gymnasium's name of the task.
        seed: Seeds networks, environments and minibatches.
        seconds: How long to train; the batch that is under way is finished.
        threads: Torch's threads.

    Returns:
        (Seconds, frames, mean return of the last 64 finished episodes or fewer) after each
        batch; NaN until an episode has finished.
    """
    torch.manual_seed(seed)
    finished: deque[float] = deque(maxlen=64)
    curve: list[tuple[float, int, float]] = []
    frames = 0
    with warnings.catch_warnings():
        env = make_env(task)
        actor, critic = make_networks(env)
        learner = Learner(actor, critic)
        collector = Collector(
            env,
            actor,
            frames_per_batch=FRAMES,
            total_frames=-1,
            auto_register_policy_transforms=False,
            use_buffers=True,
        )
        try:
            collector.set_seed(seed)
            torch.set_num_threads(threads)  # after the set-up, which changes it
            started = time.perf_counter()
            for data in collector:
                frames += data.numel()
                finished.extend(data["next", "episode_reward"][data["next", "done"]].tolist())
                learner.update(data)
                collector.update_policy_weights_()
                elapsed = time.perf_counter() - started
                mean = sum(finished) / len(finished) if finished else math.nan
                curve.append((elapsed, frames, mean))
                if elapsed >= seconds:
                    break
        finally:
            collector.shutdown()
    return curve


class Learner:
    """PPO's update on a batch, with the usual settings.

    Args:
        actor: Policy.
        critic: Value of an observation.
    """

    def __init__(self, actor: ProbabilisticActor, critic: ValueOperator) -> None:
        self.advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
        self.loss = ClipPPOLoss(
            actor,
            critic,
            clip_epsilon=0.2,
            entropy_bonus=False,
            critic_coeff=0.5,
            loss_critic_type="l2",
            normalize_advantage=True,
        )
        self.parameters = [*self.loss.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, lr=3e-4, eps=1e-5, fused=True)
        self.buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(FRAMES),
            sampler=SamplerWithoutReplacement(),
            batch_size=MINIBATCH,
        )

    def update(self, data: TensorDictBase) -> None:
        """Estimate advantages once, then take `EPOCHS` passes in minibatches."""
        with torch.no_grad():
            self.advantage(data)
        rows = data.reshape(-1)
        self.buffer.empty()
        self.buffer.extend(
            rows.select("observation", "action", "action_log_prob", "advantage", "value_target")
        )
        for _ in range(EPOCHS):
            for minibatch in self.buffer:
                losses = self.loss(minibatch)
                (losses["loss_objective"] + losses["loss_critic"]).backward()
                nn.utils.clip_grad_norm_(self.parameters, 0.5)
                self.optimizer.step()
                self.optimizer.zero_grad()


def _mlp(inputs: int, outputs: int, *, gain: float) -> nn.Sequential:
    """Two hidden layers, orthogonal, the last layer scaled by `gain`."""
    layers = [nn.Linear(inputs, 64), nn.Linear(64, 64), nn.Linear(64, outputs)]
    for layer, scale in zip(layers, (2**0.5, 2**0.5, gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
