"""The best policy of a run: the one whose evaluation had the highest mean return.

A run's newest policy may be worse than an earlier one. ``best/`` in the run's directory holds
checkpoints, as ``checkpoint/`` does, of policies alone. They survive a resume from before them.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensordict.nn import TensorDictModuleBase
from torchrl.checkpoint import Checkpoint

from torchrl_unilab.errors import CheckpointError, ConfigError
from torchrl_unilab.trainers.runs.checkpoint import RunCheckpoints, run_checkpoint
from torchrl_unilab.trainers.runs.policy import check_run


class BestPolicy:
    """Keeps the best policy of a run in a directory. Picklable.

    Args:
        directory: Where the best policies are, or will be.
        metadata: Of the run, as `RunCheckpoints.metadata` returns it.
    """

    def __init__(self, directory: Path, metadata: Mapping[str, Any]) -> None:
        self._checkpoints, self._metadata = RunCheckpoints(directory), metadata

    def result(self) -> dict[str, Any] | None:
        """Return its ``frames`` and ``eval_return``; None if there is none.

        None, too, if the newest is damaged, or of another run: the next policy that is evaluated
        takes its place, or else the one before it.
        """
        try:
            saved = self._checkpoints.newest()
            check_run(saved, self._metadata["run"], "not the best")
            metadata = Checkpoint.manifest(saved.path)["metadata"]
            return {"frames": saved.frames, "eval_return": metadata["eval_return"]}
        except (CheckpointError, ConfigError, KeyError):
            return None

    def keep(self, policy: TensorDictModuleBase, frames: int, mean_return: float) -> None:
        """Save a policy if its return is higher; of equals, the newest is the best.

        Args:
            policy: What was evaluated.
            frames: Collected when it was evaluated.
            mean_return: Of its evaluation; one that is not finite is never the best.

        Raises:
            OSError: The policy cannot be written. What was there is as it was.
        """
        if not math.isfinite(mean_return):
            return
        while (best := self.result()) is None and (paths := self._checkpoints.paths()):
            # Moved aside: an older one may be whole, and better than this policy.
            aside = paths[0].with_name(f"refused-{paths[0].name}")
            shutil.rmtree(aside, ignore_errors=True)
            paths[0].rename(aside)
        if best and (mean_return, frames) <= (best["eval_return"], best["frames"]):
            return
        # After a resume, a policy may be better than one of more frames: it is named as the newest.
        taken = (int(path.name.rpartition("-")[2]) for path in self._checkpoints.paths())
        self._checkpoints.save(
            run_checkpoint(policy=policy),
            components=("policy",),
            step=max(frames, max(taken, default=-1) + 1),
            metadata={**self._metadata, "collected_frames": frames, "eval_return": mean_return},
        )
