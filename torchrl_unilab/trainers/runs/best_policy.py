"""The best policy of a run: the one whose evaluation had the highest mean return.

A run's newest policy may be worse than an earlier one. ``best/`` in the run's directory holds
checkpoints, as ``checkpoint/`` does, of policies alone. They survive a resume from before them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensordict.nn import TensorDictModuleBase
from torchrl.checkpoint import Checkpoint

from torchrl_unilab.errors import CheckpointError
from torchrl_unilab.trainers.runs.checkpoint import RunCheckpoints, run_checkpoint


def keep_best(
    directory: Path,
    metadata: Mapping[str, Any],
    policy: TensorDictModuleBase,
    frames: int,
    mean_return: float,
) -> dict[str, Any] | None:
    """Save a policy if its return is higher than the best one's; of equals, the newest is the best.

    Args:
        directory: Where the best policies are, or will be.
        metadata: Of the run, as `RunCheckpoints.metadata` returns it.
        policy: What was evaluated.
        frames: Collected when it was evaluated.
        mean_return: Of its evaluation; one that is not finite is never the best.

    Returns:
        The ``frames`` and ``eval_return`` of the best policy; None if there is none.

    Raises:
        OSError: The policy cannot be written. What was there is as it was.
    """
    checkpoints = RunCheckpoints(directory)
    best, step = None, frames
    if paths := checkpoints.paths():
        # After a resume, a policy may be better than one of more frames.
        step = max(frames, 1 + int(paths[0].name.rpartition("-")[2]))
        try:
            saved = Checkpoint.manifest(checkpoints.newest().path)["metadata"]
            best = {"frames": saved["collected_frames"], "eval_return": saved["eval_return"]}
        except CheckpointError:
            pass  # damaged: the next policy takes its place
    if not math.isfinite(mean_return):
        return best
    if best and (mean_return, frames) <= (best["eval_return"], best["frames"]):
        return best
    result = {"collected_frames": frames, "eval_return": mean_return}
    checkpoints.save(
        run_checkpoint(policy=policy),
        components=("policy",),
        step=step,
        metadata={**metadata, **result},
    )
    return {"frames": frames, "eval_return": mean_return}
