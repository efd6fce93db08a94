"""The command line: ``torchrl-unilab train``, ``tasks``, ``budget``, ``eval`` and ``play``.

Flags of settings come from `configs.flags`. What imports torch is imported by the command
that needs it: help and wrong arguments are answered at once, and spawned workers import this
module, too.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import importlib
import json
import multiprocessing
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torchrl_unilab
from torchrl_unilab.configs import SETTINGS, RunConfig
from torchrl_unilab.configs.algorithms import run_settings, split_settings
from torchrl_unilab.configs.file import CONFIG_FILE, as_yaml, read_config
from torchrl_unilab.configs.flags import add_settings, argument, given
from torchrl_unilab.configs.settings import nearest
from torchrl_unilab.errors import (
    CheckpointError,
    ConfigError,
    RunCompleteError,
    UniLabError,
    WorkerError,
    has_cause,
)
from torchrl_unilab.fork_server import start_fork_server
from torchrl_unilab.limits import launcher_env, local_ranks
from torchrl_unilab.processes import working_directory

_REMEDIES = {
    errno.ENOSPC: " (expected room for a run's files). Make room, or choose another directory.",
    errno.EMFILE: " (expected more, for logs and workers). Raise `ulimit -n`.",
}
"""What to do about errors of the system."""
_CHECKPOINTS = f"checkpoint/frames-{'[0-9]' * 12}"  # and not copies of other names


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 2 for bad input, 130 after Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # KeyboardInterrupt
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it
        signal.signal(signal.SIGHUP, _hang_up)
    try:
        sys.path.append(working_directory())  # for the user's tasks; last: it hides no module
        options = _parser(_task_of(arguments)).parse_args(arguments)
        import numpy  # noqa: F401  # first: torch's C code would import it, and drop a Ctrl-C

        code = int(options.run(options))
        if sys.stdout is not None:  # closed by `>&-`
            sys.stdout.flush()
        return code
    except RunCompleteError as complete:  # a script that restarts runs is not told of an error
        print(complete, file=sys.stderr)
        return 0
    except (ConfigError, WorkerError) as error:
        return _refused(error)  # with the lines of a table, or a traceback
    except BrokenPipeError:  # `| head` has seen enough
        _leave_terminal()
        return 141
    except (UniLabError, OSError) as error:
        remedy = _REMEDIES.get(error.errno or 0, "") if isinstance(error, OSError) else ""
        return _refused(" ".join(str(error).split()) + remedy)
    except (AttributeError, ImportError, RuntimeError, KeyboardInterrupt) as error:
        # The import of mujoco's C code makes an ImportError of an interrupt.
        while_importing = isinstance(error, ImportError) and has_cause(error, KeyboardInterrupt)
        if while_importing or isinstance(error, KeyboardInterrupt):
            # Before or after the training itself, which ends with a checkpoint by its own means.
            for child in multiprocessing.active_children():
                child.terminate()
            print("interrupted", file=sys.stderr)
            return 130
        if "MUJOCO_GL" not in os.environ or "mujoco" in sys.modules:
            raise
        return _refused(
            f"mujoco cannot be imported with MUJOCO_GL={os.environ['MUJOCO_GL']}, {error} "
            "(expected a backend that is installed). Unset it: `play` finds a backend."
        )


def _refused(reason: object) -> int:
    """Print an error; return its exit code."""
    print(f"error: {reason}", file=sys.stderr)
    return 2


def _hang_up(*_: object) -> NoReturn:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the shell says it again
    _leave_terminal()
    raise KeyboardInterrupt


def _leave_terminal() -> None:
    """Discard output from now on: the terminal, or the reader of the pipe, is gone."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and whose flags are written out."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # -1e3, too, is a value

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            self.error(f"unknown argument {unknown[0]}.{nearest(unknown[0], flags)}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        if message.startswith("argument ALGORITHM: invalid choice"):
            message += ". The algorithm comes before all flags"
        end = "" if message.endswith((".", "?")) else "."
        self.exit(2, f"error: {message}{end} See {self.prog} --help.\n")


def _task_of(arguments: Sequence[str] | None) -> str:
    """Return the task among arguments, whose defaults the help shows; empty without one."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--env", nargs="?", default="")
    return parser.parse_known_args(arguments)[0].env or ""


def _parser(task: str = "") -> argparse.ArgumentParser:
    parser = _Parser(
        prog="torchrl-unilab", description="Asynchronous training for TorchRL on batched MuJoCo."
    )
    shown = f"torchrl-unilab {torchrl_unilab.__version__}"
    parser.add_argument("--version", action="version", version=shown)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_algorithms(commands.add_parser("train", help="train a policy"), task, _add_training)
    tasks = commands.add_parser("tasks", help="list the tasks, and what is known of each")
    tasks.set_defaults(run=_tasks)
    budget = commands.add_parser("budget", help="show the memory and threads that a run would take")
    _add_algorithms(budget, task, _add_budget)
    _add_evaluation(commands.add_parser("eval", help="evaluate a run's checkpoint"))
    _add_playing(commands.add_parser("play", help="film a run's checkpoint"))
    return parser


def _add_algorithms(
    command: argparse.ArgumentParser, task: str, add: Callable[[argparse.ArgumentParser], None]
) -> None:
    """Add a command per algorithm, with the arguments of `add` and the algorithm's settings."""
    algorithms = command.add_subparsers(required=True, metavar="ALGORITHM", dest="algorithm")
    for name, algorithm in SETTINGS.items():
        parser = algorithms.add_parser(name, help=algorithm.title, description=algorithm.title)
        add(parser)
        note = "A task may have other defaults than these: --env TASK --help shows them."
        if task in algorithm.tasks:
            note = f"The defaults are those of {task}."
        elif task:
            note = f"{task} has no settings of its own: these are the general defaults."
        group = parser.add_argument_group(f"settings of {name}", note)
        defaults = algorithm.for_task(task)
        others = [
            f.name for f in dataclasses.fields(defaults) if f.metadata["of"] not in (None, name)
        ]
        add_settings(group.add_argument, type(defaults), vars(defaults), ["algorithm", *others])


def _add_training(train: argparse.ArgumentParser) -> None:
    add = train.add_argument
    path = os.path.expanduser  # most shells leave the ~ of --run-dir=~/run
    run_dir = "new directory of the run (default: runs/TASK-ALGORITHM-SEED-TIME)"
    add("--run-dir", type=path, help=run_dir)
    resume = (
        "continue the run in --run-dir; its task, frames and settings need not be given; where "
        "they are, and it has no checkpoint yet, start it: one command for both; devices and "
        "numbers of threads may be others than before"
    )
    add("--resume", action="store_true", help=resume)
    add("--config", type=path, metavar="FILE", help="repeat a run, by its config.yaml and flags")
    add("--print-config", action="store_true", help="print the config.yaml of the run, and end")
    defaults = {field.name: field.default for field in dataclasses.fields(RunConfig)}
    add_settings(add, RunConfig, defaults, skip=["progress_bar"])
    flag = argparse.BooleanOptionalAction
    add("--progress", dest="progress_bar", action=flag, help="show the progress bar (default)")
    train.set_defaults(run=_train)


def _train(options: argparse.Namespace) -> int:
    if options.resume and options.run_dir is None:
        raise ConfigError("train: --resume without --run-dir (expected both). Add --run-dir.")
    if options.resume and not _has_to_start(options):
        if options.print_config:
            raise ConfigError(
                "train: --print-config of a run to resume (expected one to start). It is in "
                f"{options.run_dir}/{CONFIG_FILE}."
            )
        run, settings = _requested(options)
        start_fork_server()
        from torchrl_unilab.trainers.runs.resume import resume_run

        known: dict[str, Any] = {"algo": options.algorithm, **settings}
        known |= {name: run.pop(name) for name in ("env", "seed") if name in run}
        with _hinting_how_to_resume(options):
            summary = resume_run(options.run_dir, settings=known, announce=print, **run)
    else:
        from torchrl_unilab.envs.registry import make_task

        plan, config = _planned(options)
        if options.print_config or ":" not in plan.env:
            make_task(plan.env)  # or refuse it, before torch is imported
        if options.print_config:
            print(as_yaml(run_settings(plan, config)), end="")
            return 0
        start_fork_server()
        make_task(plan.env)  # a module of the user's may start threads, which do not survive a fork
        from torchrl_unilab.trainers.runs.train import Run

        if options.run_dir is None:
            name = f"{plan.env}-{options.algorithm}-{plan.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
            options.run_dir = str(Path("runs", name.replace(":", "-")))
        again = options.resume and Path(options.run_dir, CONFIG_FILE).is_file()
        with _hinting_how_to_resume(options):
            summary = Run(plan, config, options.run_dir, announce=print, again=again)()
    if launcher_env("RANK", 0):
        return 130 if summary["interrupted"] else 0
    _show(summary)
    there = sorted(path.name for path in Path(options.run_dir).iterdir())
    print(f"wrote {options.run_dir}: {', '.join(there)}")
    if not summary["interrupted"]:
        return 0
    again = _resuming(options)
    print(f"interrupted after {summary['frames']:,} frames; to go on: {again}", file=sys.stderr)
    return 130


def _resuming(options: argparse.Namespace) -> str:
    """Return the command that continues a run."""
    start, ranks = "torchrl-unilab", launcher_env("WORLD_SIZE", 1)
    if ranks > 1:
        machines = "" if ranks == local_ranks() else f"--nnodes {ranks // local_ranks()} "
        start = f"torchrun {machines}--nproc-per-node {local_ranks()} -m torchrl_unilab"
    return f"{start} train {options.algorithm} --run-dir {shlex.quote(options.run_dir)} --resume"


@contextlib.contextmanager
def _hinting_how_to_resume(options: argparse.Namespace) -> Iterator[None]:
    """Print how to resume if a run fails, or is interrupted twice, and has left a checkpoint."""
    try:
        yield
    except (CheckpointError, ConfigError):
        raise
    except BaseException:
        saved = sorted(Path(options.run_dir).glob(_CHECKPOINTS))
        frames = int(saved[-1].name.partition("-")[2]) if saved else 0
        if frames and not launcher_env("RANK", 0):
            print(f"{frames:,} frames are saved; to go on: {_resuming(options)}", file=sys.stderr)
        raise


def _has_to_start(options: argparse.Namespace) -> bool:
    """Return whether ``--resume`` starts the run: it is fully described, and has no checkpoint."""
    known = options.config is not None or None not in (options.env, options.frames)
    return known and not any(Path(options.run_dir).glob(_CHECKPOINTS))


def _show(summary: Mapping[str, Any]) -> None:
    """Print the results of a run, one a line."""
    busy, frames, seconds = summary["busy"], summary["frames"], summary["seconds"]
    best = summary["best"]
    collectors = ", ".join(f"{share:.0%}" for share in busy["collectors"]) or "none"
    cells = {
        "training return": _number(summary["final_return"]),
        "deterministic": _number(summary["eval_return"]),
        "best": f"{_number(best['eval_return'])} at {best['frames']:,} frames" if best else "none",
        "frames": f"{frames:,}",
        "seconds": f"{seconds:,.1f}",
        "frames/s": f"{frames / seconds:,.0f}" if seconds else "none",
        "busy": f"learner {busy['learner']:.0%}, collectors {collectors}",
    }
    print(summary["env"])
    for name, cell in cells.items():
        print(f"  {name}: {cell}")
    print("deterministic, best: without exploration; busy: all but waits, collectors' cores")


def _requested(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the run and the settings that flags and ``--config`` give."""
    run, settings = given(options, RunConfig), given(options, SETTINGS[options.algorithm].kind)
    if options.config is None:
        return run, settings
    saved_run, saved = split_settings(read_config(Path(options.config)), options.algorithm)
    return {**saved_run, **run}, {**saved, **settings}


def _planned(options: argparse.Namespace) -> tuple[RunConfig, Any]:
    """Return the run and the settings to start with."""
    run, settings = _requested(options)
    if not {"env", "frames"} <= run.keys():
        raise ConfigError(
            f"train: --env {run.get('env')}, --frames {run.get('frames')} (expected both). Pass "
            "both, or --config to repeat a run, or --resume to continue one."
        )
    return RunConfig(**run), SETTINGS[options.algorithm].for_task(run["env"], **settings)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:,.1f}"


def _tasks(_: argparse.Namespace) -> int:
    from torchrl_unilab.configs.benchmark_results import results_for_task
    from torchrl_unilab.envs.registry import EXAMPLES, TASKS

    line = "{:26}{:15}{:8}{}".format
    print(line("task", "own settings", "choose", "known"))
    for task in (*TASKS, *EXAMPLES):
        own = [name for name, algorithm in SETTINGS.items() if task in algorithm.tasks]
        known = results_for_task(task)
        words = "; ".join(map(str, known)) or "not measured"
        print(line(task, " ".join(own) or "-", known[0].algorithm if known else "-", words))
    print(
        "Known: a training return that every seed reached with the task's own settings, and the "
        "median of seconds and frames to it on two cores, which some shared with others. Choose "
        "the fastest within a tenth of the highest. Without own settings a task has the defaults."
    )
    return 0


def _add_budget(budget: argparse.ArgumentParser) -> None:
    budget.add_argument("--env", required=True, help="task, for example HalfCheetah-v5")
    budget.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    budget.set_defaults(run=_budget)


def _budget(options: argparse.Namespace) -> int:
    importlib.import_module("torchrl_unilab.preload")
    from torchrl_unilab.trainers.runs.builders import plan_run

    algorithm = SETTINGS[options.algorithm]
    settings = given(options, algorithm.kind)
    budget = plan_run(options.env, algorithm.for_task(options.env, **settings))
    print(json.dumps(budget.as_dict()) if options.json else budget)
    refusal = budget.refusal()
    return 0 if refusal is None else _refused(refusal)


def _add_run(command: argparse.ArgumentParser) -> None:
    command.add_argument("--run-dir", required=True, help="directory of a run")
    best = "take the policy of the run's best evaluation, not the newest one"
    command.add_argument("--best", action="store_true", help=best)


def _add_evaluation(evaluation: argparse.ArgumentParser) -> None:
    add, count = evaluation.add_argument, argument(int)
    _add_run(evaluation)
    add("--episodes", default=16, help="number of episodes (default: 16)", **count)
    add("--seed", default=0, help="seed of the episodes (default: 0)", **count)
    evaluation.set_defaults(run=partial(_print_result, "evaluate_run"))


def _add_playing(playing: argparse.ArgumentParser) -> None:
    add, count, path = playing.add_argument, argument(int), os.path.expanduser
    _add_run(playing)
    add("--video", required=True, type=path, help="file to write, ending in .mp4")
    add("--episodes", default=1, help="episodes, one after the other (default: 1)", **count)
    add("--max-steps", help="steps after which an episode ends (default: the task's)", **count)
    add("--seed", default=0, help="seed of episodes and drawn actions (default: 0)", **count)
    add("--width", default=640, help="pixels, even (default: 640)", **count)
    add("--height", default=480, help="pixels, even (default: 480)", **count)
    camera = "camera of the model, by name or number (default: a free one)"
    add("--camera", type=_name_or_number, help=camera)
    flag = argparse.BooleanOptionalAction
    add("--deterministic", action=flag, default=True, help="act without exploration")
    playing.set_defaults(run=partial(_print_result, "play_run"))


def _name_or_number(camera: str) -> str | int:
    return int(camera) if camera.lstrip("-").isdecimal() else camera


def _print_result(command: str, options: argparse.Namespace) -> int:
    """Call a function of the package with the options by name, and print what it returns."""
    importlib.import_module("torchrl_unilab.preload")
    arguments = {key: value for key, value in vars(options).items() if key != "run"}
    print(json.dumps(getattr(torchrl_unilab, command)(**arguments)))
    return 0
