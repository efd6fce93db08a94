"""Whole runs that have ended, shared by all tests that only read what they left."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.quick import APPO, FRAMES, INTERVAL, OFF_POLICY, QUIET
from torchrl_unilab.trainers import APPOConfig, OffPolicyConfig, train_appo, train_off_policy


class Terminal(io.StringIO):
    """A terminal that remembers."""

    def isatty(self) -> bool:
        """Return True."""
        return True


@pytest.fixture(autouse=True)
def _runs_draw_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes a third of a short run; those of the fixtures below draw theirs."""
    monkeypatch.setattr("torchrl_unilab.trainers.runs.summary.plot_returns", lambda *_: None)


@pytest.fixture(scope="session")
def appo_run(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run of APPO: its directory, its summary and what it wrote to the terminal."""
    run_dir = tmp_path_factory.mktemp("appo") / "run"
    with contextlib.redirect_stderr(Terminal()) as terminal:
        summary = train_appo(
            "InvertedPendulum-v5",
            frames=1024,
            run_dir=run_dir,
            seed=3,
            config=APPOConfig(**APPO),
            eval_episodes=2,
            eval_interval=400,
        )
    return SimpleNamespace(run_dir=run_dir, summary=summary, terminal=terminal.getvalue())


@pytest.fixture(scope="session")
def off_policy_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SimpleNamespace]:
    """Runs of SAC and TD3 ahead of the learner: directory and summary of each."""

    def run(algorithm: Any) -> SimpleNamespace:
        run_dir: Path = tmp_path_factory.mktemp(algorithm) / "run"
        summary = train_off_policy(
            "InvertedPendulum-v5",
            frames=FRAMES,
            run_dir=run_dir,
            config=OffPolicyConfig(algorithm, **OFF_POLICY),
            checkpoint_interval=INTERVAL,
            **QUIET,
        )
        return SimpleNamespace(run_dir=run_dir, summary=summary)

    return {algorithm: run(algorithm) for algorithm in ("sac", "td3")}
