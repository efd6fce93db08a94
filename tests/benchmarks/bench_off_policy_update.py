"""One minibatch update of SAC and of TD3 beside the same mathematics in plain PyTorch.

``python -m tests.benchmarks.bench_off_policy_update [--blocks 15] [--compile] [--sbx]``

Each first takes a thousand steps, as in training: Adam's moments of silent units have decayed
then, to denormal numbers where nothing is done about it.

All update an actor and two critics of 2x256 units on 256 transitions of HalfCheetah's sizes,
with Adam and target networks, the policy in every step. They take turns in blocks. Plain
PyTorch uses autograd and fused Adam; TorchRL its loss, fused Adam and `SoftUpdate`. The policy's
thread comes beside torch's, whose number the table has. The products alone, which no update
in float32 can do without, say how far each is from the processor's limit; the last column is the
share that they would take at the rate of one large product: of the roofline.

With ``--device cuda`` all of it is on the GPU; the fused updates are replayed as graphs there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.objectives import LossModule, SACLoss, TD3Loss

from tests.benchmarks.peer_homes import SCRIPTS, python_of
from tests.benchmarks.plain_offpolicy import PlainSAC, PlainTD3
from tests.benchmarks.turns import race
from tests.support.off_policy import StockStepper, make_transitions
from torchrl_unilab.data import PackedReplayStorage
from torchrl_unilab.modules.critics import make_q_value
from torchrl_unilab.modules.squashed import make_sac_actor, make_td3_actor
from torchrl_unilab.objectives.fused.products import products_for
from torchrl_unilab.objectives.fused.sac import FusedSACUpdate
from torchrl_unilab.objectives.fused.td3 import FusedTD3Update

OBSERVATION, ACTION = 17, 6
LR, TAU = 3e-4, 0.005
WIDTH = 256
LARGE = 1024
ROWS = 10_000  # of replays
STEPS_BEFORE = 1000


def make_loss(algorithm: str, device: str = "cpu") -> LossModule:
    """The loss of an algorithm, with networks of 2x256 units."""
    critic = make_q_value(OBSERVATION, ACTION)
    if algorithm == "SAC":
        loss = SACLoss(make_sac_actor(OBSERVATION, ACTION), critic)
    else:
        loss = TD3Loss(make_td3_actor(OBSERVATION, ACTION), critic, bounds=(-1.0, 1.0))
    loss.make_value_estimator(gamma=0.99)
    return loss.to(device)


def make_update(
    algorithm: str, device: str = "cpu", **options: Any
) -> FusedSACUpdate | FusedTD3Update:
    """Our update."""
    loss, rates = make_loss(algorithm, device), {"lr_actor": LR, "lr_critic": LR, "tau": TAU}
    if algorithm == "SAC":
        return FusedSACUpdate(loss, lr_alpha=LR, **options, **rates)
    return FusedTD3Update(loss, **options, **rates)


def fused_step(
    algorithm: str,
    batch: TensorDict,
    *,
    compiled: bool = False,
    graphs: bool = True,
    **options: Any,
) -> Callable[[], object]:
    """A step by our update, where the batch is."""
    update = make_update(algorithm, str(batch.device or "cpu"), **options)
    if not graphs:
        update._graphs = None
    if compiled:
        update.compile()
    packed = update.prepare(batch)
    return lambda: update.step(packed)


def layers_of(algorithm: str) -> dict[int, int]:
    """Products of an update with `WIDTH` outputs: how many, by the width of their inputs.

    Hidden layers of the critics forward, backward, and by their weights, and of their targets
    forward; of the actor on both states forward, backward and by its weights; of the critics
    that judge it forward, and back to the action. First layers likewise.
    """
    judged = 2 if algorithm == "SAC" else 1  # critics that the policy climbs
    hidden = 3 * 2 + 2 + 4 + 2 * judged
    return {WIDTH: hidden, OBSERVATION + ACTION: 2 * 2 + 2 + judged, OBSERVATION: 3}


def products(algorithm: str, batch: int, device: str) -> Callable[[], object]:
    """The matrix products of an update, of zeros in the caches."""
    zeros = partial(torch.zeros, device=device)
    layers = [
        (zeros(1, batch, width), zeros(1, WIDTH, width), count)
        for width, count in layers_of(algorithm).items()
    ]
    multiply, bias = products_for(layers[0][1]), zeros(1, 1, WIDTH)

    @torch.inference_mode()
    def step() -> None:
        for x, weight, count in layers:
            for _ in range(count):
                multiply.affine(x, weight, bias)

    return step


def roofline(batch: int, device: str) -> dict[str, float]:
    """Seconds that an update's products take, by algorithm, at the rate of one large product."""
    size = LARGE if device == "cpu" else 8 * LARGE
    large = torch.rand(1, size, size, device=device)
    multiply, bias = products_for(large), torch.zeros(1, 1, size, device=device)
    with torch.inference_mode():
        way = {"large": lambda: multiply.affine(large, large, bias)}
        seconds = race(way, 15, 3, device)["large"]
    rate = size**3 / seconds
    flops = {
        algorithm: sum(batch * width * WIDTH * n for width, n in layers_of(algorithm).items())
        for algorithm in ("SAC", "TD3")
    }
    print(f"One product of {size}x{size} matrices: {2e-9 * rate:,.0f} GFLOP/s on one thread\n")
    return {algorithm: count / rate for algorithm, count in flops.items()}


