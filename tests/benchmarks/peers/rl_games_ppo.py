"""One run of rl_games' PPO on EnvPool's simulations, for `tests.benchmarks.bench_peers`.

``python rl_games_ppo.py TASK SEED SECONDS FRAMES`` in an environment that has both prints the
record of a run as its last line. Settings are those of rl_games' own files for EnvPool.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import sys
import tempfile
import time

from rl_games.common.algo_observer import DefaultAlgoObserver
from rl_games.torch_runner import Runner

EPISODES = 64  # of training, whose mean return counts

OWN = {
    "HalfCheetah-v5": {
        "units": [128, 64, 32],
        "initializer": {"name": "variance_scaling_initializer", "scale": 2.0},
        "scale": 1.0,
        "learning_rate": 5e-4,
        "horizon_length": 256,
        "critic_coef": 4,
    },
    "Hopper-v5": {
        "units": [256, 128, 64],
        "initializer": {"name": "default"},
        "scale": 0.1,
        "learning_rate": 5e-4,
        "horizon_length": 64,
        "critic_coef": 2,
    },
    "Walker2d-v5": {
        "units": [256, 128, 64],
        "initializer": {"name": "default"},
        "scale": 0.1,
        "learning_rate": 3e-4,
        "horizon_length": 128,
        "critic_coef": 2,
    },
}
ACTORS, MINIBATCH, EPOCHS = 64, 2048, 5


class TimeIsUpError(Exception):
    """Ends a run."""


class Curve(DefaultAlgoObserver):
    """Notes seconds, frames and the mean return of the last episodes; ends the run in time."""

    def __init__(self, seconds: float, frames: int) -> None:
        super().__init__()
        self.seconds, self.frames, self.points = seconds, frames, []
        self.started = float(os.environ.get("STARTED", time.monotonic()))

    def after_print_stats(self, frame: int, epoch_num: int, total_time: float) -> None:
        """An epoch has ended."""
        seconds = time.monotonic() - self.started
        if self.algo.game_rewards.current_size:
            mean = float(self.algo.game_rewards.get_mean()[0])
            self.points.append((seconds, int(self.algo.frame), mean))
        if seconds >= self.seconds or self.algo.frame >= self.frames:
            raise TimeIsUpError


def parameters(task: str, seed: int, directory: str) -> dict[str, object]:
    """What rl_games' file for the task says."""
    own = OWN[task]
    network = {
        "name": "actor_critic",
        "separate": False,
        "space": {
            "continuous": {
                "mu_activation": "None",
                "sigma_activation": "None",
                "mu_init": {"name": "default"},
                "sigma_init": {"name": "const_initializer", "val": 0},
                "fixed_sigma": True,
            }
        },
        "mlp": {"units": own["units"], "activation": "elu", "initializer": own["initializer"]},
    }
    config = {
        "name": task,
        "env_name": "envpool",
        "train_dir": directory,
        "device": "cpu",
        "device_name": "cpu",
        "normalize_input": True,
        "normalize_value": True,
        "value_bootstrap": True,
        "reward_shaper": {"scale_value": own["scale"]},
        "normalize_advantage": True,
        "use_smooth_clamp": True,
        "gamma": 0.99,
        "tau": 0.95,
        "learning_rate": own["learning_rate"],
        "lr_schedule": "adaptive",
        "kl_threshold": 0.008,
        "grad_norm": 1.0,
        "entropy_coef": 0.0,
        "truncate_grads": True,
        "e_clip": 0.2,
        "clip_value": False,
        "num_actors": ACTORS,
        "horizon_length": own["horizon_length"],
        "minibatch_size": MINIBATCH,
        "mini_epochs": EPOCHS,
        "critic_coef": own["critic_coef"],
        "bounds_loss_coef": 0.0,
        "max_epochs": 1_000_000,
        "games_to_track": EPISODES,
        "save_best_after": 1_000_000,
        "print_stats": False,
        "env_config": {"env_name": task, "seed": seed, "num_threads": os.cpu_count()},
    }
    return {
        "seed": seed,
        "algo": {"name": "a2c_continuous"},
        "model": {"name": "continuous_a2c_logstd"},
        "network": network,
        "config": config,
    }


def main(task: str, seed: int, seconds: float, frames: int) -> None:
    """Train, and print the record."""
    curve = Curve(seconds, frames)
    runner = Runner(curve)
    with tempfile.TemporaryDirectory() as directory:
        runner.load({"params": parameters(task, seed, directory)})
        with contextlib.suppress(TimeIsUpError):
            runner.run_train({})
        taken = time.monotonic() - curve.started
    done = curve.points[-1][1]
    names = ("rl-games", "envpool", "torch", "gymnasium")
    record = {
        "frames": done,
        "seconds": taken,
        "optim_steps": done * EPOCHS // MINIBATCH,
        "curve": curve.points,
        "versions": {name: importlib.metadata.version(name) for name in names},
    }
    print(json.dumps(record))


if __name__ == "__main__":
    task, seed, seconds, frames = sys.argv[1:]
    main(task, int(seed), float(seconds), int(frames))
