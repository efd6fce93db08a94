"""Updates of SBX, as many as each line that it reads says, for the benchmarks of updates.

``python sbx_update.py ALGORITHM OBSERVATION ACTION BATCH`` in an environment that has SBX. The
policy learns in every update, as in all contenders; SAC and TD3 sample their rows, PPO has some.
One thread computes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import gymnasium
import jax
import numpy as np
import sbx
import torch
from stable_baselines3.common.logger import Logger

ROWS = 10_000


class Space(gymnasium.Env):
    """Spaces of the given sizes; it is never stepped."""

    def __init__(self, observation: int, action: int) -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (observation,))
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (action,))


def off_policy(algorithm: str, observation: int, action: int, batch: int) -> Callable[[], object]:
    """An update of SAC or TD3 with its sample."""
    settings = {"policy_delay": 1} if algorithm == "td3" else {}
    kind = getattr(sbx, algorithm.upper())
    model = kind("MlpPolicy", Space(observation, action), buffer_size=ROWS, **settings)
    model.set_logger(Logger(None, []))
    random = np.random.default_rng(0)
    for _ in range(ROWS):
        model.replay_buffer.add(
            random.standard_normal((1, observation)),
            random.standard_normal((1, observation)),
            random.uniform(-1.0, 1.0, (1, action)),
            random.standard_normal(1),
            np.zeros(1),
            [{}],
        )
    return lambda: model.train(1, batch)  # reads the losses, so it has ended


def ppo(observation: int, action: int, batch: int) -> Callable[[], object]:
    """An update of PPO on given rows, without what its loop reports."""
    model = sbx.PPO("MlpPolicy", Space(observation, action))
    random, policy = np.random.default_rng(0), model.policy
    rows = {
        "observations": random.standard_normal((batch, observation), np.float32),
        "actions": random.standard_normal((batch, action), np.float32),
    }
    columns = ("advantages", "returns", "old_log_prob")
    rows |= {name: random.standard_normal(batch, np.float32) for name in columns}
    coefficients = {"clip_range": 0.2, "ent_coef": 0.0, "vf_coef": 1.0}

    def update() -> None:
        states, losses = model._one_update(
            policy.actor_state, policy.vf_state, **rows, **coefficients
        )
        policy.actor_state, policy.vf_state = states
        jax.block_until_ready((states, losses))

    return update


def main(algorithm: str, *sizes: int) -> None:
    """Answer each line by a line, when its updates have ended."""
    torch.set_num_threads(1)
    update = ppo(*sizes) if algorithm == "ppo" else off_policy(algorithm, *sizes)
    for line in sys.stdin:
        for _ in range(int(line)):
            update()
        print(flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
