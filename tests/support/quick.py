"""Settings of whole runs that take a second."""

from __future__ import annotations

from typing import Any

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
