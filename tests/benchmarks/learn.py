"""Trains a task with several seeds, one run after another, and records each as a JSON line.

``python -m tests.benchmarks.learn Hopper-v5 appo --seeds 100 101 --frames 1000000
[--out results.jsonl] [--set epochs=10 lr=3e-4] [--keep runs/hopper] [--evaluate-every 25000]``,
or ``make learn``.

A line has the task, the algorithm, the seed, all settings, what they were measured with, the
learning curve, and three returns: of the last 64 training episodes, with noise; and without noise
of ten episodes in Gymnasium's own environment and of 16 in `MujocoBatchEnv`. The latter are played
while it trains, too, if asked for. A run that is interrupted, or fails, writes nothing.
`tests.benchmarks.learning_page` draws what is recorded.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import json
import platform
import signal
import statistics
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_unilab.configs import SETTINGS
from torchrl_unilab.configs.settings import Settings, nearest
from torchrl_unilab.envs.registry import TASKS
from torchrl_unilab.errors import ConfigError, UniLabError
from torchrl_unilab.limits import available_cores
from torchrl_unilab.trainers import load_policy, train_appo, train_off_policy

RESULTS = Path(__file__).parent / "results"
GYMNASIUM_EPISODES = 10
CURVE_POINTS = 60


def parse_settings(kind: type[Settings], assignments: Sequence[str]) -> dict[str, Any]:
    """Return settings given as ``name=value``; widths are ``256,256``, flags ``true`` or ``false``.

    Raises:
        ConfigError: A setting is unknown, or has no such value.
    """
    settings = {}
    for assignment in assignments:
        name, _, text = assignment.partition("=")
        if name == "algorithm" or name not in kind.kinds():
            raise ConfigError(
                f"setting {assignment!r}: no {name!r} (expected name=value of a setting)."
                f"{nearest(name, kind.kinds())} Correct the name."
            )
        value: Any = text
        with contextlib.suppress(SyntaxError, ValueError):  # a word
            value = ast.literal_eval(text.title())
        settings[name] = kind.kinds()[name].check(name, value, "Correct the value.")
    return settings


def thin(curve: Sequence[Sequence[float]], points: int = CURVE_POINTS) -> list[list[float]]:
    """Return at most so many points of a curve, evenly spread, the first and the last included."""
    kept = np.unique(np.linspace(0, len(curve) - 1, min(points, len(curve))).round().astype(int))
    return [
        [round(seconds, 2), int(frames), round(mean, 2)]
        for seconds, frames, mean in (curve[index] for index in kept)
    ]


def timed(
    evaluations: Sequence[Sequence[float]], curve: Sequence[Sequence[float]]
) -> list[list[float]]:
    """Return evaluations as points of a curve: at the seconds at which training had their frames.

    Between points of the curve the seconds are interpolated; before the first one from zero.
    """
    points = np.array([(0.0, 0.0), *((seconds, frames) for seconds, frames, _ in curve)])
    return [
        [
            round(float(np.interp(frames, points[:, 1], points[:, 0])), 2),
            int(frames),
            round(mean, 2),
        ]
        for frames, _, mean, _ in evaluations
    ]


@torch.no_grad()
def gymnasium_returns(
    actor: TensorDictModuleBase, task: str, episodes: int, seed: int
) -> list[float]:
    """Return the returns of episodes without noise in Gymnasium's own environment.

    Args:
        actor: Reads ``observation``, writes ``action``.
        task: A name of Gymnasium's, such as ``"Hopper-v5"``.
        episodes: How many.
        seed: Seed of the first episode; each next one has the next seed.
    """
    import gymnasium  # not needed by the workers, which import this module, too
    from gymnasium.vector import SyncVectorEnv

    env = SyncVectorEnv([partial(gymnasium.make, task, disable_env_checker=True)] * episodes)
    returns = np.zeros(episodes)
    running = np.ones(episodes, dtype=bool)
    with contextlib.closing(env), set_exploration_type(ExplorationType.DETERMINISTIC):
        observation, _ = env.reset(seed=seed)
        while running.any():
            seen = torch.as_tensor(observation, dtype=torch.float32)
            action = actor(TensorDict({"observation": seen}, [episodes]))["action"]
            observation, reward, terminated, truncated, _ = env.step(action.double().numpy())
            returns += reward * running
            running &= ~(terminated | truncated)
    return returns.tolist()


def machine() -> dict[str, Any]:
    """Return what a run's speed depends on; nothing that tells which machine it is."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):  # Linux only
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        model = next(iter(names), model)
    return {"cores": available_cores(), "cpu": model, "system": platform.system()}


