"""What learning costs collecting: frames per second with and without a learner at work.

``python -m tests.benchmarks.bench_overlap [--seconds 8]``

One collector steps HalfCheetah on one core; the learner has the other one, where it either
only takes the rollouts or trains on them as `train_appo` does. Blocks take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import torch

from torchrl_unilab.collectors import APPOCollector
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.modules import ObservationNormalizer, make_actor, make_critic
from torchrl_unilab.objectives import APPOLoss
from torchrl_unilab.trainers import APPOConfig, APPOTrainer


def frames_per_second(seconds: float, *, learning: bool) -> float:
    """Collect for `seconds` after a warm-up, learning or not."""
    config = APPOConfig.for_task("HalfCheetah-v5")
    torch.set_num_threads(1)
    normalizer = ObservationNormalizer(17)
    actor = make_actor(17, 6, normalizer=normalizer)
    loss = APPOLoss(actor, make_critic(17, normalizer=normalizer))
    collector = APPOCollector(
        partial(MujocoBatchEnv, "HalfCheetah-v5", num_envs=config.num_envs, num_threads=1),
        actor,
        frames_per_batch=config.frames_per_rollout,
        seed=0,
    )
    trainer = APPOTrainer(
        collector=collector,
        loss_module=loss,
        total_frames=float("inf"),
        config=config,
        normalizers={"observation": normalizer},
        progress_bar=False,
    )
    frames, started = 0, 0.0
    for i, rollout in enumerate(collector):
        if i == 20:
            frames, started = 0, time.perf_counter()
        elif i > 20 and time.perf_counter() - started > seconds:
            break
        frames += rollout.numel()
        if learning:
            trainer.optim_steps(rollout)
            collector.update_policy_weights_()
    rate = frames / (time.perf_counter() - started)
    collector.shutdown()
    return rate


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--blocks", type=int, default=4)
    options = parser.parse_args()
    rates: dict[bool, list[float]] = {False: [], True: []}
    for block in range(options.blocks):
        for learning in (False, True) if block % 2 else (True, False):
            rates[learning].append(frames_per_second(options.seconds, learning=learning))
    idle, busy = (statistics.median(rates[learning]) for learning in (False, True))
    print("| learner | frames/s | of idle |")
    print("|---|---:|---:|")
    print(f"| idle | {idle:,.0f} | 1.00 |")
    print(f"| training | {busy:,.0f} | {busy / idle:.2f} |")


if __name__ == "__main__":
    main()
