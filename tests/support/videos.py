"""Reads videos back."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np


def read_video(path: Path) -> tuple[np.ndarray, Fraction]:
    """Return all pictures, [frames, height, width, 3] uint8, and their rate."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        return np.stack(frames), stream.average_rate
