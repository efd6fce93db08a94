"""Updates of SBX, one for each line that it reads, for `tests.benchmarks.bench_off_policy_update`.

``python sbx_update.py ALGORITHM OBSERVATION ACTION BATCH`` in an environment that has SBX. The
policy learns in every update, as in all contenders. One thread computes.
"""

from __future__ import annotations

import os
import sys

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import gymnasium
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


def main(algorithm: str, observation: int, action: int, batch: int) -> None:
    """Answer each line by a line, when the update has ended."""
    torch.set_num_threads(1)
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
    for _ in sys.stdin:
        model.train(1, batch)  # reads the losses, so it has ended
        print(flush=True)


if __name__ == "__main__":
    algorithm, *sizes = sys.argv[1:]
    main(algorithm, *map(int, sizes))
