"""The tests under other versions of what we rest on: ``make test-matrix``.

Each row of `SETS` gets an environment of its own below ``build/matrix``, with the releases that pip
finds for its requirements, and runs the tests in it. Prints a table in Markdown. PyTorch comes with
some gigabytes of CUDA libraries unless a build for the processor alone is found first.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETS: dict[str, list[str]] = {
    "pinned": ["-c", str(ROOT / "constraints.txt")],
    "oldest": [
        "torch==2.8.*",
        "torchrl==0.14.1",
        "tensordict==0.14.3",
        "gymnasium==1.1.*",
        "mujoco==4.0.*",
        "numpy==2.0.*",
        "hydra-core==1.3.2",
        "pydantic==2.9.*",
    ],
    "newest": ["--upgrade-strategy=eager", "--upgrade"],
}
"""What pip is asked for beside the package."""

SHOWN = ("torch", "torchrl", "tensordict", "mujoco", "gymnasium", "numpy")
DEFAULT_TESTS = ["tests"]


def run(name: str, tests: list[str]) -> bool:
    """Install a set, run the tests, print its row of the table; return whether all passed."""
    home = ROOT / "build" / "matrix" / name
    python = home / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *SETS[name], f"{ROOT}[test,tutorials,ray]"], check=True)
    code = f"import importlib.metadata as m; print(*map(m.version, {SHOWN!r}))"
    versions = subprocess.check_output([python, "-c", code], text=True).split()
    command = [python, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-q", *tests]
    # PyTorch 2.8's compiler, and what looks up the lines of its C++ errors, keep processes, which
    # would be found as children left behind.
    settings = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCH_DISABLE_ADDR2LINE": "1"}
    own = os.environ | settings
    tested = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=False)
    (home / "tests.log").write_text(tested.stdout + tested.stderr)
    *_, last = re.findall(r"\d+ (?:passed|failed|error).*", tested.stdout) or ["no tests ran"]
    print(f"| {name} | {' | '.join(versions)} | {last.strip(' =')} |", flush=True)
    return tested.returncode == 0


def main() -> int:
    """Print the table, row by row; return 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--tests", nargs="+", default=DEFAULT_TESTS)
    options = parser.parse_args()
    print(f"| set | {' | '.join(SHOWN)} | tests |\n|---|{'---|' * (len(SHOWN) + 1)}")
    passed = [run(name, options.tests) for name in options.sets]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
