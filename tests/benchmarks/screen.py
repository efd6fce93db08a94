"""Screens APPO's settings: trains several seeds at once, for little more than the price of one.

``python -m tests.benchmarks.screen Swimmer-v5 --frames 400000 --set "" --set "lr=3e-4 anneal=1"``

Each ``--set`` is a variant: settings of `APPOConfig`, on top of the task's own.
All seeds of a variant share one environment, and batched networks; nothing else mixes them.
``--together`` trains all variants at once, too, where these agree in the sizes of what they do. It
is not the program: there are no processes, and each rollout is acted by the policy of one
update before, all of it, as with ``pull="rollout"`` of a program whose learner is the slower
side. Choose settings by it, and measure them with the program.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase

from tests.benchmarks.batched_appo import BatchedLearner, Member, Policies
from tests.benchmarks.learn import parse_settings
from torchrl_unilab.collectors.metrics import EpisodeLog
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.trainers import APPOConfig

ENV_SEED = 1_000_000  # of the simulations' generators, of which there are many
POINTS = 12  # of a curve
EVALUATED = 10  # episodes without noise


class Screen:
    """An environment of all members' simulations, and their learner.

    Args:
        task: Name of the task.
        members: What to train.
    """

    def __init__(self, task: str, members: Sequence[Member]) -> None:
        self.task, self.members, self.config = task, members, members[0].config
        self.env, sizes = self._make_env(self.config.num_envs, stagger=self.config.stagger)
        self.learner = BatchedLearner(sizes, members)
        self.behaviour = Policies(self.learner.policies.flat.clone(), sizes, self.config.hidden)
        torch.manual_seed(members[0].seed)
        self._current: TensorDictBase = self.env.reset()
        follow = torch.tensor([member.config.noise_correlation for member in members])
        self._follow, self._noise = follow.view(-1, 1, 1), torch.empty(0)
        self._logs = [EpisodeLog(self.config.num_envs) for _ in members]
        for log in self._logs:
            log.restart(staggered=self.env.stagger)

    def _make_env(
        self, num_envs: int, *, stagger: bool = False
    ) -> tuple[MujocoBatchEnv, tuple[int, int]]:
        seed, n = ENV_SEED + self.members[0].seed * 1000, num_envs * len(self.members)
        env = MujocoBatchEnv(self.task, n, num_threads=1, seed=seed, stagger=stagger)
        sizes = env.observation_spec[self.config.observation].shape[-1], env.action_spec.shape[-1]
        return env, sizes

    def _columns(self, rows: torch.Tensor) -> torch.Tensor:
        """What each simulation has, [S * n, size], as columns of each, [S, size, n]."""
        return rows.unflatten(0, (len(self.members), -1)).transpose(1, 2)

    def _noise_free(self, observation: torch.Tensor, policies: Policies) -> torch.Tensor:
        return policies.actor.forward(policies.normalized(self._columns(observation)))

    def collect(self) -> dict[str, torch.Tensor]:
        """Return a rollout as `BatchedLearner.update` takes it."""
        policies, steps = self.behaviour, []
        std = policies.log_std.exp().unsqueeze(2)
        for _ in range(self.config.num_steps):
            observation = self._current[self.config.observation]
            loc = self._noise_free(observation, policies)
            noise = torch.randn_like(loc)
            if self._noise.shape == noise.shape:
                noise = self._follow * self._noise + (1.0 - self._follow**2).sqrt() * noise
            self._noise = noise
            action = torch.addcmul(loc, noise, std)
            self._current.set("action", action.transpose(1, 2).flatten(0, 1))
            stepped, self._current = self.env.step_and_maybe_reset(self._current)
            after = stepped["next"]
            rows = {
                "observation": observation,
                "next_observation": after[self.config.observation],
                "reward": after["reward"],
                "done": after["done"],
                "terminated": after["terminated"],
            }
            columns = {key: self._columns(row) for key, row in rows.items()}
            steps.append({**columns, "action": action, "log_prob": policies.log_prob(noise)})
        rollout = {key: torch.stack([step[key] for step in steps], 3) for key in steps[0]}
        for i, log in enumerate(self._logs):
            log.add(*(rollout[key][i, 0].numpy() for key in ("reward", "done", "terminated")))
        return rollout

    def last_episodes(self) -> list[list[float | None]]:
        """Return the mean return and length of each seed's last episodes, [2, S]; None without."""
        means = [
            log.last[: min(log.episodes, len(log.last)), :2].mean(0).round(1).tolist()
            if log.episodes
            else [None, None]
            for log in self._logs
        ]
        return [list(each) for each in zip(*means, strict=True)]

    def evaluate(self) -> list[float]:
        """Return the mean return of each seed's episodes without noise."""
        env, _ = self._make_env(EVALUATED)
        with closing(env):
            current = env.reset()
            returns = torch.zeros(env.batch_size[0], 1, dtype=torch.float64)
            running = torch.ones_like(returns, dtype=torch.bool)
            while running.any():
                observation = current[self.config.observation]
                action = self._noise_free(observation, self.learner.policies)
                current.set("action", action.transpose(1, 2).flatten(0, 1))
                stepped, current = env.step_and_maybe_reset(current)
                returns += stepped["next", "reward"] * running
                running &= ~stepped["next", "done"]
        means = returns.view(len(self.members), EVALUATED).mean(1)
        return [round(mean, 1) for mean in means.tolist()]

    def train(self, frames: int) -> dict[str, Any]:
        """Train each seed for `frames` and return what came of it."""
        started = time.perf_counter()
        learner, curve, statistics = self.learner, [], []
        configs = [member.config for member in self.members]
        updates = math.ceil(frames / self.config.frames_per_rollout)
        for update in range(updates):
            rollout = self.collect()
            learner.max_lr = torch.tensor([[c.highest_lr(update / updates)] for c in configs])
            learner.discounts = [config.discount(update / updates) for config in configs]
            self.behaviour.copy_(learner.policies)  # which acts on while the learner learns
            statistics.append(learner.update(rollout))
            done = (update + 1) / updates
            bound = torch.tensor([[config.highest_log_std(done)] for config in configs])
            log_std = learner.policies.log_std
            log_std.copy_(torch.minimum(log_std, bound))
            if (update + 1) * POINTS // updates > update * POINTS // updates:
                curve.append(
                    [(update + 1) * self.config.frames_per_rollout, self.last_episodes()[0]]
                )
                print(*curve[-1], file=sys.stderr, flush=True)
        kl, explained = (
            torch.stack([each[key] for each in statistics]) for key in ("kl", "explained_variance")
        )
        return {
            "curve": curve,
            "length": self.last_episodes()[1],
            "without_noise": self.evaluate(),
            "log_std": _rounded(learner.policies.log_std.mean(1)),
            "kl_above_0.1": _rounded((kl > 0.1).float().mean(0)),
            # over the last tenth, which holds a time limit of most tasks
            "explained_variance": _rounded(explained[-max(1, updates // 10) :].mean(0)),
            "seconds": round(time.perf_counter() - started),
        }


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 3) for value in values.tolist()]


def make_member(task: str, variant: str, seed: int) -> Member:
    """Return a variant's run of a seed."""
    settings = parse_settings(APPOConfig, variant.split())
    return Member(seed, APPOConfig.for_task(task, **settings))


def screen(
    task: str, variants: Sequence[str], seeds: Sequence[int], frames: int
) -> list[dict[str, Any]]:
    """Train the seeds of all variants together; return a line for each variant."""
    torch.set_num_threads(1)
    members = [make_member(task, variant, seed) for variant in variants for seed in seeds]
    screened = Screen(task, members)
    with closing(screened.env), torch.inference_mode():
        outcome = screened.train(frames)
    common = {"task": task, "seeds": list(seeds), "frames": frames, "seconds": outcome["seconds"]}
    curve = outcome.pop("curve")
    lines = []
    for i, variant in enumerate(variants):
        own = slice(i * len(seeds), (i + 1) * len(seeds))
        figures = {key: each[own] for key, each in outcome.items() if key != "seconds"}
        figures["curve"] = [[at, returns[own]] for at, returns in curve]
        lines.append({"set": variant, **common, **figures})
    return lines


def main() -> None:
    """Screen the variants; print a line of JSON for each, and append it to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task")
    parser.add_argument("--frames", type=int, default=300_000, help="of each seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--set", action="append", default=[], help="a variant: name=value ...")
    parser.add_argument("--together", action="store_true", help="train all variants at once")
    parser.add_argument("--out", type=Path, help="file to append to")
    options = parser.parse_args()
    variants = options.set or [""]
    for group in [variants] if options.together else [[variant] for variant in variants]:
        for outcome in screen(options.task, group, options.seeds, options.frames):
            line = json.dumps(outcome)
            print(line, flush=True)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
