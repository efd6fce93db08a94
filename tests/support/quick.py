"""Settings of whole runs that take a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchrl.envs import GymEnv, TransformedEnv

from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.trainers import APPOConfig, train_appo

APPO: dict[str, Any] = {
    "num_envs": 8,
    "num_steps": 16,
    "epochs": 2,
    "minibatches": 2,
    "hidden": (16,),
    "physics_threads": 1,
}
OFF_POLICY: dict[str, Any] = {
    "num_envs": 4,
    "replay_buffer_n": 40,  # full before the end
    "batch_size": 16,
    "learning_starts": 8,
    "hidden": (8,),
    "physics_threads": 1,
    "learner_threads": 1,
    "obs_normalization": True,
}
FRAMES, INTERVAL = 192, 96
"""How long a run of `OFF_POLICY` is, and from checkpoint to checkpoint."""
QUIET: dict[str, Any] = {"progress_bar": False, "eval_episodes": 1}


def quick_run(run_dir: str | Path, **changes: Any) -> dict[str, Any]:
    """Train by APPO for a second, saved at its end; return the run's summary."""
    run: dict[str, Any] = {
        "env": "InvertedPendulum-v5",
        "frames": 1024,
        "config": APPOConfig(**APPO),
        "progress_bar": False,
        "eval_episodes": 2,
        **changes,
    }
    return train_appo(run_dir=run_dir, **{"checkpoint_interval": run["frames"], **run})


def pendulum() -> TransformedEnv:
    """A task that is not one of ours."""
    return TransformedEnv(GymEnv("Pendulum-v1"))


def four_pendulums() -> MujocoBatchEnv:
    return MujocoBatchEnv("InvertedPendulum-v5", 4, num_threads=1)
