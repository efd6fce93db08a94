"""Environments whose observations say where they come from, and which fail on demand."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from tensordict.utils import NestedKey
from torch import nn
from torchrl.data import Binary, Bounded, Composite, Unbounded
from torchrl.envs import EnvBase, GymEnv, ParallelEnv, RewardSum, StepCounter, TransformedEnv
from torchrl.modules import ProbabilisticActor

from tests.support.acting import set_action
from tests.support.bounds import DEADLINE
from torchrl_unilab.collectors import APPOCollector
from torchrl_unilab.modules import make_actor
from torchrl_unilab.shm.tokens import TokenPipe

SIZE = 3
BREAKING = 1000.0
"""Larger actions make `CountingEnv` raise."""
ENVS, STEPS = 2, 4
FRAMES = ENVS * STEPS
VERSION = ("next", "policy_version")
IDS = ("collector", "traj_ids")


class CountingEnv(EnvBase):
    """Observes (a number drawn per episode, steps done, steps left); rewards that number.

    Environment ``i`` draws from a generator seeded ``seed + i`` and ends after
    ``limit + i`` steps, so the environments of a batch end at different times.

    Args:
        batch_size: Of the environment.
        limit: Steps after which the first of them ends.
        terminal: Whether an end is a terminal state, or a time limit.
        state: Key under which to observe as much, tenfold, for a critic; None for nowhere.
    """

    def __init__(
        self,
        batch_size: tuple[int, ...] = (2,),
        *,
        limit: int = 5,
        terminal: bool = False,
        state: NestedKey | None = None,
    ) -> None:
        super().__init__(batch_size=batch_size)
        self.terminal = terminal
        self.state = state
        self._limits = (limit + torch.arange(max(1, self.numel()))).reshape(batch_size)
        self._drawn = torch.zeros(batch_size)
        self._steps = torch.zeros(batch_size, dtype=torch.int64)
        self.observation_spec = Composite(
            observation=Unbounded((*batch_size, SIZE)), shape=batch_size
        )
        if state is not None:
            spec = Unbounded((*batch_size, SIZE))
            if isinstance(state, str):
                self.observation_spec[state] = spec
            else:
                outer, inner = state
                self.observation_spec[outer] = Composite({inner: spec}, shape=batch_size)
        self.action_spec = Bounded(-1.0, 1.0, (*batch_size, 1))
        self.reward_spec = Unbounded((*batch_size, 1))
        flag = partial(Binary, 1, shape=(*batch_size, 1), dtype=torch.bool)
        self.done_spec = Composite(
            done=flag(), terminated=flag(), truncated=flag(), shape=batch_size
        )
        self._set_seed(None)

    def _set_seed(self, seed: int | None) -> None:
        count = max(1, self.numel())
        self._rngs = [
            np.random.default_rng(None if seed is None else seed + i) for i in range(count)
        ]

    def _observed(self, **more: torch.Tensor) -> TensorDictBase:
        left = self._limits - self._steps
        observation = torch.stack([self._drawn, self._steps.float(), left.float()], -1)
        ended = (left <= 0).unsqueeze(-1)
        out = TensorDict(
            observation=observation,
            done=ended,
            terminated=ended & self.terminal,
            truncated=ended & (not self.terminal),
            batch_size=self.batch_size,
            **more,
        )
        if self.state is not None:
            out[self.state] = observation * 10.0
        return out

    def _reset(self, tensordict: TensorDictBase | None = None, **_: object) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        where = (
            torch.ones(self.batch_size, dtype=torch.bool)
            if mask is None
            else mask.reshape(self.batch_size)
        )
        drawn = self._drawn.flatten().clone()
        for i in where.flatten().nonzero().flatten().tolist():
            drawn[i] = self._rngs[i].random()
        self._drawn = drawn.reshape(self.batch_size)
        self._steps = torch.where(where, 0, self._steps)
        return self._observed()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if (tensordict["action"] > BREAKING).any():
            raise ArithmeticError("the physics exploded")
        self._steps = self._steps + 1
        return self._observed(reward=self._drawn.unsqueeze(-1))


class HitEnv(CountingEnv):
    """Is hit in its nth step, the first time that a process gets so far.

    Args:
        mark: A file that says that it was, so that who takes its place is spared.
        at: The step; 0 for when it is asked for its state.
        fault: The name of a signal, ``"raise"``, or ``"put"``: to be killed thereafter, when
            a rollout is counted and not handed over.
    """

    def __init__(self, mark: Path, at: int, fault: str) -> None:
        super().__init__()
        self._hit = (mark, at, fault)
        self._taken = 0

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._taken += 1
        self._be_hit(self._taken)
        return super()._step(tensordict)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._be_hit(0)
        return super().state_dict(*args, **kwargs)

    def _be_hit(self, now: int) -> None:
        mark, at, fault = self._hit
        if now == at and not mark.exists():
            mark.touch()
            if fault == "raise":
                raise ArithmeticError("the physics exploded")
            if fault == "put":
                setattr(TokenPipe, "put", _die)  # noqa: B010
            else:
                os.kill(os.getpid(), getattr(signal, fault))


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class GatedEnv(CountingEnv):
    """Waits in its nth step until somebody opens a pipe to write.

    Args:
        gate: The named pipe.
        at: The step.
    """

    def __init__(self, gate: Path, at: int) -> None:
        super().__init__()
        self._gate = (gate, at)
        self._taken = 0

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        gate, at = self._gate
        self._taken += 1
        if self._taken == at:
            gate.read_bytes()
        return super()._step(tensordict)


def env_for_parents_only() -> CountingEnv:
    """Cannot be made in a worker."""
    if mp.parent_process() is not None:
        raise FileNotFoundError("no such robot")
    return CountingEnv()


def state_env() -> CountingEnv:
    """Also observes what no actor may know."""
    return CountingEnv(state=("critic", "state"))


def flat_state_env() -> CountingEnv:
    """The same, not nested."""
    return CountingEnv((4,), state="state")


def transformed_env() -> TransformedEnv:
    """Counts steps and sums rewards."""
    env = TransformedEnv(CountingEnv((4,), terminal=True, state=("critic", "state")), StepCounter())
    env.append_transform(RewardSum())
    return env


def single_env() -> CountingEnv:
    """Has no batch."""
    return CountingEnv(())


def gym_env() -> GymEnv:
    """Pendulum, which has no batch either."""
    return GymEnv("Pendulum-v1")


def parallel_env() -> ParallelEnv:
    """Two environments in two more processes, which start without importing anything."""
    return ParallelEnv(2, single_env, mp_start_method="fork")


def actor(seed: int = 0, size: int = SIZE, actions: int = 1) -> ProbabilisticActor:
    """A small stochastic policy."""
    torch.manual_seed(seed)
    return make_actor(size, actions, hidden=(8,))


class Agents(CountingEnv):
    """`CountingEnv` with a reward each for two agents: a third and two thirds."""

    def __init__(self) -> None:
        super().__init__()
        shape = self.batch_size
        inner = Composite(reward=Unbounded((*shape, 2, 1)), shape=shape)
        self.reward_spec = Composite(agents=inner, shape=shape)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        out = super()._step(tensordict)
        share = torch.tensor([[1.0], [2.0]]) / 3.0
        out["agents"] = TensorDict(
            reward=out.pop("reward").unsqueeze(-1) * share, batch_size=self.batch_size
        )
        return out


class EndingForAgents(CountingEnv):
    """Ends for agents alone."""

    @property
    def done_keys(self) -> list[Any]:
        return [("agents", "done"), ("agents", "terminated")]


def linear_policy(size: int = SIZE, *, inplace: bool | str) -> TensorDictModule:
    """A policy that writes into its input, or into a TensorDict of its own."""
    torch.manual_seed(0)
    linear = nn.Linear(size, 1)
    return TensorDictModule(linear, in_keys=["observation"], out_keys=["action"], inplace=inplace)


def appo_collector(policy, create_env=CountingEnv, **kwargs) -> APPOCollector:
    settings = {"frames_per_batch": FRAMES, "seed": 100, "timeout": DEADLINE}
    return APPOCollector(create_env, policy, **{**settings, **kwargs})


def publish(collector: APPOCollector, value: float) -> int:
    """Let actions be `value`; return the version."""
    set_action(collector.policy, value)
    collector.update_policy_weights_()
    return collector.scheme.version


def publish_itself(collector: APPOCollector) -> int:
    """Let actions be the number of the version."""
    return publish(collector, float(collector.scheme.version + 1))


def writer_of(rollout: TensorDictBase) -> int:
    [writer] = (rollout[IDS] % 2).unique().tolist()
    return writer


def data_of(rollout: TensorDictBase) -> TensorDictBase:
    """What does not count on from earlier rollouts."""
    return rollout.exclude(VERSION, IDS)
