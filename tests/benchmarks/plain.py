"""What the limit is: PPO over `mujoco.batch` in plain PyTorch, without a framework.

One process, one loop: step all simulations, then update, in turns. It has the networks, the
settings and the mathematics of the APPO run that it is compared with, as far as they apply
to data that is never stale.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from operator import attrgetter

import numpy as np
import torch
from mujoco import MjModel, mjtStage
from mujoco.batch import DATA_FIELDS, Batch
from torch import nn

from torchrl_unilab.configs.appo import APPOConfig
from torchrl_unilab.envs import make_task
from torchrl_unilab.envs.mujoco_engine import stop_physics_clock
from torchrl_unilab.modules import make_actor, make_critic
from torchrl_unilab.modules.gaussian import HALF_LOG_2PI
from torchrl_unilab.objectives.appo import kl_adapted_lr

Batches = Mapping[str, torch.Tensor]


class PlainEnv:
    """The simulations of a task and nothing else: arrays in, arrays out.

    Args:
        name: Task.
        num_envs: Simulations.
        num_threads: Physics threads.
        seed: Seeds the initial states.
        stagger: Whether the first episodes end at random steps.

    Attributes:
        cut: Which simulations are in such an episode, (num_envs,): if the limit ends it, its return
            does not count.
    """

    def __init__(
        self, name: str, num_envs: int, num_threads: int, seed: int, *, stagger: bool = False
    ) -> None:
        self.task = task = make_task(name)
        model = task.load_model()
        stop_physics_clock()  # as our environments do
        self.batch = Batch(model, num_envs, num_threads)
        self.batch.reset()
        self.ctrl = self.batch.bind("ctrl")
        self.fields = {
            key: self.batch.bind(key) if key in DATA_FIELDS else _constant(model, key, num_envs)
            for key in ("qpos", "qvel", *task.reads)
        }
        self.dt = float(model.opt.timestep * task.frame_skip)
        self.pose = self.fields["qpos"][0].copy()
        self.rng = np.random.default_rng(seed)
        self.elapsed = np.zeros(num_envs, dtype=np.int64)
        self.reset(np.arange(num_envs))
        self.cut = np.full(num_envs, stagger)
        if stagger:  # as our environments do
            self.elapsed[:] = self.rng.integers(task.max_episode_steps, size=num_envs)

    @property
    def observation(self) -> torch.Tensor:
        """What the simulations show now, float32 [num_envs, size]."""
        parts = self.task.observation(self.fields)
        return torch.from_numpy(np.concatenate(parts, axis=1, dtype=np.float32))

    def reset(self, ids: np.ndarray) -> None:
        """Start episodes in the simulations `ids`."""
        self.batch.reset(ids, stage=mjtStage.mjSTAGE_NONE.value)
        rest = np.zeros(self.fields["qvel"].shape[1])
        states = [self.task.initial_state(self.rng, self.pose, rest) for _ in ids]
        self.fields["qpos"][ids] = np.array([qpos for qpos, _ in states])
        self.fields["qvel"][ids] = np.array([qvel for _, qvel in states])
        self.batch.forward(ids)
        self.elapsed[ids] = 0

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return reward, terminated and truncated; the caller resets."""
        before = self.task.before(self.fields)
        self.ctrl[:] = action
        self.batch.step(None, nstep=self.task.frame_skip)
        outcome = self.task.outcome(self.fields, before, action, self.dt)
        self.elapsed += 1
        return outcome.reward, outcome.terminated, self.elapsed >= self.task.max_episode_steps


def _constant(model: MjModel, key: str, num_envs: int) -> np.ndarray:
    """What all simulations have of their model, as a row of each."""
    value = np.asarray(attrgetter(key)(model))
    return np.broadcast_to(value, (num_envs, *value.shape))


