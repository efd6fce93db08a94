from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from torchrl_unilab.envs import MujocoBatchEnv


@pytest.fixture(autouse=True)
def _scratch_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # MuJoCo appends its warnings to MUJOCO_LOG.TXT in the working directory
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _each_environment_is_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the environments that a test makes when it ends."""
    made: list[MujocoBatchEnv] = []
    init = MujocoBatchEnv.__init__

    @wraps(init)
    def keep(env: MujocoBatchEnv, *args: Any, **kwargs: Any) -> None:
        init(env, *args, **kwargs)
        made.append(env)

    monkeypatch.setattr(MujocoBatchEnv, "__init__", keep)
    yield
    for env in made:
        env.close()