def sampled_step(
    algorithm: str, storage: PackedReplayStorage, batch: int, device: str, *, compiled: bool = False
) -> Callable[[], object]:
    """A step by our update on a sample from the packed replay, which counts."""
    update = make_update(algorithm, device)
    if compiled:
        update.compile()
    return lambda: update.step(update.prepare(storage.sample(batch).to(device)))


@contextlib.contextmanager
def sbx_step(algorithm: str, batch: int, times: int = 1) -> Iterator[Callable[[], object]]:
    """So many steps by SBX, in a process of its own on one core."""
    sizes = map(str, (OBSERVATION, ACTION, batch))
    command = [python_of("baselines"), str(SCRIPTS / "sbx_update.py"), algorithm.lower(), *sizes]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdin
    assert process.stdout
    os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})

    def step() -> None:
        process.stdin.write(f"{times}\n")
        if not process.stdout.readline():
            raise RuntimeError("SBX's process has ended")

    try:
        yield step
    finally:
        process.stdin.close()
        process.wait()


def plain_update(algorithm: str, batch: TensorDict) -> tuple[PlainSAC | PlainTD3, dict[str, Any]]:
    """The same mathematics in plain PyTorch, and a batch as it takes it."""
    tensors = {
        "observation": batch["observation"],
        "action": batch["action"],
        "next_observation": batch["next", "observation"],
        "reward": batch["next", "reward"].squeeze(1),
        "terminated": batch["next", "terminated"].squeeze(1),
    }
    with torch.device(batch.device or "cpu"):
        return {"SAC": PlainSAC, "TD3": PlainTD3}[algorithm](OBSERVATION, ACTION), tensors


def make_ways(
    algorithm: str, size: int, storage: PackedReplayStorage, device: str, *, compiled: bool
) -> dict[str, Callable[[], object]]:
    """The ways to take one step, by name."""
    batch = make_transitions(size, OBSERVATION, ACTION).to(device)
    plain, tensors = plain_update(algorithm, batch)
    fused = partial(fused_step, algorithm, batch)
    sampled = partial(sampled_step, algorithm, storage, size, device)
    bfloat16 = {"matmul_dtype": torch.bfloat16}
    on_cpu = device == "cpu"
    ways: dict[str, Callable[[], object]] = {
        "plain PyTorch": lambda: plain.update(tensors),
        "products alone": products(algorithm, size, device),
        "fused": fused(),
        "fused, with its sample": sampled(),
        "fused, bfloat16": fused(**bfloat16),
        "TorchRL": partial(StockStepper(make_loss(algorithm, device), {"": LR}, TAU).step, batch),
    }
    own = {"policy's thread": {"policy_thread": True}} if on_cpu else {"eager": {"graphs": False}}
    for name, setting in own.items():
        ways[f"fused, {name}"] = fused(**setting)
    if compiled:
        with torch.device(device):
            step = torch.compile(type(plain)(OBSERVATION, ACTION).update)
        ways |= {
            "plain PyTorch, compiled": lambda: step(tensors),
            "compiled": fused(compiled=True),
            "compiled, with its sample": sampled(compiled=True),
            "compiled, bfloat16": fused(compiled=True, **bfloat16),
        }
        for name, setting in own.items():
            ways |= {
                f"compiled, {name}": fused(compiled=True, **setting),
                f"compiled, bfloat16, {name}": fused(compiled=True, **setting, **bfloat16),
            }
    return ways


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--compile", action="store_true", help="add compiled updates")
    parser.add_argument("--sbx", action="store_true", help="add SBX, with its sample, one thread")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args()
    device = options.device
    print(f"One update of {options.batch} transitions, actor and two critics of 2x256 units\n")
    torch.set_num_threads(1)
    limits = roofline(options.batch, device)
    print("| algorithm | threads | way | median ms | updates/s | of plain | of the roofline |")
    print("|---|---:|---|---:|---:|---:|---:|")
    with contextlib.ExitStack() as stack:
        storage = stack.enter_context(PackedReplayStorage(ROWS))
        storage.set(range(ROWS), make_transitions(ROWS, OBSERVATION, ACTION))
        for algorithm in ("SAC", "TD3"):
            ways = make_ways(algorithm, options.batch, storage, device, compiled=options.compile)
            sbx = {}
            if options.sbx:
                sbx["SBX, with its sample"] = stack.enter_context(
                    sbx_step(algorithm, options.batch)
                )
            for way in [*ways.values(), *sbx.values()]:
                for _ in range(STEPS_BEFORE if device == "cpu" else 100):
                    way()
            for threads in (1, 2) if device == "cpu" else (1,):
                torch.set_num_threads(threads)
                contenders = ways | (sbx if threads == 1 else {})
                medians = race(contenders, options.blocks, 10, device)
                for name, median in medians.items():
                    ratio = median / medians["plain PyTorch"]
                    figures = f"{median * 1e3:.2f} | {1 / median:.0f} | {ratio:.2f}x"
                    figures += f" | {limits[algorithm] / median:.2f}"
                    print(f"| {algorithm} | {threads} | {name} | {figures} |")


if __name__ == "__main__":
    main()
