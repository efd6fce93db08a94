"""MuJoCo's own timing of its steps: switched off where environments step."""

from __future__ import annotations

import _ctypes
from collections.abc import Iterator

import mujoco
import numpy as np
import pytest
from mujoco.batch import Batch

from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.envs.physics_clock import stop_physics_clock

PENDULUM = """
<mujoco>
  <worldbody>
    <body><joint name="hinge" axis="0 1 0"/><geom size=".1" pos="0 0 .5"/></body>
  </worldbody>
  <actuator><motor joint="hinge" ctrlrange="-1 1"/></actuator>
</mujoco>
"""


@pytest.fixture(autouse=True)
def _running_clock() -> Iterator[None]:
    mujoco.set_mjcb_time(None)
    yield
    mujoco.set_mjcb_time(None)


def seconds_timed() -> float:
    """What MuJoCo says that a step has taken."""
    model = mujoco.MjModel.from_xml_string(PENDULUM)
    data = mujoco.MjData(model)
    mujoco.mj_step(model, data)
    return float(data.timer[mujoco.mjtTimer.mjTIMER_STEP].duration)


def test_an_environment_stops_the_clock_and_mujoco_starts_it_again() -> None:
    assert seconds_timed() > 0.0
    MujocoBatchEnv("InvertedPendulum-v5", num_envs=1).close()
    assert seconds_timed() == 0.0
    MujocoBatchEnv("InvertedPendulum-v5", num_envs=1).close()
    assert seconds_timed() == 0.0
    mujoco.set_mjcb_time(None)
    assert seconds_timed() > 0.0


def test_a_clock_of_the_callers_own_goes_on() -> None:
    ticks = iter(range(1_000_000))
    clock = lambda: float(next(ticks))  # noqa: E731
    mujoco.set_mjcb_time(clock)
    stop_physics_clock()
    assert mujoco.get_mjcb_time() is clock
    assert seconds_timed() >= 1.0


@pytest.mark.parametrize("library", ["nowhere.so", _ctypes.__file__])
def test_where_the_variable_cannot_be_found_the_clock_goes_on(
    monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    monkeypatch.setattr(mujoco._callbacks, "__file__", library)
    stop_physics_clock()
    assert seconds_timed() > 0.0


def test_physics_is_the_same_bits_without_it() -> None:
    model = mujoco.MjModel.from_xml_string(PENDULUM)
    states = []
    for stopped in (False, True):
        if stopped:
            stop_physics_clock()
        batch = Batch(model, 3, 2)
        batch.reset()
        batch.ctrl[:] = [[-1.0], [0.5], [1.0]]
        batch.step(nstep=100)
        states.append(batch.state.copy())
    assert seconds_timed() == 0.0
    np.testing.assert_array_equal(*states)
