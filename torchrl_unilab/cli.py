"""The command line: ``torchrl-unilab train``, ``eval`` and ``play``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import signal
import sys
import typing
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

__all__ = ["main"]

ALGORITHMS = {"appo": "asynchronous PPO", "sac": "soft actor-critic", "td3": "twin delayed DDPG"}
_HIDDEN_SETTINGS = (  # for Python callers
    "hidden",
    "critic_coeff",
    "rho_bar",
    "c_bar",
    "observation",
    "critic_observation",
    "algorithm",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 2 for bad input, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    # The collectors that TorchRL builds on import classes that it has deprecated itself.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="torchrl")
    signal.signal(signal.SIGTERM, _interrupt)
    from torchrl_unilab.errors import UniLabError

    try:
        return int(options.run(options))
    except (UniLabError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        # Before or after the training itself, which ends with a checkpoint by its own means.
        for child in multiprocessing.active_children():
            child.terminate()
        print("interrupted", file=sys.stderr)
        return 130


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrl-unilab", description="Asynchronous training for TorchRL on batched MuJoCo."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a policy")
    algorithms = train.add_subparsers(required=True, metavar="ALGORITHM", dest="algorithm")
    for name, title in ALGORITHMS.items():
        _add_training(algorithms.add_parser(name, help=title), name)

    evaluation = commands.add_parser("eval", help="evaluate a run's checkpoint")
    evaluation.add_argument("--run-dir", required=True, help="directory of a run")
    evaluation.add_argument("--episodes", type=int, default=16, help="how many")
    evaluation.add_argument("--seed", type=int, default=0, help="seed of the episodes")
    evaluation.set_defaults(run=_evaluate)

    playing = commands.add_parser("play", help="film a run's checkpoint")
    playing.add_argument("--run-dir", required=True, help="directory of a run")
    playing.add_argument("--video", required=True, help="file to write, ending in .mp4")
    playing.add_argument("--episodes", type=int, default=1, help="how many, one after the other")
    playing.add_argument("--max-steps", type=int, help="end an episode after so many steps")
    playing.add_argument("--seed", type=int, default=0, help="seed of the episodes")
    playing.add_argument("--width", type=int, default=640, help="in pixels, even")
    playing.add_argument("--height", type=int, default=480, help="in pixels, even")
    playing.add_argument("--camera", help="camera of the model, by name or number")
    playing.add_argument(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="act without exploration",
    )
    playing.set_defaults(run=_play)
    return parser


def _add_training(train: argparse.ArgumentParser, algorithm: str) -> None:
    train.add_argument("--env", required=True, help="task, for example HalfCheetah-v5")
    train.add_argument("--frames", type=int, required=True, help="frames to collect")
    train.add_argument("--seed", type=int, default=0, help="seed of the whole run")
    train.add_argument("--run-dir", required=True, help="new directory for everything written")
    train.add_argument("--stop-at", type=float, help="stop early at this mean return")
    train.add_argument("--max-seconds", type=float, help="stop early after so many seconds")
    train.add_argument("--eval-episodes", type=int, default=16, help="of the final evaluation")
    train.add_argument("--no-progress", action="store_true", help="show no progress bar")
    _add_settings(train.add_argument_group("settings, instead of the task's own"), algorithm)
    train.set_defaults(run=_train)


def _settings(algorithm: str) -> dict[str, Any]:
    """The settings that are options too, with their types."""
    from torchrl_unilab.trainers import APPOConfig, OffPolicyConfig

    config = APPOConfig if algorithm == "appo" else OffPolicyConfig
    types = typing.get_type_hints(config)
    names = [field.name for field in dataclasses.fields(config)]
    return {name: types[name] for name in names if name not in _HIDDEN_SETTINGS}


def _add_settings(group: Any, algorithm: str) -> None:
    for name, kind in _settings(algorithm).items():
        flag = "--" + name.rstrip("_").replace("_", "-")
        if kind is bool:
            how: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        elif typing.get_origin(kind) is typing.Literal:
            how = {"choices": typing.get_args(kind)}
        else:  # a number, or a number or None
            how = {"type": kind if kind in (int, float) else typing.get_args(kind)[0]}
        group.add_argument(flag, dest=name, default=None, **how)


def _train(options: argparse.Namespace) -> int:
    from torchrl_unilab.trainers import APPOConfig, OffPolicyConfig, train_appo, train_off_policy

    names = _settings(options.algorithm)
    overrides = {n: v for n in names if (v := getattr(options, n)) is not None}
    if options.algorithm == "appo":
        train = partial(train_appo, config=APPOConfig.for_task(options.env, **overrides))
    else:
        config = OffPolicyConfig.for_task(options.env, options.algorithm, **overrides)
        train = partial(train_off_policy, config=config)
    summary = train(
        options.env,
        frames=options.frames,
        seed=options.seed,
        run_dir=options.run_dir,
        stop_at=options.stop_at,
        max_seconds=options.max_seconds,
        progress_bar=not options.no_progress,
        eval_episodes=options.eval_episodes,
        announce=print,
    )
    busy = summary["busy"]
    collectors = ", ".join(f"{share:.0%}" for share in busy["collectors"])
    print(
        f"{summary['env']}: final return {_number(summary['final_return'])}, deterministic "
        f"{_number(summary['eval_return'])}, {summary['frames']} frames in "
        f"{summary['seconds']:.1f} s; learner {busy['learner']:.0%} busy, collectors {collectors}"
    )
    print(f"wrote {options.run_dir}: summary.json, returns.png, checkpoint, logs")
    return 130 if summary["interrupted"] else 0


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.1f}"


def _evaluate(options: argparse.Namespace) -> int:
    from torchrl_unilab.trainers import evaluate_run

    result = evaluate_run(options.run_dir, episodes=options.episodes, seed=options.seed)
    print(json.dumps(result))
    return 0


def _play(options: argparse.Namespace) -> int:
    from torchrl_unilab.trainers.playback import play_run

    camera = options.camera
    result = play_run(
        options.run_dir,
        options.video,
        episodes=options.episodes,
        max_steps=options.max_steps,
        seed=options.seed,
        width=options.width,
        height=options.height,
        camera=int(camera) if camera and camera.lstrip("-").isdecimal() else camera,
        deterministic=options.deterministic,
    )
    print(json.dumps(result))
    return 0
