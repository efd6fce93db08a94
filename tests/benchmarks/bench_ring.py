"""Throughput and latency of the rollout ring between two processes.

``python -m tests.benchmarks.bench_ring [--rounds 9] [--seconds 0.3] [--samples 2000]``

**Throughput.** A writer process copies rollouts of 13 tensors into claimed slots and a reader
process copies them out, as fast as they can, with ``overflow="block"``, so that every rollout
goes through. Each rollout is copied twice, once by each side, and the
two sides overlap: while the reader copies one rollout out, the writer copies the next one in.
What the machine could do at best is therefore the same two copies at the same time without
a ring between them. In the baselines the same two processes copy as many bytes, as one flat
run and each on its own (``Tensor.copy_``): the writer from one private buffer into as many
others as the ring has slots, in turn, and the reader out of as many. Of these others, each
process has its own (*private*: nothing passes from core to core, and what fits its cache
stays there), or they are shared by both (*shared*: the bytes pass from the writer's core to
the reader's as they must, though nothing keeps the two in step). A rollout's time is that of
the slower side. The processor time of both sides
together is printed beside: other processes of the machine hardly change it. Ring and
baselines take turns, and medians over the turns are printed.

**Latency.** From just before the commit until ``acquire`` returns in the other process
(the monotonic clock is one for all processes); the writer sleeps 1 ms between commits, so
the reader sleeps each time. **Idle.** Processor time of a process that waits in vain.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing as mp
import statistics
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import torch

from tests.support.processes import receive, spawned
from torchrl_unilab.shm import BlockLayout, RolloutRing, SharedSegment

SLOTS = 4
STEPS = 32
ENVS = {"HalfCheetah, 64 envs": 64, "576 envs": 576, "2304 envs": 2304}
BASELINES = ("private", "shared")
KINDS = ("ring", *BASELINES)


def make_rollout(envs: int) -> dict[str, torch.Tensor]:
    """What a policy with a Gaussian head collects on HalfCheetah: 54 floats, 6 flags a step."""
    floats = {
        "observation": 17,
        "next.observation": 17,
        "action": 6,
        "loc": 6,
        "scale": 6,
        "sample_log_prob": 1,
        "next.reward": 1,
    }
    flags = ["done", "terminated", "truncated"]
    rollout = {key: torch.randn(envs, STEPS, size) for key, size in floats.items()}
    for key in (*flags, *(f"next.{flag}" for flag in flags)):
        rollout[key] = torch.zeros(envs, STEPS, 1, dtype=torch.bool)
    return rollout


def nbytes(rollout: Mapping[str, torch.Tensor]) -> int:
    """Bytes of a rollout's elements."""
    return sum(tensor.nbytes for tensor in rollout.values())


def writes(ring: RolloutRing, rollout: Mapping[str, torch.Tensor]) -> Callable[[], object]:
    """A call that writes one rollout."""
    sources = list(rollout.values())
    slots = [list(views.values()) for views in ring.views]

    def write() -> None:
        torch._foreach_copy_(slots[ring.claim()], sources)
        ring.commit()

    return write


def reads(ring: RolloutRing, rollout: Mapping[str, torch.Tensor]) -> Callable[[], object]:
    """A call that reads one rollout."""
    targets = list(rollout.values())

    def read() -> None:
        lease = ring.acquire(timeout=None)
        torch._foreach_copy_(targets, list(lease.views.values()))
        ring.release(lease)

    return read


def copies(others: torch.Tensor, *, inwards: bool) -> Callable[[], object]:
    """A call that copies one buffer of its own into the next row of `others`, or outwards."""
    one = torch.ones_like(others[0])
    turn = 0

    def copy() -> None:
        nonlocal turn
        turn = (turn + 1) % len(others)
        if inwards:
            others[turn].copy_(one)
        else:
            one.copy_(others[turn])

    return copy


def one_side(
    pipe: Connection,
    rings: dict[str, RolloutRing],
    segments: dict[str, SharedSegment],
    barrier: Barrier,
    is_writer: bool,
) -> None:
    """Run what is asked for as often as asked for, together with the other side."""
    torch.set_num_threads(1)
    calls = {}
    for case, ring in rings.items():
        move = writes if is_writer else reads
        calls["ring", case] = move(ring, make_rollout(ENVS[case]))
        shared = torch.from_numpy(segments[case].buffer).view(SLOTS, -1)
        calls["private", case] = copies(torch.ones_like(shared), inwards=is_writer)
        calls["shared", case] = copies(shared, inwards=is_writer)
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        *which, times = asked
        call = calls[tuple(which)]
        barrier.wait()
        started, used = time.perf_counter(), time.process_time()
        for _ in range(times):
            call()
        pipe.send((time.perf_counter() - started, time.process_time() - used))


