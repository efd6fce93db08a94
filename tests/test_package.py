from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

ROOMS = ["shm", "runtime", "weight_update", "data", "modules", "objectives", "envs"]
ROOMS += ["collectors", "trainers"]


@pytest.mark.parametrize("room", ROOMS)
def test_all_names_exist_and_are_documented(room):
    module = importlib.import_module(f"torchrl_unilab.{room}")
    assert module.__doc__
    for name in module.__all__:
        assert hasattr(module, name), name


def test_importing_the_package_starts_and_prints_nothing():
    code = (
        "import threading, os, torchrl_unilab, torchrl_unilab.shm\n"
        "assert threading.active_count() == 1\n"
        "import sys; assert 'torchrl' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""
