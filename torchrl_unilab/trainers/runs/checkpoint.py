"""Checkpoints of a run: whole or not there at all, a few of them, refused where damaged.

A checkpoint is TorchRL's (`torchrl.checkpoint.Checkpoint`), a directory named after the
frames collected, ``checkpoint/frames-000000065536``, with the digests of its files beside
them. It is written under another name, synced to the disk and renamed, so that a process
that is killed, a full disk or a power failure leaves the checkpoints before it as they were.

All seeds follow from the run's root seed, so that a run in lock-step is repeatable. *networks* and
*acting* are the first two children of ``SeedSequence(seed)``; each further rank has the next child
as its *acting*. Runs of seeds 0 and 1 have no seed in common, and ranks only that of the networks:

====================  ==================================================================
Networks              torch's generator of the learner, seeded with *networks*
Environment i of      acting + w * num_envs + i, as Gymnasium counts; models that differ
collector w           draw from a child of that generator
Noise of collector w  the first number of ``SeedSequence((acting, w))``
Minibatches           torch's generator, seeded by TorchRL's trainer with the first seed
                      that no environment has
Sample of tick t      base + t, the base drawn by the learner
Evaluation            seed + i
====================  ==================================================================

A checkpoint has the state of all of them, so that a run in lock-step that resumes from one
equals, bit for bit, the run that was never interrupted. A checkpoint after Ctrl-C or an error has
no collectors' state, as they may have been interrupted in mid-rollout. With several ranks it has
rank 0's state: the others resume with its networks and replay, and with new episodes and noise.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from torchrl.checkpoint import (
    Checkpoint,
    CheckpointOptions,
    CheckpointRotation,
    DumpLoadCheckpointAdapter,
    GlobalRNGState,
    StateDictCheckpointAdapter,
)
from torchrl.checkpoint import CheckpointError as TorchRLCheckpointError
from torchrl.trainers import Trainer

from torchrl_unilab.configs.file import StrPath
from torchrl_unilab.data import PackedReplayStorage
from torchrl_unilab.errors import CheckpointError
from torchrl_unilab.runtime.trace import span
from torchrl_unilab.trainers.base import RankTrainer

FORMAT = 5
"""Version of the format of this package's checkpoints; others are refused."""
DIGESTS = "digests.json"
MANIFEST = "manifest.json"
_PREFIX, _DIGITS = "frames", 12
_ARCHIVE = ".tdz"
_SUFFIXES = {".json", ".memmap", ".bin", ".pt", _ARCHIVE}  # not unpickled: .pt is weights only


class _ReplayAdapter(DumpLoadCheckpointAdapter):
    """Saves the rows of a replay as they lie in shared memory, without a copy."""

    adapter_id = "torchrl_unilab.packed_replay"


def run_checkpoint(**components: Any) -> Checkpoint:
    """Return a checkpoint of named components and the generators of this process.

    Trainers add what they have.
    """
    checkpoint = Checkpoint(**components, rng=GlobalRNGState())
    # Written, not mapped: where a disk is full, a page of a map that has no room ends the process.
    checkpoint.register_adapter(object, StateDictCheckpointAdapter("archive"))
    checkpoint.register_adapter(PackedReplayStorage, _ReplayAdapter())
    return checkpoint


@dataclass(frozen=True)
class SavedRun:
    """A whole checkpoint of this package's format.

    Attributes:
        path: Where it is.
        frames: Frames that had been collected.
        run: Task, algorithm, seed and settings.
        total_frames: Frames that the run was to collect.
        interval: Frames between checkpoints; None if it was not set.
        keep: How many checkpoints are kept.
        resumed: Frames at which the run had been resumed, each time.
        version: Of the weights that had been published last.
    """

    path: Path
    frames: int
    run: Mapping[str, Any]
    total_frames: int
    interval: int | None
    keep: int
    resumed: Sequence[int]
    version: int


