"""One minibatch update of SAC and of TD3 beside the same mathematics in plain PyTorch.

``python -m tests.benchmarks.bench_offpolicy_update [--blocks 15] [--compile]``

All update an actor and two critics of 2x256 units on 256 transitions of HalfCheetah's sizes,
with Adam and target networks, the policy in every step. They take turns in blocks. Plain
PyTorch uses autograd and fused Adam; TorchRL its loss, fused Adam and `SoftUpdate`. The policy's
thread comes beside torch's, whose number the table has.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.objectives import LossModule, SACLoss, SoftUpdate, TD3Loss

from tests.benchmarks.plain_offpolicy import PlainSAC, PlainTD3
from tests.benchmarks.turns import race
from tests.support.off_policy import make_transitions
from torchrl_unilab.modules.critics import make_q_value
from torchrl_unilab.modules.squashed import make_sac_actor, make_td3_actor
from torchrl_unilab.objectives.fused.sac import FusedSACUpdate
from torchrl_unilab.objectives.fused.td3 import FusedTD3Update

OBSERVATION, ACTION = 17, 6
LR, TAU = 3e-4, 0.005


def make_loss(algorithm: str) -> LossModule:
    """The loss of an algorithm, with networks of 2x256 units."""
    critic = make_q_value(OBSERVATION, ACTION)
    if algorithm == "SAC":
        loss = SACLoss(make_sac_actor(OBSERVATION, ACTION), critic)
    else:
        loss = TD3Loss(make_td3_actor(OBSERVATION, ACTION), critic, bounds=(-1.0, 1.0))
    loss.make_value_estimator(gamma=0.99)
    return loss


def torchrl_step(loss: LossModule, batch: TensorDict) -> Callable[[], object]:
    """A step by TorchRL's own parts."""
    adam = torch.optim.Adam(loss.parameters(), lr=LR, fused=True)
    targets = SoftUpdate(loss, tau=TAU)

    def step() -> None:
        losses = loss(batch)
        sum(value for key, value in losses.items() if key.startswith("loss_")).backward()
        adam.step()
        adam.zero_grad()
        targets.step()

    return step


def fused_step(algorithm: str, batch: TensorDict, **options: Any) -> Callable[[], object]:
    """A step by our update."""
    loss, rates = make_loss(algorithm), {"lr_actor": LR, "lr_critic": LR, "tau": TAU}
    update: FusedSACUpdate | FusedTD3Update
    if algorithm == "SAC":
        update = FusedSACUpdate(loss, lr_alpha=LR, **options, **rates)
    else:
        update = FusedTD3Update(loss, **options, **rates)
    packed = update.prepare(batch)
    return lambda: update.step(packed)


def make_ways(algorithm: str, size: int, *, compiled: bool) -> dict[str, Callable[[], object]]:
    """The ways to take one step, by name."""
    batch = make_transitions(size, OBSERVATION, ACTION)
    tensors = {
        "observation": batch["observation"],
        "action": batch["action"],
        "next_observation": batch["next", "observation"],
        "reward": batch["next", "reward"].squeeze(1),
        "terminated": batch["next", "terminated"].squeeze(1),
    }
    plain = {"SAC": PlainSAC, "TD3": PlainTD3}[algorithm](OBSERVATION, ACTION)
    ways: dict[str, Callable[[], object]] = {
        "plain PyTorch": lambda: plain.update(tensors),
        "fused": fused_step(algorithm, batch),
        "fused, policy's thread": fused_step(algorithm, batch, policy_thread=True),
        "fused, bfloat16": fused_step(algorithm, batch, matmul_dtype=torch.bfloat16),
        "TorchRL": torchrl_step(make_loss(algorithm), batch),
    }
    if compiled:
        step = torch.compile(type(plain)(OBSERVATION, ACTION).update)
        ways["plain PyTorch, compiled"] = lambda: step(tensors)
    return ways


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--compile", action="store_true", help="add plain PyTorch, compiled")
    options = parser.parse_args()
    print(f"One update of {options.batch} transitions, actor and two critics of 2x256 units\n")
    print("| algorithm | threads | way | median ms | updates/s | of plain |")
    print("|---|---:|---|---:|---:|---:|")
    for algorithm in ("SAC", "TD3"):
        ways = make_ways(algorithm, options.batch, compiled=options.compile)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            medians = race(ways, options.blocks, 10)
            for name, median in medians.items():
                ratio = median / medians["plain PyTorch"]
                figures = f"{median * 1e3:.2f} | {1 / median:.0f} | {ratio:.2f}x"
                print(f"| {algorithm} | {threads} | {name} | {figures} |")


if __name__ == "__main__":
    main()