def learn(
    task: str,
    algorithm: str,
    seed: int,
    frames: int,
    run_dir: Path,
    overrides: Mapping[str, Any] | None = None,
    evaluate_every: int | None = None,
) -> dict[str, Any]:
    """Train one run by the public functions and return its record.

    Raises:
        KeyboardInterrupt: The run was interrupted.
        ConfigError: The run cannot work.
    """
    config = SETTINGS[algorithm].for_task(task, **(overrides or {}))
    train: Any = train_appo if algorithm == "appo" else train_off_policy
    summary = train(
        task,
        frames=frames,
        seed=seed,
        config=config,
        run_dir=run_dir,
        announce=partial(print, flush=True),
        progress_bar=False,
        eval_interval=evaluate_every,
    )
    if summary["interrupted"] or summary["eval_return"] is None:
        raise KeyboardInterrupt
    in_gymnasium = None
    if task in TASKS:  # these have Gymnasium's names
        in_gymnasium = gymnasium_returns(load_policy(run_dir), task, GYMNASIUM_EPISODES, seed)
    settings = dataclasses.asdict(config)
    defaults = dataclasses.asdict(SETTINGS[algorithm].for_task(""))
    return {
        "task": task,
        "algorithm": algorithm,
        "seed": seed,
        "frames_asked": frames,
        "evaluate_every": evaluate_every,
        "frames": summary["frames"],
        "seconds": round(summary["seconds"], 2),
        "training_return": summary["final_return"],
        "gymnasium_returns": in_gymnasium,
        "eval_return": summary["eval_return"],
        "changed_settings": {k: v for k, v in settings.items() if v != defaults[k]},
        "settings": settings,
        "versions": summary["versions"] | {"python": platform.python_version()},
        "machine": machine(),
        "busy": summary["busy"],
        "policy_lag": summary["policy_lag"],
        "optim_steps": summary["optim_steps"],
        "curve": thin(summary["curve"]),
        "evaluations": timed(summary.get("evaluations", []), summary["curve"]),
    }


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record as one JSON line, in one write: another program may append, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(record, allow_nan=False).encode() + b"\n")


def results_path(task: str, algorithm: str) -> Path:
    """Return where the records of a task and an algorithm are kept."""
    return RESULTS / f"{task.replace(':', '.')}-{algorithm}.jsonl"


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _run_all(options: argparse.Namespace) -> None:
    out = options.out or results_path(options.task, options.algorithm)
    kind = SETTINGS[options.algorithm].kind
    overrides = parse_settings(kind, options.set)
    for seed in options.seeds:
        name = f"{options.task.replace(':', '.')}-{options.algorithm}-{seed}"
        with tempfile.TemporaryDirectory() as temporary:
            run_dir = Path(options.keep or temporary) / name
            record = learn(
                options.task,
                options.algorithm,
                seed,
                options.frames,
                run_dir,
                overrides,
                options.evaluate_every,
            )
        append_record(out, record)
        own = record["gymnasium_returns"] or [record["eval_return"]]
        print(
            f"{options.task} {options.algorithm} seed {seed}: {record['frames']:,} frames in "
            f"{record['seconds']:.1f} s, training return {record['training_return'] or 0:.1f}, "
            f"without noise {statistics.mean(own):.1f}; {out}",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all seeds; return 0, 2 for bad input, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task")
    parser.add_argument("algorithm", choices=SETTINGS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102, 103, 104])
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, help="default: results/<task>-<algorithm>.jsonl")
    parser.add_argument(
        "--set", nargs="*", action="extend", default=[], metavar="NAME=VALUE", help="settings"
    )
    parser.add_argument("--keep", type=Path, help="keep the runs' directories in this one")
    parser.add_argument(
        "--evaluate-every", type=int, metavar="FRAMES", help="evaluate without noise meanwhile"
    )
    options = parser.parse_args(arguments)
    # The collectors that TorchRL builds on import classes that it has deprecated itself.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="torchrl")
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        _run_all(options)
    except (UniLabError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: this run is not recorded", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