class RunCheckpoints(CheckpointRotation):
    """The newest checkpoints of a run, by the frames collected.

    Args:
        directory: Where they are, or will be once there is one.
        keep: How many are kept.
        interval: Frames between checkpoints, for their metadata.

    Raises:
        ValueError: `keep` is less than 1.

    Examples:
        >>> from torchrl_unilab.trainers.runs.checkpoint import RunCheckpoints, run_checkpoint
        >>> import tempfile
        >>> import torch
        >>> checkpoints = RunCheckpoints(tempfile.mkdtemp(), keep=2)
        >>> metadata = checkpoints.metadata({"env": "Hopper-v5"}, total_frames=300)
        >>> for frames in (100, 200, 300):
        ...     path = checkpoints.save(
        ...         run_checkpoint(net=torch.nn.Linear(2, 1)),
        ...         step=frames,
        ...         metadata={**metadata, "collected_frames": frames},
        ...     )
        >>> [path.name for path in checkpoints.paths()], checkpoints.newest().frames
        (['frames-000000000300', 'frames-000000000200'], 300)
    """

    def __init__(self, directory: StrPath, keep: int = 2, interval: int | None = None) -> None:
        super().__init__(Path(directory), keep_last=keep, prefix=_PREFIX)
        self.directory = Path(directory)  # TorchRL would expand a "~"
        self.interval = interval

    def metadata(
        self,
        run: Mapping[str, Any],
        total_frames: int,
        resumed: Collection[int] = (),
        version: int = 0,
    ) -> dict[str, Any]:
        """Return what to save of a run besides its components; see `SavedRun`."""
        return {
            "unilab_format": FORMAT,
            "run": dict(run),
            "total_frames": total_frames,
            "interval": self.interval,
            "keep": self.keep_last,
            "resumed": list(resumed),
            "version": version,
        }

    def paths(self) -> list[Path]:
        """Return where there are checkpoints, whole or damaged, the newest first.

        Copies by other names are none: they are neither loaded nor removed.
        """
        found = self.directory.glob(f"{_PREFIX}-{'[0-9]' * _DIGITS}")
        return sorted(found, reverse=True)

    def save(
        self,
        checkpoint: Checkpoint,
        *,
        step: int,
        components: Collection[str] | None = None,
        **options: Any,
    ) -> Path:
        """Save a checkpoint after `step` frames, whole or not at all; remove the oldest.

        If there is one with the same number of frames, it stays, and nothing is saved.

        Args:
            checkpoint: What is saved.
            step: Frames that have been collected.
            components: Which parts; all but the logger if not given.
            **options: As for TorchRL's ``Checkpoint.save``: ``metadata``, ``component_options``.

        Raises:
            OSError: The checkpoint cannot be written. What was there is as it was.
        """
        directory = self.directory
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{_PREFIX}-{step:0{_DIGITS}d}"
        if path.exists():
            return path
        if components is None:  # a logger's state is its name alone
            components = set(checkpoint.components) - {"logger"}
        for dots in (".", ".."):  # left by a process that was killed; two: TorchRL's, of a draft
            for leftover in directory.glob(f"{dots}{_PREFIX}-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        draft = directory / f".{path.name}"
        try:
            with span("checkpoint"):
                checkpoint.save(draft, components=components, format="directory", **options)
                (draft / DIGESTS).write_text(json.dumps(_digests(draft)))
                for entry in (*draft.rglob("*"), draft):
                    _sync(entry)
                draft.rename(path)
        except (OSError, RuntimeError) as error:
            refused = _refused_by_disk(error)
            if not refused:
                raise
            then = "train again"
            if self.paths():
                then = "resume from the checkpoint before, or keep fewer (keep_checkpoints)"
            raise OSError(
                f"cannot save a checkpoint in {directory}: {refused} (expected room for it; "
                f"{shutil.disk_usage(directory).free} bytes are free). Make room and {then}."
            ) from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        _sync(directory)
        for old in self.paths()[self.keep_last :]:
            gone = old.rename(old.with_name(f".{old.name}"))  # atomic
            shutil.rmtree(gone, ignore_errors=True)
        return path

    def newest(self, components: Collection[str] | None = None) -> SavedRun:
        """Return the newest checkpoint, if it is whole.

        Args:
            components: What is needed of it; all if not given.

        Raises:
            CheckpointError: There is no checkpoint, or it is damaged or of another format; names an
                older one that is whole, if there is one.
        """
        paths = self.paths()
        if not paths:
            raise CheckpointError(
                f"no checkpoint in {self.directory} (expected one). Train from the start."
            )
        damage = _damage(paths[0], components)
        if damage is not None:
            older = next((p for p in paths[1:] if _damage(p, components) is None), None)
            remedy = "None of the older ones is whole either. Train from the start."
            if older is not None:
                remedy = f"{older.name} is: remove {paths[0].name} to resume from there."
            raise CheckpointError(
                f"checkpoint {paths[0]}: {damage} (expected a whole one, of format {FORMAT}). "
                f"{remedy}"
            )
        metadata = Checkpoint.manifest(paths[0])["metadata"]
        kept = {field.name: metadata[field.name] for field in fields(SavedRun)[2:]}
        return SavedRun(paths[0], metadata["collected_frames"], **kept)


def _damage(path: Path, components: Collection[str] | None) -> str | None:
    """Return what is wrong with a checkpoint, or with some components of it; None if nothing is.

    Digests show accidents. Against code that was planted, with digests to match, no file may
    be of a kind that is unpickled, wherever in the checkpoint it is, or in an archive to be loaded.
    """
    if held := _holds(_foreign(path)):
        return held
    try:
        expected = dict(json.loads((path / DIGESTS).read_text()))
        if expected.get(MANIFEST) != _digest(path / MANIFEST):
            return f"its {MANIFEST} is not as it was written"
        manifest = Checkpoint.manifest(path)
    except (TorchRLCheckpointError, OSError, TypeError, ValueError) as error:
        return f"it cannot be read, {error}"
    if manifest["metadata"].get("unilab_format") != FORMAT:
        return f"it is of format {manifest['metadata'].get('unilab_format')}"
    parts = None
    if components is not None:
        if missing := sorted(set(components) - manifest["components"].keys()):
            return f"it has no {missing}"
        parts = tuple(manifest["components"][name]["path"] + "/" for name in components)
        expected = {name: digest for name, digest in expected.items() if name.startswith(parts)}
    found = _digests(path, parts)
    found.pop(DIGESTS, None)
    wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
    if wrong:
        return f"its files {wrong} are not as they were written"
    # Only now: to open a damaged archive may raise anything.
    archives = [name for name in expected if name.endswith(_ARCHIVE)]
    return _holds([f"{name}/{file}" for name in archives for file in _foreign_within(path / name)])


def _holds(foreign: list[str]) -> str | None:
    """Return what is wrong with a checkpoint that holds these files; None without any."""
    said = f"it holds {foreign}, which no checkpoint has and loading may execute"
    return said if foreign else None


def _foreign(directory: Path) -> list[str]:
    """Return files and links of a kind that a checkpoint has not, by name below a directory."""
    return sorted(
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if path.is_symlink() or (path.is_file() and path.suffix not in _SUFFIXES)
    )


def _foreign_within(archive: Path) -> list[str]:
    """Return files of such a kind in an archive."""
    with ZipFile(archive) as files:
        return [name for name in files.namelist() if Path(name).suffix not in _SUFFIXES]


def _digests(directory: Path, parts: tuple[str, ...] | None = None) -> dict[str, str]:
    """Return each file's digest by its name below a directory."""
    names = (p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())
    return {n: _digest(directory / n) for n in names if parts is None or n.startswith(parts)}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _refused_by_disk(error: OSError | RuntimeError) -> str:
    """Return the system's message if an error is the disk's fault; else an empty text.

    Torch raises its own errors, which end with the system's message.
    """
    words = {os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)}
    return next((word for word in words if word in str(error)), "")