class PlainLearner:
    """Actor, critic, optimiser and one minibatch update, with tensors alone.

    Args:
        observation_size: Length of the observation.
        action_size: Length of the action.
        config: Settings.
    """

    def __init__(self, observation_size: int, action_size: int, config: APPOConfig) -> None:
        self.config = config
        actor = make_actor(
            observation_size, action_size, hidden=config.hidden, log_std=config.log_std
        )[0]
        self.actor, self.log_std = actor.net, actor.log_std
        self.critic = make_critic(observation_size, hidden=config.hidden).net
        self.parameters = [*self.actor.parameters(), self.log_std, *self.critic.parameters()]
        self.lr = torch.tensor(config.lr)
        self.optimizer = torch.optim.Adam(self.parameters, lr=self.lr, fused=True)
        self.mean = torch.zeros(observation_size)
        self.scale = torch.ones(observation_size)
        self._moments = (
            0,
            torch.zeros(observation_size, dtype=torch.float64),
            torch.zeros(observation_size, dtype=torch.float64),
        )

    def take_in(self, observation: torch.Tensor) -> None:
        """Take observations, [..., size], into the running mean and variance."""
        rows = observation.reshape(-1, observation.shape[-1]).double()
        count, total, squares = self._moments
        self._moments = (count + len(rows), total + rows.sum(0), squares + rows.square().sum(0))
        count, total, squares = self._moments
        mean = total / count
        self.mean = mean.float()
        self.scale = (squares / count - mean.square() + 1e-8).rsqrt().float()

    def normalized(self, observation: torch.Tensor) -> torch.Tensor:
        """Scale observations by the running statistics."""
        return ((observation - self.mean) * self.scale).clamp(-10.0, 10.0)

    def log_prob(self, action: torch.Tensor, loc: torch.Tensor) -> torch.Tensor:
        """Log probability of actions under the current standard deviation."""
        noise = (action - loc) / self.log_std.exp()
        return (-0.5 * noise.square() - self.log_std - HALF_LOG_2PI).sum(-1)

    def update(self, batch: Batches) -> torch.Tensor:
        """Take one step on a minibatch; return its losses and statistics, [6]."""
        config = self.config
        x = self.normalized(batch["observation"])
        loc = self.actor(x)
        log_p = self.log_prob(batch["action"], loc)
        log_b, log_t = batch["log_prob"], batch["target_log_prob"]
        advantage = batch["advantage"]
        ratio = ((log_b - log_t).clamp(max=0.0) + log_p - log_b).exp()
        clipped = ratio.clamp(1.0 - config.clip_epsilon, 1.0 + config.clip_epsilon)
        objective = -torch.min(ratio * advantage, clipped * advantage).mean()
        value = self.critic(x).squeeze(-1)
        critic_loss = 0.5 * (value - batch["value_target"]).square().mean()
        entropy = (0.5 + HALF_LOG_2PI + self.log_std).sum()
        (objective + critic_loss - config.entropy_coeff * entropy).backward()
        nn.utils.clip_grad_norm_(self.parameters, config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            scale_t, scale_p = batch["scale"], self.log_std.exp()
            moved = (batch["loc"] - loc).square()
            kl = scale_p.log() - scale_t.log() + (scale_t.square() + moved) / (2 * scale_p.square())
            kl = (kl - 0.5).sum(-1).mean()
            self.lr.copy_(kl_adapted_lr(self.lr, kl, config.desired_kl, config.lr))
            fractions = (ratio != clipped).float().mean(), (log_t > log_b).float().mean()
            return torch.stack([objective, critic_loss, entropy, kl, *fractions])


def train(
    task: str,
    *,
    config: APPOConfig,
    seed: int,
    seconds: float,
    threshold: float,
    physics_threads: int,
) -> list[tuple[float, int, float]]:
    """Train until `threshold` or `seconds`; return (seconds, frames, return of 64 episodes)."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    n, steps = config.num_envs, config.num_steps
    env = PlainEnv(task, n, physics_threads, seed, stagger=config.stagger)
    size, actions = env.observation.shape[1], env.ctrl.shape[1]
    learner = PlainLearner(size, actions, config)
    column = (steps, n)
    data = {
        "observation": torch.empty(*column, size),
        "next_observation": torch.empty(*column, size),
        "action": torch.empty(*column, actions),
        "loc": torch.empty(*column, actions),
        "log_prob": torch.empty(column),
        "reward": torch.empty(column),
        "terminated": torch.empty(column, dtype=torch.bool),
        "done": torch.empty(column, dtype=torch.bool),
    }
    running = np.zeros(n)
    finished: deque[float] = deque(maxlen=64)
    curve: list[tuple[float, int, float]] = []
    frames = 0
    started = time.perf_counter()
    observation = env.observation
    while time.perf_counter() - started < seconds:
        with torch.no_grad():
            scale = learner.log_std.exp()
            for t in range(steps):
                loc = learner.actor(learner.normalized(observation))
                action = torch.addcmul(loc, scale, torch.randn_like(loc))
                reward, terminated, truncated = env.step(action.numpy())
                done = terminated | truncated
                data["observation"][t] = observation
                data["action"][t], data["loc"][t] = action, loc
                data["log_prob"][t] = learner.log_prob(action, loc)
                data["reward"][t] = torch.from_numpy(reward)
                data["terminated"][t] = torch.from_numpy(terminated)
                data["done"][t] = torch.from_numpy(done)
                observation = env.observation
                data["next_observation"][t] = observation
                running += reward
                if done.any():
                    finished.extend(running[done & ~(env.cut & truncated & ~terminated)])
                    running[done] = 0.0
                    env.cut[done] = False
                    env.reset(np.flatnonzero(done))
                    observation = env.observation
            frames += n * steps
            batch = _estimated(learner, data, scale)
        for _ in range(config.epochs):
            order = torch.randperm(n * steps)
            shuffled = {key: value[order] for key, value in batch.items()}
            chunks = {key: value.chunk(config.minibatches) for key, value in shuffled.items()}
            for i in range(config.minibatches):
                learner.update({key: value[i] for key, value in chunks.items()})
        if finished:
            curve.append((time.perf_counter() - started, frames, sum(finished) / len(finished)))
            if curve[-1][2] >= threshold:
                break
    return curve


def _estimated(learner: PlainLearner, data: Batches, scale: torch.Tensor) -> Batches:
    """Add generalised advantage estimates; flatten time and environments."""
    config = learner.config
    learner.take_in(data["observation"])
    value = learner.critic(learner.normalized(data["observation"])).squeeze(-1)
    after = learner.critic(learner.normalized(data["next_observation"])).squeeze(-1)
    going = config.gamma * ~data["terminated"]
    delta = data["reward"] * config.reward_scale + going * after - value
    trace = config.gamma * config.lambda_ * ~data["done"]
    advantage = torch.empty_like(delta)
    last = torch.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        last = advantage[t] = delta[t] + trace[t] * last
    batch = {
        "observation": data["observation"],
        "action": data["action"],
        "loc": data["loc"],
        "scale": scale.expand_as(data["loc"]).clone(),
        "log_prob": data["log_prob"],
        "target_log_prob": data["log_prob"],
        "advantage": (advantage - advantage.mean()) / (advantage.std() + 1e-8),
        "value_target": advantage + value,
    }
    return {key: value.flatten(0, 1) for key, value in batch.items()}
