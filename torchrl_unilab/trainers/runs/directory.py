"""A run's directory: what is in it, and who may write to it.

Its entries::

    config.yaml     settings, which repeat the run (`torchrl_unilab.configs.file`)
    checkpoint/     checkpoints (`torchrl_unilab.trainers.runs.checkpoint`)
    best/           the policy of the best evaluation (`torchrl_unilab.trainers.runs.best_policy`)
    logs/           CSV; tensorboard/ beside it (`torchrl_unilab.trainers.runs.loggers`)
    summary.json    what came of the run; returns.png, its curve: both at its end
    trace.json      the timeline, if asked for (`torchrl_unilab.runtime.trace`)
    videos/         filmed episodes, if asked for (`torchrl_unilab.trainers.video`)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchrl_unilab.configs.file import CONFIG_FILE, StrPath, read_config
from torchrl_unilab.errors import ConfigError

CHECKPOINT = "checkpoint"
BEST = "best"
TRACE = "trace.json"
VIDEOS = "videos"


def run_path(run_dir: StrPath) -> Path:
    """Return a run's directory, absolute, as environments may change the working directory.

    Raises:
        ConfigError: `run_dir` is empty, in the home of an unknown user, no text in this locale, or
            relative to a working directory that was deleted.
    """
    reason = "empty"
    try:
        if not isinstance(run_dir, (str, os.PathLike)):
            reason = f"a {type(run_dir).__name__}"
        elif name := os.fspath(run_dir):
            name.encode()  # TensorBoard does so, too
            return Path(name).expanduser().absolute()
    except FileNotFoundError:
        reason = "relative to a working directory that was deleted"
    except UnicodeEncodeError:
        reason = f"no text in the locale's {sys.getfilesystemencoding()}"
    except RuntimeError as error:
        reason = str(error)
    raise ConfigError(
        f"run directory {str(run_dir)!r}: {reason} (expected a path). Pass the directory of the "
        "run."
    )


def check_run_dir(path: Path) -> None:
    """Refuse a directory for a new run that is not empty, or cannot be made; a ConfigError.

    A run that was killed while it wrote its first file has left a draft of it.
    """
    if os.path.lexists(path) and (  # a link to nothing, too
        not path.is_dir() or any(entry.name != f".{CONFIG_FILE}" for entry in path.iterdir())
    ):
        found, way = "not empty" if path.is_dir() else "a file", ""
        if Path(path, CONFIG_FILE).is_file():
            way = ", or continue the run in it: --resume, or resume_run"
        raise ConfigError(
            f"run directory {path}: it is {found} (expected a new or empty directory). "
            f"Choose another{way}."
        )
    check_can_be_made(f"run directory {path}", path)


def check_can_be_made(what: str, directory: Path) -> None:
    """Refuse a directory that is not there and cannot be made, or written to; a ConfigError."""
    parent = next(parent for parent in (directory, *directory.parents) if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(
            f"{what}: cannot be made in {parent} (expected a directory that may be written to). "
            "Choose another."
        )


def check_same_run(path: Path, settings: Mapping[str, Any]) -> None:
    """Refuse to start a run again in the directory of another one; a ConfigError."""
    file_settings = read_config(path / CONFIG_FILE)
    asked = {key: settings[key] for key in ("env", "algo", "seed")}
    found = {key: file_settings.get(key) for key in asked}
    if found != asked:
        raise ConfigError(
            f"run directory {path}: it is of a run with {found} (expected {asked}). Choose another."
        )


@contextlib.contextmanager
def run_dir_held(path: Path) -> Iterator[None]:
    """Keep other runs out of a run directory, made if needed, by a lock that ends with the process.

    Raises:
        ConfigError: Another run has it, or it cannot be made or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        reason, way = "" if os.access(path, os.W_OK) else "it is read-only", ", or copy the run"
    except OSError as error:
        reason, way = f"cannot be made, {error.strerror}", ""
    if reason:
        raise ConfigError(
            f"run directory {path}: {reason} (expected a directory that may be written to). Choose "
            f"another{way}."
        )
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"run directory {path}: another run writes to it (expected none). Wait until it "
                "has ended, or end it, or choose another directory."
            ) from error
        yield
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Write a file whole, or leave it as it was: also on a full disk, or if this is killed."""
    draft = path.with_name(f".{path.name}")
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