def _sync(path: Path) -> None:
    """Sync a file, or a directory's own entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_learner(trainer: Trainer, *, insist: bool = False) -> None:
    """Save all but the state of the workers, which may be busy or lost.

    With `insist`, an interrupt while it saves makes it save again: torchrun interrupts all ranks if
    one is lost.
    """
    if not all(p.isfinite().all() for p in trainer.loss_module.parameters()):
        return  # keep the earlier checkpoints, which are finite
    try:
        trainer.checkpoint_rotation.save(
            trainer.checkpoint,
            step=trainer.collected_frames,
            metadata=trainer._checkpoint_manifest_metadata(),
            component_options={"collector": CheckpointOptions(save_kwargs={"workers": False})},
        )
    except KeyboardInterrupt:
        if not insist:
            raise
        save_learner(trainer)


def load_trainer(trainer: RankTrainer, saved: SavedRun, *, moved: bool = False) -> None:
    """Restore a trainer and its workers.

    The checkpoint is rank 0's: episodes, noise and samples of the other ranks begin anew. If it was
    `moved`, that is, written on other devices, noise and samples of rank 0 do, too.

    Raises:
        CheckpointError: The checkpoint does not fit.
    """
    begun_anew = {"rng", "trainer_module.pipeline"} if trainer.ranks.rank or moved else set()
    parts = Checkpoint.manifest(saved.path)["components"].keys()
    not_saved = {"trainer_module.evaluation"} - parts  # evaluation was enabled on resuming
    components = set(trainer.checkpoint.components) - begun_anew - not_saved
    replay = {"replay"} & components  # loaded first: the writers' states refer to its rows
    try:
        if replay:
            trainer.checkpoint.load(saved.path, components=replay)
        device = "cpu" if moved else None  # modules and optimisers copy it to their own
        trainer.checkpoint.load(saved.path, components=components - replay, map_location=device)
    except TorchRLCheckpointError as error:
        raise CheckpointError(
            f"cannot resume from {saved.path}: {error} (expected a checkpoint of this run's "
            "networks and environments). Resume with the create_env and the versions that wrote "
            "it."
        ) from error
    if begun_anew:
        trainer.set_seed()
    trainer.collector.update_policy_weights_()
    if trainer.progress_bar:

        def begin() -> None:
            bar = trainer._pbar
            bar.initial = bar.n = bar.last_print_n = saved.frames  # its rate leaves these out

        trainer.register_op("setup", begin)