def throughput(rounds: int, seconds: float) -> dict[str, dict[str, tuple[float, float]]]:
    """Median seconds and processor seconds of a rollout, by case and kind."""
    medians: dict[str, dict[str, tuple[float, float]]] = {}
    with contextlib.ExitStack() as stack:
        rings = {
            case: stack.enter_context(
                RolloutRing(BlockLayout.of(make_rollout(envs)), slots=SLOTS, overflow="block")
            )
            for case, envs in ENVS.items()
        }
        segments = {
            case: stack.enter_context(SharedSegment(SLOTS * nbytes(make_rollout(envs))))
            for case, envs in ENVS.items()
        }
        barrier = mp.Barrier(2)
        pipes = [
            stack.enter_context(spawned(one_side, rings, segments, barrier, is_writer))[1]
            for is_writer in (True, False)
        ]

        def run(kind: str, case: str, times: int) -> tuple[float, float]:
            for pipe in pipes:
                pipe.send((kind, case, times))
            elapsed, used = zip(*(receive(pipe, 300.0) for pipe in pipes), strict=True)
            return max(elapsed) / times, sum(used) / times

        for pipe in pipes:
            receive(pipe)
        for case in ENVS:
            times = max(10, math.ceil(seconds / run("ring", case, 10)[0]))
            taken: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
            for turn in range(rounds + 1):
                for kind in KINDS:
                    one = run(kind, case, times)
                    taken[kind] += [one] if turn else []  # the first warms up
            medians[case] = {
                kind: tuple(map(statistics.median, zip(*values, strict=True)))
                for kind, values in taken.items()
            }
    return medians


def commit_now_and_then(pipe: Connection, ring: RolloutRing, samples: int) -> None:
    """Commit every millisecond or so, and say in each rollout when."""
    torch.set_num_threads(1)
    at = ring.layout.keys[0]
    for _ in range(samples):
        time.sleep(1e-3)
        slot = ring.claim()
        ring.views[slot][at][0] = time.monotonic_ns()
        ring.commit()
    pipe.send("done")
    pipe.recv()


def latencies(samples: int) -> list[float]:
    """Seconds from each commit until the wait for it returned, sorted."""
    taken = []
    layout = BlockLayout.of({"at": torch.zeros(1, dtype=torch.int64)})
    with (
        RolloutRing(layout, slots=8, overflow="block") as ring,
        spawned(commit_now_and_then, ring, samples),
    ):
        for _ in range(samples):
            lease = ring.acquire(timeout=60.0)
            now = time.monotonic_ns()
            taken.append((now - int(lease.views["at"][0])) * 1e-9)
            ring.release(lease)
    return sorted(taken)


def wait_in_vain(pipe: Connection, ring: RolloutRing, seconds: float) -> None:
    """Tell the processor time of waiting, as a share of one core."""
    ring.acquire()
    started, used = time.monotonic(), time.process_time()
    assert ring.acquire(seconds) is None
    pipe.send((time.process_time() - used) / (time.monotonic() - started))


def be_writer(pipe: Connection, ring: RolloutRing) -> None:
    """Live as a writer that writes nothing."""
    pipe.send(ring.become_writer())
    pipe.recv()


def idle_share(seconds: float, writers: int = 4) -> float:
    """Share of a core that a waiting reader of live writers takes."""
    layout = BlockLayout.of({"x": torch.zeros(1)})
    with RolloutRing(layout, writers=writers) as ring, contextlib.ExitStack() as stack:
        for _ in range(writers):
            receive(stack.enter_context(spawned(be_writer, ring))[1])
        with spawned(wait_in_vain, ring, seconds) as (_, pipe):
            return receive(pipe, seconds + 60.0)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each turn, about")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--idle", type=float, default=5.0, help="seconds to wait in vain")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("Throughput: µs of a rollout, and the rate of each ring to that of each baseline\n")
    print("| rollout | MB | " + " | ".join(f"{kind} µs" for kind in KINDS), end=" | ")
    print(" | ".join(f"ring : {base}" for base in BASELINES), end=" | ")
    print(" | ".join(f"{kind} CPU µs" for kind in KINDS), end=" |\n")
    print("|---|" + "---:|" * 9)
    for case, taken in throughput(options.rounds, options.seconds).items():
        wall = {kind: seconds for kind, (seconds, _) in taken.items()}
        cells = [
            f"{nbytes(make_rollout(ENVS[case])) * 1e-6:.2f}",
            *(f"{1e6 * wall[kind]:.0f}" for kind in KINDS),
            *(f"{wall[base] / wall['ring']:.2f}" for base in BASELINES),
            *(f"{1e6 * taken[kind][1]:.0f}" for kind in KINDS),
        ]
        print(f"| {case} | " + " | ".join(cells) + " |", flush=True)
    print("\nFrom the commit until acquire returns in the other process, µs\n")
    print("| samples | median | 99th percentile | most |")
    print("|---:|---:|---:|---:|")
    taken = [1e6 * seconds for seconds in latencies(options.samples)]
    tail = taken[min(len(taken) - 1, int(0.99 * len(taken)))]
    print(f"| {len(taken)} | {statistics.median(taken):.0f} | {tail:.0f} | {taken[-1]:.0f} |")
    print(f"\nA reader that waits in vain for {options.idle:g} s, with four live writers\n")
    print("| share of a core |")
    print("|---:|")
    print(f"| {idle_share(options.idle):.2%} |")


if __name__ == "__main__":
    main()
