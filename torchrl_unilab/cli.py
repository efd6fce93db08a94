"""The command line: ``torchrl-unilab train``, ``budget``, ``eval`` and ``play``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import signal
import sys
import typing
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from torchrl_unilab.trainers import APPOConfig, OffPolicyConfig

__all__ = ["main"]

ALGORITHMS = {"appo": "asynchronous PPO", "sac": "soft actor-critic", "td3": "twin delayed DDPG"}
_HIDDEN_SETTINGS = (  # for Python callers
    "hidden",
    "critic_coeff",
    "rho_bar",
    "c_bar",
    "algorithm",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 2 for bad input, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    # The collectors that TorchRL builds on import classes that it has deprecated itself.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="torchrl")
    signal.signal(signal.SIGTERM, _interrupt)
    from torchrl_unilab.errors import ConfigError, UniLabError

    try:
        return int(options.run(options))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)  # its lines may be those of a table
        return 2
    except (UniLabError, ValueError, OSError) as error:
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

    budget = commands.add_parser("budget", help="say what memory and threads a run would take")
    algorithms = budget.add_subparsers(required=True, metavar="ALGORITHM", dest="algorithm")
    for name, title in ALGORITHMS.items():
        _add_budget(algorithms.add_parser(name, help=title), name)

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
    train.add_argument("--env", help="task, for example HalfCheetah-v5")
    train.add_argument("--frames", type=int, help="frames to collect")
    train.add_argument("--seed", type=int, help="seed of the whole run; 0 if not given")
    train.add_argument("--run-dir", required=True, help="new directory for everything written")
    train.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run in --run-dir; its task, frames and settings need not be given",
    )
    train.add_argument(
        "--checkpoint-interval", type=int, help="frames between checkpoints; a quarter if not"
    )
    train.add_argument("--keep-checkpoints", type=int, help="how many are kept; 2 if not given")
    train.add_argument("--stop-at", type=float, help="stop early at this mean return")
    train.add_argument("--max-seconds", type=float, help="stop early after so many seconds")
    train.add_argument("--eval-episodes", type=int, default=16, help="of the final evaluation")
    train.add_argument("--no-progress", action="store_true", help="show no progress bar")
    train.add_argument("--trace", action="store_true", help="write trace.json, for ui.perfetto.dev")
    _add_settings(train.add_argument_group("settings, instead of the task's own"), algorithm)
    train.set_defaults(run=_train)


def _add_budget(budget: argparse.ArgumentParser, algorithm: str) -> None:
    budget.add_argument("--env", required=True, help="task, for example HalfCheetah-v5")
    budget.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    _add_settings(budget.add_argument_group("settings, instead of the task's own"), algorithm)
    budget.set_defaults(run=_budget)


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
        else:  # a type, or one or None
            how = {"type": kind if kind in (int, float, str) else typing.get_args(kind)[0]}
        group.add_argument(flag, dest=name, default=None, **how)


def _given(options: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The options of these names that were given."""
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def _config(options: argparse.Namespace) -> APPOConfig | OffPolicyConfig:
    """The task's settings, with those of the options instead."""
    from torchrl_unilab.trainers import APPOConfig, OffPolicyConfig

    overrides = _given(options, _settings(options.algorithm))
    if options.algorithm == "appo":
        return APPOConfig.for_task(options.env, **overrides)
    return OffPolicyConfig.for_task(options.env, options.algorithm, **overrides)


def _budget(options: argparse.Namespace) -> int:
    from torchrl_unilab.trainers.runs.budget import plan_run

    budget = plan_run(options.env, _config(options))
    print(json.dumps(budget.as_dict()) if options.json else budget)
    refusal = budget.refusal()
    if refusal is not None:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    return 0


def _training(options: argparse.Namespace) -> Callable[..., dict[str, Any]]:
    """What trains: a new run, or one that is resumed if it is what the options say."""
    from torchrl_unilab.errors import ConfigError
    from torchrl_unilab.trainers import APPOConfig, train_appo, train_off_policy
    from torchrl_unilab.trainers.runs.train import resume_run

    if options.resume:
        known = _given(options, ("env", "seed", *_settings(options.algorithm)))
        return partial(resume_run, settings={"algo": options.algorithm, **known})
    if options.env is None or options.frames is None:
        raise ConfigError(
            f"train: --env {options.env}, --frames {options.frames} (expected both). Give them, "
            "or --resume to go on with a run."
        )
    config = _config(options)
    where = {"env": options.env, "seed": options.seed or 0}
    if isinstance(config, APPOConfig):
        return partial(train_appo, config=config, **where)
    return partial(train_off_policy, config=config, **where)


def _train(options: argparse.Namespace) -> int:
    summary = _training(options)(
        run_dir=options.run_dir,
        stop_at=options.stop_at,
        max_seconds=options.max_seconds,
        progress_bar=not options.no_progress,
        eval_episodes=options.eval_episodes,
        trace=options.trace,
        announce=print,
        **_given(options, ("frames", "checkpoint_interval", "keep_checkpoints")),
    )
    busy = summary["busy"]
    collectors = ", ".join(f"{share:.0%}" for share in busy["collectors"])
    print(
        f"{summary['env']}: final return {_number(summary['final_return'])}, deterministic "
        f"{_number(summary['eval_return'])}, {summary['frames']} frames in "
        f"{summary['seconds']:.1f} s; learner {busy['learner']:.0%} busy, collectors {collectors}"
    )
    traced = ", trace.json" if options.trace else ""
    print(f"wrote {options.run_dir}: summary.json, returns.png, checkpoint, logs{traced}")
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
