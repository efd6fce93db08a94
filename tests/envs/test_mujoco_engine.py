from __future__ import annotations

import _ctypes
from collections.abc import Iterator

import mujoco
import numpy as np
import pytest
from mujoco.batch import Batch

from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.envs.mujoco_engine import add_contact_forces, stop_physics_clock

# two boxes, which touch each other, the floor and a limit
XML = """
<mujoco>
  <option integrator="{integrator}" timestep="0.01"/>
  <worldbody>
    <geom type="plane" size="5 5 1"/>
    <body name="lower" pos="0 0 .12">
      <freejoint/>
      <geom type="box" size=".2 .2 .1" mass="2"/>
      <body pos="0 0 .1">
        <joint name="lid" axis="0 1 0" range="-10 10"/>
        <geom type="capsule" fromto="0 0 0 .3 0 .1" size=".03" mass="1"/>
      </body>
    </body>
    <body name="upper" pos=".02 0 .55">
      <freejoint/>
      <geom type="box" size=".1 .1 .1" mass="1"/>
    </body>
  </worldbody>
  <actuator><motor joint="lid" ctrlrange="-3 3"/></actuator>
</mujoco>
"""


def load(integrator: str, forces: bool) -> mujoco.MjModel:
    spec = mujoco.MjSpec.from_string(XML.format(integrator=integrator))
    if forces:
        add_contact_forces(spec)
    return spec.compile()


@pytest.mark.parametrize("integrator", ["Euler", "RK4", "implicit", "implicitfast"])
@pytest.mark.parametrize("threads", [1, 3])
def test_forces_are_those_of_rne_post_constraint_and_the_rest_stays(integrator, threads):
    plain = load(integrator, forces=False)
    batch = Batch(load(integrator, forces=True), 5, threads)
    batch.reset()
    forces, ctrl, qpos = batch.bind("cfrc_ext"), batch.bind("ctrl"), batch.bind("qpos")
    alone = [mujoco.MjData(plain) for _ in range(5)]
    rng = np.random.default_rng(0)
    touched = 0
    for _ in range(100):
        ctrl[:] = rng.uniform(-3, 3, ctrl.shape)
        batch.step(nstep=2)
        for i, data in enumerate(alone):
            data.ctrl[:] = ctrl[i]
            mujoco.mj_step(plain, data, nstep=2)
            mujoco.mj_rnePostConstraint(plain, data)
            np.testing.assert_array_equal(forces[i], data.cfrc_ext)
            np.testing.assert_array_equal(qpos[i], data.qpos)
            touched += bool(data.cfrc_ext[-1].any())
    assert touched > 100


def test_models_without_it_are_left_alone() -> None:
    assert load("Euler", forces=True).nplugin == 1
    model = load("Euler", forces=False)
    assert model.nplugin == 0
    data = mujoco.MjData(model)
    mujoco.mj_step(model, data, nstep=50)
    assert data.ncon > 0
    assert not data.cfrc_ext.any()


# The stopwatch

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


def test_a_clock_set_by_the_caller_stays() -> None:
    ticks = iter(range(1_000_000))
    clock = lambda: float(next(ticks))  # noqa: E731
    mujoco.set_mjcb_time(clock)
    stop_physics_clock()
    assert mujoco.get_mjcb_time() is clock
    assert seconds_timed() >= 1.0


@pytest.mark.parametrize("library", ["nowhere.so", _ctypes.__file__])
def test_where_the_variable_cannot_be_found_the_clock_stays_on(monkeypatch, library):
    monkeypatch.setattr(mujoco._callbacks, "__file__", library)
    stop_physics_clock()
    assert seconds_timed() > 0.0
