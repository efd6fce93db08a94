from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.bounds import DEADLINE

README = Path(__file__).parents[1] / "README.md"


def test_the_script_in_the_readme_runs(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0])
    command = [sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "10 {0: 9, 1: 9}"  # the last is pulled by no rollout


def test_every_make_target_in_the_readme_exists():
    makefile = (README.parent / "Makefile").read_text()
    for target in set(re.findall(r"`?make ([a-z-]+)", README.read_text())):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
