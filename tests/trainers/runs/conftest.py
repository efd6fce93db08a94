"""A run that tests resume."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def free(off_policy_runs) -> Path:
    """A run of SAC ahead of the learner, which has ended."""
    return off_policy_runs["sac"].run_dir


@pytest.fixture
def run_dir(free, tmp_path) -> Path:
    """A copy of it, to change."""
    return shutil.copytree(free, tmp_path / "run")
