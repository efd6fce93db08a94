from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _scratch_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # MuJoCo appends its warnings to MUJOCO_LOG.TXT in the working directory
    monkeypatch.chdir(tmp_path)
