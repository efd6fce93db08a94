"""One run of Stable-Baselines3 or of SBX, its twin in JAX, for `tests.benchmarks.bench_peers`.

``python stable_baselines.py LIBRARY ALGORITHM TASK SEED SECONDS FRAMES`` in an
environment that has them prints the record of a run as its last line. Settings are the libraries'
defaults; Stable-Baselines3's PPO has those that RL Baselines3 Zoo publishes for the task, where it
does.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import time

import gymnasium
import numpy as np
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize
from torch import nn

EPISODES = 64  # of training, whose mean return counts
GYMNASIUM_EPISODES = 10
POINT_SECONDS = 0.5  # between points of the curve

ZOO = {
    "HalfCheetah-v5": {
        "batch_size": 64,
        "gamma": 0.98,
        "learning_rate": 2.0633e-05,
        "ent_coef": 0.000401762,
        "clip_range": 0.1,
        "n_epochs": 20,
        "gae_lambda": 0.92,
        "max_grad_norm": 0.8,
        "vf_coef": 0.58096,
    },
    "Hopper-v5": {
        "batch_size": 32,
        "gamma": 0.999,
        "learning_rate": 9.80828e-05,
        "ent_coef": 0.00229519,
        "clip_range": 0.2,
        "n_epochs": 5,
        "gae_lambda": 0.99,
        "max_grad_norm": 0.7,
        "vf_coef": 0.835671,
    },
    "Walker2d-v5": {
        "batch_size": 32,
        "gamma": 0.99,
        "learning_rate": 5.05041e-05,
        "ent_coef": 0.000585045,
        "clip_range": 0.1,
        "n_epochs": 20,
        "gae_lambda": 0.95,
        "max_grad_norm": 1.0,
        "vf_coef": 0.871923,
    },
}
"""Of PPO, beside windows of 512 steps, normalised observations and rewards, and `POLICY`."""

POLICY = {
    "log_std_init": -2,
    "ortho_init": False,
    "activation_fn": nn.ReLU,
    "net_arch": {"pi": [256, 256], "vf": [256, 256]},
}


class Curve(BaseCallback):
    """Notes seconds, frames and the mean return of the last episodes; ends the run in time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.limit, self.points, self.next = seconds, [], 0.0
        self.started = float(os.environ.get("STARTED", time.monotonic()))

    def _on_step(self) -> bool:
        seconds = time.monotonic() - self.started
        if seconds >= self.next and (ended := self.model.ep_info_buffer):
            mean = float(np.mean([episode["r"] for episode in ended]))
            self.points.append((seconds, self.num_timesteps, mean))
            self.next = seconds + POINT_SECONDS
        return seconds < self.limit


def play(model: object, task: str, seed: int) -> float:
    """Return the return of an episode without noise."""
    env = gymnasium.make(task)
    norm = model.get_vec_normalize_env()
    observation, _ = env.reset(seed=seed)
    total, ended = 0.0, False
    while not ended:
        seen = observation if norm is None else norm.normalize_obs(observation)
        action, _ = model.predict(seen, deterministic=True)
        observation, reward, terminated, truncated, _ = env.step(action)
        total, ended = total + float(reward), terminated or truncated
    env.close()
    return total


def main(library: str, algorithm: str, task: str, seed: int, seconds: float, frames: int) -> None:
    """Train, and print the record."""
    kind = getattr(importlib.import_module(library), algorithm.upper())
    env, settings = make_vec_env(task, seed=seed), {}
    if library == "stable_baselines3" and algorithm == "ppo" and task in ZOO:
        settings = {**ZOO[task], "n_steps": 512, "policy_kwargs": POLICY}
        env = VecNormalize(env, gamma=settings["gamma"])
    model = kind("MlpPolicy", env, seed=seed, device="cpu", **settings)
    model._stats_window_size = EPISODES  # SBX's PPO has no argument for it
    curve = Curve(seconds)
    model.learn(frames, callback=curve)
    epochs = algorithm == "ppo"  # which it counts in place of minibatches
    minibatches = model.n_steps // model.batch_size if epochs else 1
    record = {
        "frames": model.num_timesteps,
        "seconds": time.monotonic() - curve.started,
        "optim_steps": int(model._n_updates) * minibatches,
        "curve": curve.points,
        "gymnasium_returns": [play(model, task, seed + i) for i in range(GYMNASIUM_EPISODES)],
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("stable_baselines3", "sbx-rl", "jax", "torch", "gymnasium", "mujoco")
        },
    }
    print(json.dumps(record))


if __name__ == "__main__":
    library, algorithm, task, seed, seconds, frames = sys.argv[1:]
    main(library, algorithm, task, int(seed), float(seconds), int(frames))
