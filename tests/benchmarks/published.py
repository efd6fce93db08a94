"""Returns that others published after 1,000,000 frames, and the returns that ours are timed to.

How they were measured differs: `SOURCES` says it. A source is left out where its run was longer.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

SOURCES: Mapping[str, str] = {
    "Tianshou": "[Tianshou's MuJoCo benchmark](https://github.com/thu-ml/tianshou/tree/master/"
    "examples/mujoco): the best of the evaluations without noise, ten seeds, v2 and v3 tasks",
    "Zoo": "[RL Baselines3 Zoo](https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/"
    "benchmark.md): one trained agent without noise, v3 tasks",
    "CleanRL": "[CleanRL](https://docs.cleanrl.dev/rl-algorithms/overview/): training returns, "
    "three seeds, v4 tasks",
    "rl_games": "[rl_games](https://github.com/Denys88/rl_games/blob/master/docs/"
    "SAC_BENCHMARKS.md): training rewards, three seeds, v5 tasks (Ant without contact forces)",
}
"""How each source measured."""

PUBLISHED: Mapping[str, Mapping[str, Mapping[str, float]]] = {
    "HalfCheetah-v5": {
        "ppo": {"Tianshou": 5784, "Zoo": 5819, "CleanRL": 1443},
        "sac": {"Tianshou": 12139, "Zoo": 9535, "CleanRL": 9635, "rl_games": 11140},
        "td3": {"Tianshou": 10201, "Zoo": 9656, "CleanRL": 9583},
    },
    "Hopper-v5": {
        "ppo": {"Tianshou": 2609, "Zoo": 2410, "CleanRL": 2383},
        "sac": {"Tianshou": 3542, "Zoo": 2326, "CleanRL": 2310},
        "td3": {"Tianshou": 3472, "Zoo": 3606, "CleanRL": 3135},
    },
    "Walker2d-v5": {
        "ppo": {"Tianshou": 3589, "Zoo": 3479, "CleanRL": 2288},
        "sac": {"Tianshou": 5007, "Zoo": 3863, "CleanRL": 3591},
        "td3": {"Tianshou": 3982, "Zoo": 4718, "CleanRL": 4058},
    },
    "Ant-v5": {
        "ppo": {"Tianshou": 3258, "Zoo": 1327},
        "sac": {"Tianshou": 5850, "Zoo": 4616, "rl_games": 4706},
        "td3": {"Tianshou": 5116, "Zoo": 5813},
    },
    "Humanoid-v5": {
        "ppo": {"Tianshou": 787, "CleanRL": 716},
        "sac": {"Tianshou": 5489, "CleanRL": 4996, "rl_games": 5195},
        "td3": {"Tianshou": 5190, "CleanRL": 5035},
    },
    "Swimmer-v5": {
        "ppo": {"Tianshou": 67, "Zoo": 282},
        "sac": {"Tianshou": 44, "Zoo": 346},
        "td3": {"Tianshou": 104, "Zoo": 359},
    },
    "Reacher-v5": {"ppo": {"Tianshou": -4.1}, "sac": {"Tianshou": -2.6}, "td3": {"Tianshou": -2.7}},
    "InvertedPendulum-v5": {
        "ppo": {"Tianshou": 1000},
        "sac": {"Tianshou": 1000},
        "td3": {"Tianshou": 1000},
    },
    "InvertedDoublePendulum-v5": {
        "ppo": {"Tianshou": 9231.3},
        "sac": {"Tianshou": 9359.5},
        "td3": {"Tianshou": 9349},
    },
}
"""Task and algorithm to the mean return per source."""

FAMILY: Mapping[str, str] = {"appo": "ppo", "sac": "sac", "td3": "td3"}
"""Which published algorithm each of ours is beside."""

STATED: Mapping[str, float] = {"QuadrupedWalk": 500}
"""Returns that tasks which nobody published on are timed to."""


def best_published(task: str, family: str) -> float | None:
    """Return the highest published return, if there is any."""
    sources = PUBLISHED.get(task, {}).get(family, {})
    return max(sources.values()) if sources else None


def levels(task: str) -> dict[str, float]:
    """Return the returns that runs on a task are timed to, by name, the lowest first."""
    sac = sorted(PUBLISHED.get(task, {}).get("sac", {}).values())
    named = {"best published PPO": best_published(task, "ppo")}
    if len(sac) > 1:
        named["median published SAC"] = statistics.median(sac)
    named |= {"best published SAC": sac[-1] if sac else None, "stated": STATED.get(task)}
    return {name: level for name, level in named.items() if level is not None}
