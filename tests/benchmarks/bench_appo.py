"""One minibatch update of APPO beside the same mathematics in plain PyTorch.

``python -m tests.benchmarks.bench_appo [--minibatch 256] [--sbx] [--device cpu]``

All update actor and critic of 2x64 units on a minibatch of HalfCheetah's sizes with fused
Adam, take turns in blocks, and report the same numbers: the plain loop computes losses, KL
divergence, learning rate and gradient clipping with tensors and autograd alone,
`APPOStepper` through `APPOLoss`, `FusedAPPOUpdate` with gradients written out. SBX has the clipped
surrogate and value loss of PPO, bounds each network's gradient, and reports nothing.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from functools import partial

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tests.benchmarks.bench_off_policy_update import sbx_step
from tests.benchmarks.plain import PlainLearner
from tests.benchmarks.turns import race
from torchrl_unilab.configs.appo import APPOConfig
from torchrl_unilab.modules import ObservationNormalizer, make_actor, make_critic
from torchrl_unilab.objectives import APPOLoss, FusedAPPOUpdate
from torchrl_unilab.trainers.loss_updates import APPOStepper

OBSERVATION, ACTION = 17, 6
TIMES = 20  # steps in a turn


def make_loss(config: APPOConfig, device: str) -> APPOLoss:
    """Actor, critic and loss as a run on HalfCheetah has them."""
    normalizer = ObservationNormalizer(OBSERVATION).to(device)
    networks = {"normalizer": normalizer, "hidden": config.hidden}
    return APPOLoss(
        make_actor(OBSERVATION, ACTION, log_std=config.log_std, **networks),
        make_critic(OBSERVATION, **networks),
        value_clip=config.value_clip,
    ).to(device)


def make_minibatch(loss: APPOLoss, size: int) -> TensorDictBase:
    """A prepared minibatch of `size` rows, on the CPU."""
    observation = torch.randn(1, size, OBSERVATION)
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        rollout = loss.actor_network(TensorDict(observation=observation, batch_size=[1, size]))
    flag = torch.zeros(1, size, 1, dtype=torch.bool)
    rollout["next"] = TensorDict(
        observation=torch.randn(1, size, OBSERVATION),
        reward=torch.randn(1, size, 1),
        done=flag,
        terminated=flag,
        batch_size=[1, size],
    )
    return loss.estimate(rollout).reshape(-1).select(*loss.in_keys)


def repeat(way: Callable[[], object]) -> None:
    """Take the steps of a turn."""
    for _ in range(TIMES):
        way()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minibatch", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--sbx", action="store_true", help="add SBX's PPO, one thread")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args()
    device = options.device
    torch.set_num_threads(1)
    config = APPOConfig()
    loss, other = make_loss(config, device), make_loss(config, device)
    stepper = APPOStepper(loss, config)
    update = FusedAPPOUpdate(
        other, lr=config.lr, desired_kl=config.desired_kl, max_grad_norm=config.max_grad_norm
    )
    with torch.device(device):
        plain = PlainLearner(OBSERVATION, ACTION, config)
    batch = make_minibatch(make_loss(config, "cpu"), options.minibatch).to(device)
    columns = update.prepare(batch)
    tensors = {
        "observation": batch["observation"],
        "action": batch["action"],
        "log_prob": batch["action_log_prob"],
        "target_log_prob": batch["target_log_prob"],
        "advantage": batch["advantage"],
        "value_target": batch["value_target"],
        "loc": batch["target", "loc"],
        "scale": batch["target", "scale"],
    }
    ways: dict[str, Callable[[], object]] = {
        "plain PyTorch": lambda: plain.update(tensors),
        "APPOStepper": lambda: stepper.step(None, batch),
        "FusedAPPOUpdate": lambda: update.step(columns),
    }
    turns = {name: partial(repeat, way) for name, way in ways.items()}
    with contextlib.ExitStack() as stack:
        if options.sbx:
            turns["SBX's PPO"] = stack.enter_context(sbx_step("ppo", options.minibatch, TIMES))
        raced = race(turns, options.blocks, 1, device)
    medians = {name: turn / TIMES for name, turn in raced.items()}
    print(f"One update of {options.minibatch} rows, 2x64 units, one thread, {device}\n")
    print("| way | median ms | of plain |")
    print("|---|---:|---:|")
    for name, median in medians.items():
        print(f"| {name} | {median * 1e3:.2f} | {median / medians['plain PyTorch']:.2f}x |")


if __name__ == "__main__":
    main()
