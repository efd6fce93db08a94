"""One minibatch update of APPO beside the same mathematics in plain PyTorch.

``python -m tests.benchmarks.bench_appo [--minibatch 256]``

Both update actor and critic of 2x64 units on a minibatch of HalfCheetah's sizes with fused
Adam, take turns in blocks, and report the same numbers: the plain loop computes losses, KL
divergence, learning rate and gradient clipping with tensors alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from torchrl_unilab.modules import ObservationNormalizer, make_actor, make_critic
from torchrl_unilab.objectives import APPOLoss
from torchrl_unilab.trainers.appo import APPOStepper
from torchrl_unilab.trainers.configs import APPOConfig

OBSERVATION, ACTION = 17, 6
HALF_LOG_TAU = 0.9189385332046727  # 0.5 * log(2 pi)


def make_loss(config: APPOConfig) -> APPOLoss:
    """Actor, critic and loss as a run on HalfCheetah has them."""
    networks = {"normalizer": ObservationNormalizer(OBSERVATION), "hidden": config.hidden}
    return APPOLoss(
        make_actor(OBSERVATION, ACTION, log_std=config.log_std, **networks),
        make_critic(OBSERVATION, **networks),
        value_clip=config.value_clip,
    )


def make_minibatch(loss: APPOLoss, size: int) -> TensorDictBase:
    """A prepared minibatch of `size` rows."""
    observation = torch.randn(1, size, OBSERVATION)
    with torch.no_grad():
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


def plain_step(loss: APPOLoss, config: APPOConfig) -> Callable[[TensorDictBase], torch.Tensor]:
    """The same update with tensors alone, on networks of its own."""
    actor, critic = loss.actor_network[0], loss.critic_network
    parameters = [*actor.net.parameters(), actor.log_std, *critic.net.parameters()]
    lr = torch.tensor(config.lr)
    optimizer = torch.optim.Adam(parameters, lr=lr, fused=True)
    steps = 0
    target = [p.detach().clone() for p in (*actor.net.parameters(), actor.log_std)]
    current = [*actor.net.parameters(), actor.log_std]

    def step(batch: TensorDictBase) -> torch.Tensor:
        nonlocal steps
        normalizer = actor.normalizer
        mean = normalizer.mean.float()
        scale = (normalizer.variance + normalizer.epsilon).rsqrt().float()
        x = ((batch["observation"] - mean) * scale).clamp(-10.0, 10.0)
        loc, log_std = actor.net(x), actor.log_std
        noise = (batch["action"] - loc) / log_std.exp()
        log_p = (-0.5 * noise.square() - log_std - HALF_LOG_TAU).sum(-1)
        log_b, log_t = batch["action_log_prob"], batch["target_log_prob"]
        advantage = batch["advantage"]
        ratio = ((log_b - log_t).clamp(max=0.0) + log_p - log_b).exp()
        clipped = ratio.clamp(1.0 - loss.clip_epsilon, 1.0 + loss.clip_epsilon)
        objective = -torch.min(ratio * advantage, clipped * advantage).mean()
        value = critic.net(x).squeeze(-1)
        critic_loss = 0.5 * (value - batch["value_target"]).square().mean()
        entropy = (0.5 + HALF_LOG_TAU + log_std).sum()
        (objective + critic_loss - loss.entropy_coeff * entropy).backward()
        nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            scale_t, scale_p = batch["target", "scale"], log_std.exp()
            moved = (batch["target", "loc"] - loc).square()
            kl = scale_p.log() - scale_t.log() + (scale_t.square() + moved) / (2 * scale_p.square())
            kl = (kl - 0.5).sum(-1).mean()
            steps += 1
            if steps % loss.target_update_freq == 0:
                torch._foreach_copy_(target, current)
            factor = torch.where(kl > config.desired_kl * 1.2, 1 / 1.1, 1.0)
            factor = torch.where(kl < config.desired_kl / 1.2, 1.1, factor)
            lr.copy_((lr * factor).clamp(1e-5, 1e-2))
            fractions = (ratio != clipped).float().mean(), (log_t > log_b).float().mean()
            return torch.stack([objective, critic_loss, entropy, kl, *fractions])

    return step


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minibatch", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = APPOConfig()
    loss, other = make_loss(config), make_loss(config)
    stepper = APPOStepper(loss, config)
    batch = make_minibatch(loss, options.minibatch)
    plain = plain_step(other, config)
    ways: dict[str, Callable[[], object]] = {
        "plain PyTorch": lambda: plain(batch),
        "APPOStepper": lambda: stepper.step(None, batch),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for block in range(options.blocks):
        for name, step in ways.items():
            for _ in range(20):
                started = time.perf_counter()
                step()
                if block:
                    seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"One update of {options.minibatch} rows, 2x64 units, one thread\n")
    print("| way | median ms | of plain |")
    print("|---|---:|---:|")
    for name, median in medians.items():
        print(f"| {name} | {median * 1e3:.2f} | {median / medians['plain PyTorch']:.2f}x |")


if __name__ == "__main__":
    main()
