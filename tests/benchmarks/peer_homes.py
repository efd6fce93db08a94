"""Environments of other libraries, below ``.venv-peers``, which nothing of ours depends on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "peers"
HOMES = {
    "baselines": [
        "sbx-rl==0.28.0",
        "stable-baselines3==2.9.2",
        "gymnasium[mujoco]==1.4.0",
        "cpprb==11.0.0",
    ],
    "rl_games": ["rl-games==1.6.5", "envpool==1.2.5"],
}
"""Environments of peers, and what pip is asked for."""


def python_of(home: str) -> str:
    """Return the interpreter of a peer's environment, which is made if there is none."""
    place = ROOT / ".venv-peers" / home
    python = place / "bin" / "python"
    if not (place / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "-c", ROOT / "constraints.txt", "torch"], check=True)
        subprocess.run([*pip, *HOMES[home]], check=True)
        (place / "installed").touch()
    return str(python)
