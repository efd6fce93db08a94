from __future__ import annotations

import re
import runpy
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_script_in_the_readme_runs(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text(re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0])
    runpy.run_path(str(script), run_name="__main__")
    # The last version is pulled by no rollout.
    assert capsys.readouterr().out.strip() == "10 {0: 9, 1: 9}"


def test_every_make_target_in_the_readme_exists():
    makefile = (README.parent / "Makefile").read_text()
    for target in set(re.findall(r"`?make ([a-z-]+)", README.read_text())):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
