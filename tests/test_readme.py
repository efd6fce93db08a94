from __future__ import annotations

import contextlib
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.trainers import APPOConfig, train_appo
from torchrl_unilab.weight_update import UniLabShmTransport

README = Path(__file__).parents[1] / "README.md"
FENCED = re.compile(r"```python\n(.*?)```", re.DOTALL)


def test_the_script_in_the_readme_runs(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text(FENCED.findall(README.read_text())[0])
    runpy.run_path(str(script), run_name="__main__")
    # The last version is pulled by no rollout.
    assert capsys.readouterr().out.strip() == "10 {0: 9, 1: 9}"


def test_every_make_target_in_the_readme_exists():
    makefile = (README.parent / "Makefile").read_text()
    for target in set(re.findall(r"`?make ([a-z-]+)", README.read_text())):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_a_trained_policy_acts_and_is_exported_as_the_page_to_start_with_has_it(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    small = APPOConfig.for_task("HalfCheetah-v5", num_envs=4)
    train_appo("HalfCheetah-v5", frames=64, run_dir="runs/python", config=small, eval_episodes=1)
    page = (README.parent / "tutorials" / "getting-started.md").read_text()
    loop, export = [code for code in FENCED.findall(page) if "load_policy" in code]
    capsys.readouterr()
    exec(compile(loop, "getting-started", "exec"), {})
    assert float(capsys.readouterr().out) < 100
    names: dict[str, Any] = {}
    exec(compile(export, "getting-started", "exec"), names)
    exported, seen = torch.export.load("policy.pt2").module(), torch.randn(5, 17)
    action = names["policy"](TensorDict(observation=seen))["action"]
    torch.testing.assert_close(exported(seen), action)


def test_a_task_reads_what_the_learner_writes_as_the_page_on_environments_has_it():
    page = (README.parent / "tutorials" / "how-to" / "environments.md").read_text()
    (code,) = [code for code in FENCED.findall(page) if "UniLabShmTransport" in code]
    names: dict[str, Any] = {}
    exec(compile(code, "environments", "exec"), names)
    with (
        contextlib.closing(UniLabShmTransport.create(names["SHAPES"], name="walk-7")) as transport,
        contextlib.closing(MujocoBatchEnv(names["Taught"](), 4, num_threads=1, seed=0)) as env,
    ):
        for level in (0.0, 2.0):
            transport.write_weights({"lift": torch.full((1,), level)})
            env.rollout(5)
            assert bool(env.reward_terms["lift"].any()) is (level > 0.0)
        names["shared"]()[0].close()


@pytest.mark.parametrize(
    "page", [README, *(README.parent / "tutorials").rglob("*.md")], ids=lambda page: page.name
)
def test_each_link_of_a_page_leads_to_a_file_and_from_the_site_s_to_one_of_these(page):
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        target = (page.parent / link).resolve()
        assert target.is_file(), link
        assert page == README or target.is_relative_to(README.parent / "tutorials"), link
