from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torchrl_unilab.envs.registry import EXAMPLES, TASKS, make_task
from torchrl_unilab.envs.robots.quadruped import QuadrupedWalk
from torchrl_unilab.errors import ConfigError

MODULE = """
from torchrl_unilab.envs.robots.quadruped import QuadrupedWalk
TASK = QuadrupedWalk(frame_skip=6)
NUMBER = int
def unmade(weights):
    return weights
def broken():
    return int([])
"""


@pytest.mark.parametrize("name", [*TASKS, *EXAMPLES])
def test_gymnasiums_tasks_and_the_examples_have_names_and_options(name: str) -> None:
    assert make_task(name) == {**TASKS, **EXAMPLES}[name]
    assert make_task(name).name == name
    assert make_task(name, frame_skip=7).frame_skip == 7


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("Hopper-v5", "speed"),
        ("QuadrupedWalk", "speed"),
        ("Hopper-v5", "xml_file"),
        ("Hopper-v5", "reads"),  # what a task is, and not how it is set
    ],
)
def test_an_unknown_option_is_refused_and_the_known_ones_are_listed(name: str, option: str) -> None:
    message = rf"{name} has no option {option} \(expected some of assets, .*frame_skip, .*model, "
    with pytest.raises(ConfigError, match=message):
        make_task(name, **{option: 1.0})


def test_a_model_in_place_of_a_task_is_recognised() -> None:
    with pytest.raises(ConfigError, match=r"'robot\.xml' is a model .* Derive one from RobotTask"):
        make_task("robot.xml")


def test_a_misspelt_option_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean frame_skip"):
        make_task("Hopper-v5", frame_skips=2)


def test_an_unknown_option_of_a_task_by_module_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"QuadrupedWalk' with \['speed'\], .* argument 'speed'"):
        make_task("torchrl_unilab.envs.robots.quadruped:QuadrupedWalk", speed=1.0)


def test_a_task_of_any_module_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_robot_of_a_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    made = make_task("own_robot_of_a_test:QuadrupedWalk", max_episode_steps=7)
    assert isinstance(made, QuadrupedWalk)
    assert made.max_episode_steps == 7
    assert make_task("own_robot_of_a_test:TASK").frame_skip == 6
    assert make_task("own_robot_of_a_test:TASK", frame_skip=2).frame_skip == 2
    with pytest.raises(ConfigError, match=r"of_a_test:NUMBER' gives: int \(expected MujocoTask"):
        make_task("own_robot_of_a_test:NUMBER")
    with pytest.raises(ConfigError, match=r"unmade' without options, .* argument: 'weights'"):
        make_task("own_robot_of_a_test:unmade")
    with pytest.raises(TypeError, match="not 'list'"):  # with the traceback
        make_task("own_robot_of_a_test:broken")
    del sys.modules["own_robot_of_a_test"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Cheetah-v5", r"no task 'Cheetah-v5' \(expected one of Ant-v5, .*, QuadrupedWalk\)"),
        ("no_such_module:Task", "no task 'no_such_module:Task', No module named"),
        (
            "torchrl_unilab.envs.robots.quadruped:Walk",
            "no task '.*:Walk', module .* has no attribute",
        ),
        (":Task", "no task ':Task', which is no name"),
        ("a{b}:Task", "no task 'a{b}:Task', which is no name"),
        (".robots:Task", "no task '.robots:Task', which is no name"),
        ("os:path", "'os:path' gives: module .expected MujocoTask"),
        ("os:sep", "'os:sep' gives: str .expected"),
        (None, "make_task name: NoneType .expected str"),
    ],
)
def test_an_unknown_name_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_task(name)


@pytest.mark.parametrize("line", ["import no_such_package", "raise ValueError('my bug')"])
def test_an_error_within_a_module_of_ones_own_is_raised_as_it_is(line, tmp_path, monkeypatch):
    (tmp_path / "own_bug_of_a_test.py").write_text(f"{line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        (ModuleNotFoundError, ValueError), match=r"no_such_package|my bug"
    ) as caught:
        make_task("own_bug_of_a_test:Task")
    assert not isinstance(caught.value, ConfigError)
