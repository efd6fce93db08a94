from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
import pytest
import torch
from mujoco.batch import Batch
from mujoco.rendering.classic import gl_context
from torchrl.envs.utils import check_env_specs

from tests.support.bounds import DEADLINE
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.envs import rendering as module
from torchrl_unilab.envs.rendering import BatchRenderer, find_backend
from torchrl_unilab.errors import ConfigError, UsageError

SMALL = {"render_width": 64, "render_height": 48}
FLYER = """
<mujoco>
  <worldbody>
    <light pos="0 0 1000"/>
    <body pos="0 0 1"><freejoint/><geom size=".3 .2 .1" type="box" rgba="1 0 0 1"/></body>
  </worldbody>
</mujoco>
"""
FILMED = """
<mujoco>
  <worldbody>
    <light pos="0 0 9"/>
    <camera name="still" pos="0 -3 1" euler="70 0 0"/>
    <body pos="0 0 1">
      <camera name="chase" mode="track" pos="0 -2 1" euler="60 0 0"/>
      <freejoint/>
      <geom size=".3 .2 .1" type="box"/>
    </body>
  </worldbody>
</mujoco>
"""


@dataclass
class _Case:
    env: MujocoBatchEnv
    root: Any

    def step(self, value: float = 0.5) -> Any:
        action = torch.full(self.env.action_spec.shape, value)
        data, self.root = self.env.step_and_maybe_reset(self.root.set("action", action))
        return data


def make(task: str = "InvertedPendulum-v5", num_envs: int = 3, **options: Any) -> _Case:
    env = MujocoBatchEnv(task, num_envs, num_threads=1, **{"seed": 0, **SMALL, **options})
    return _Case(env, env.reset())


def test_a_picture_has_the_size_asked_for_and_something_to_see() -> None:
    pictures = make(render_width=80, render_height=60).env.render()
    assert (pictures.shape, pictures.dtype) == ((3, 60, 80, 3), np.uint8)
    assert all(len(np.unique(picture)) > 20 for picture in pictures)


def test_a_size_beyond_the_models_framebuffer_is_drawn() -> None:
    case = make("Hopper-v5", 1, render_width=700, render_height=500)
    picture = case.env.render()[0]
    assert picture.shape == (500, 700, 3)
    assert picture[:, 650:].std() > 1


@pytest.mark.parametrize(("task", "camera"), [("Hopper-v5", "track"), ("InvertedPendulum-v5", -1)])
def test_a_picture_is_that_of_mujoco_alone(monkeypatch, task, camera) -> None:
    case = make(task)
    case.step()
    qpos, qvel = case.env.get_state()
    pictures = case.env.render([0, 2])
    backend = module._context_class(find_backend(os.environ.get("MUJOCO_GL", "")))
    monkeypatch.setattr(gl_context, "GLContext", backend)
    model = case.env.task.load_model()
    model.vis.quality.shadowsize = 2 * 64
    data = mujoco.MjData(model)
    with mujoco.Renderer(model, 48, 64) as renderer:
        for i, picture in zip((0, 2), pictures, strict=True):
            data.qpos[:], data.qvel[:] = qpos[i], qvel[i]
            mujoco.mj_forward(model, data)
            renderer.update_scene(data, camera)
            np.testing.assert_array_equal(picture, renderer.render())


def test_pictures_come_in_the_order_of_the_ids() -> None:
    case = make()
    case.env.set_state([[0.0, 0.1], [0.5, 0.0], [-0.5, -0.1]], np.zeros((3, 2)))
    every = case.env.render()
    assert (every[0] != every[1]).any()
    np.testing.assert_array_equal(case.env.render([2, 0]), every[[2, 0]])
    assert case.env.render(np.empty(0, dtype=int)).shape == (0, 48, 64, 3)


def test_drawing_leaves_the_physics_alone() -> None:
    case, twin = make(), make()
    for _ in range(5):
        case.env.render()
        one, other = case.step()["next"], twin.step()["next"]
        assert torch.equal(one["observation"], other["observation"])
        assert torch.equal(one["reward"], other["reward"])


def test_a_robot_without_a_camera_stays_in_view_and_its_past_does_not_show() -> None:
    batch = Batch(mujoco.MjModel.from_xml_string(FLYER), 2, 1)
    renderer = BatchRenderer(batch, width=64, height=48)
    qpos = batch.bind("qpos")
    start = renderer.render([0])[0]
    red = (start[..., 0] > 60) & (start[..., 1] < 60)
    assert 0.02 < red.mean() < 0.6
    qpos[0, 0] = 300.0
    np.testing.assert_array_equal(renderer.render([0, 1, 0])[1], start)
    moved = renderer.render([0])[0]
    assert abs(((moved[..., 0] > 60) & (moved[..., 1] < 60)).mean() - red.mean()) < 0.02
    renderer.close()
    with pytest.raises(UsageError, match=r"BatchRenderer: closed \(expected"):
        renderer.render([0])


def test_each_simulation_is_drawn_with_its_own_model() -> None:
    batch = Batch(mujoco.MjModel.from_xml_string(FLYER), 2, 1)
    batch.expand("geom_rgba")[1, 0] = (0.0, 1.0, 0.0, 1.0)
    renderer = BatchRenderer(batch, width=64, height=48)
    red, green, _ = renderer.render([0, 1]).max(axis=(1, 2)).T.astype(int)
    assert red[0] > green[0] + 50
    assert green[1] > red[1] + 50
    renderer.close()


def test_cameras_by_name_and_number_and_of_the_callers_own() -> None:
    batch = Batch(mujoco.MjModel.from_xml_string(FILMED), 1, 1)
    near = mujoco.MjvCamera()
    near.distance = 2.0
    seen = []
    for camera in ("chase", 1, None, "still", -1, near):
        renderer = BatchRenderer(batch, width=64, height=48, camera=camera)
        seen.append(renderer.render([0]))
        renderer.close()
    np.testing.assert_array_equal(seen[0], seen[1])
    np.testing.assert_array_equal(seen[0], seen[2])
    assert len({picture.tobytes() for picture in seen[2:]}) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"render_width": 0}, r"width: 0 \(expected an integer"),
        ({"render_height": -3}, r"height: -3 \(expected an integer"),
        ({"render_camera": "front"}, r"camera 'front' \(expected one of \['track'\], a number"),
        ({"render_camera": 1}, r"camera 1 \(expected one of \['track'\], a number from -1 to 0"),
        ({"render_ids": [3]}, r"render_ids is \[3\] \(expected distinct integers from 0 to 2"),
    ],
)
def test_what_cannot_be_drawn_is_refused_at_once(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        MujocoBatchEnv("Hopper-v5", 3, from_pixels=True, **options)


def test_a_simulation_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"render: ids is \[3\] \(expected distinct integers"):
        make().env.render([3])


@pytest.mark.parametrize("pixels_only", [True, False])
def test_specs_hold_with_pixels(pixels_only) -> None:
    env = make(from_pixels=True, pixels_only=pixels_only, with_reward_terms=True).env
    check_env_specs(env)
    assert env.observation_spec["pixels"].shape == (3, 48, 64, 3)
    assert env.observation_spec["pixels"].dtype == torch.uint8
    assert ("observation" in set(env.observation_spec.keys())) is not pixels_only
    assert ("observation" in set(env.rollout(2).keys())) is not pixels_only


def test_pixels_show_the_final_state_in_next_and_the_new_one_at_the_root() -> None:
    case = make(from_pixels=True, pixels_only=False)
    env = case.env
    qpos = np.zeros((3, 2))
    qpos[1, 1] = 0.5
    case.root = env.set_state(qpos, np.zeros((3, 2)))
    np.testing.assert_array_equal(case.root["pixels"].numpy(), env.render())
    after = case.step(0.0)["next"]
    assert after["done"].flatten().tolist() == [False, True, False]
    np.testing.assert_array_equal(case.root["pixels"].numpy(), env.render())
    assert torch.equal(case.root["pixels"][::2], after["pixels"][::2])
    assert (case.root["pixels"][1] != after["pixels"][1]).any()
    env.set_state(*(np.asarray(part) for part in _split(after["observation"][1:2])), ids=[1])
    np.testing.assert_array_equal(env.render([1])[0], after["pixels"][1].numpy())


def _split(observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return observation[:, :2].double(), observation[:, 2:].double()


def test_later_pictures_leave_returned_ones_alone() -> None:
    case = make(from_pixels=True)
    first = case.root["pixels"]
    copy = first.clone()
    data = case.step()
    assert torch.equal(first, copy)
    assert (data["next", "pixels"] != copy).any()


def test_a_picture_is_drawn_once_for_each_change(monkeypatch) -> None:
    case = make(from_pixels=True, render_ids=[0, 2])
    drawn: list[list[int]] = []
    render = BatchRenderer.render

    def counted(self: BatchRenderer, ids: Any) -> Any:
        drawn.append(list(map(int, ids)))
        return render(self, ids)

    monkeypatch.setattr(BatchRenderer, "render", counted)
    case.root = case.env.set_state([[0.0, 0.5]], [[0.0, 0.0]], ids=[2])
    case.step(0.0)
    assert drawn == [[2], [0, 2], [2]]


def test_simulations_that_were_not_chosen_stay_black() -> None:
    case = make(from_pixels=True, render_ids=[2, 0])
    pixels = case.step()["next", "pixels"]
    assert not pixels[1].any()
    np.testing.assert_array_equal(pixels[::2].numpy(), case.env.render([0, 2]))


def test_two_environments_draw_in_turn() -> None:
    one, other = make(), make("InvertedPendulum-v5", render_width=32, render_height=40)
    pictures = one.env.render(), other.env.render()
    for _ in range(2):
        np.testing.assert_array_equal(one.env.render(), pictures[0])
        np.testing.assert_array_equal(other.env.render(), pictures[1])


def test_any_thread_may_draw() -> None:
    case = make()
    here = case.env.render()
    with ThreadPoolExecutor(1) as pool:
        np.testing.assert_array_equal(pool.submit(case.env.render).result(timeout=DEADLINE), here)
    np.testing.assert_array_equal(case.env.render(), here)


def test_closing_waits_for_the_picture_that_another_thread_draws() -> None:
    case = make(render_width=320, render_height=240)
    renderer = case.env._renderer
    case.env.render()
    drawing, let_go = threading.Event(), threading.Event()
    read = renderer._batch.get_data

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(case.env._state.physics.batch, name)

        def get_data(self, i: int, data: mujoco.MjData) -> None:
            drawing.set()
            assert let_go.wait(DEADLINE)
            read(i, data)

    renderer._batch = Slow()
    with ThreadPoolExecutor(2) as pool:
        picture = pool.submit(renderer.render, [0])
        assert drawing.wait(DEADLINE)
        closing = pool.submit(renderer.close)
        let_go.set()
        assert picture.result(timeout=DEADLINE).std() > 1
        closing.result(timeout=DEADLINE)
    assert renderer._drawing is None


def test_closing_frees_the_context_and_drawing_afterwards_is_refused() -> None:
    case = make()
    case.env.render()
    context, *_ = case.env._renderer._drawing
    assert context._context
    case.env.close()
    assert context._context is None
    with pytest.raises(RuntimeError, match=r"is closed \(expected an open one\)"):
        case.env.render()


WITHOUT_OPENGL = """
import sys
from torchrl_unilab.envs import MujocoBatchEnv

MujocoBatchEnv("InvertedPendulum-v5", 2, num_threads=1).rollout(2)
print([name for name in sys.modules if name.startswith("OpenGL")])
"""


@pytest.mark.slow  # a process that has drawn nothing yet
def test_steps_load_no_opengl() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_OPENGL], capture_output=True, text=True, timeout=DEADLINE
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_without_opengl_an_error_names_what_is_missing_and_steps_continue(tmp_path, monkeypatch):
    for library in ("libEGL.so.1", "libEGL.so", "libOSMesa.so", "libOSMesa.so.8"):
        (tmp_path / library).write_text("no library")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL", "PYOPENGL_PLATFORM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setattr(module, "find_backend", find_backend.__wrapped__)  # without its memory
    case = make()
    with pytest.raises(
        ConfigError,
        match=r"^rendering: no OpenGL backend can draw here; egl: .*; osmesa: .*"
        r"\(expected one of EGL, OSMesa or a display\).*libegl1 or libosmesa6",
    ):
        case.env.render()
    case.step()


def test_a_missing_library_is_named(monkeypatch) -> None:
    monkeypatch.setattr(module.ctypes.util, "find_library", lambda name: None)
    done: Any = subprocess.CompletedProcess([], 1, stdout="", stderr="obscure")
    assert module._reason("osmesa", done) == "libOSMesa is not installed (package libosmesa6)"
    assert module._reason("egl", done) == "libEGL is not installed (package libegl1)"


def test_a_backend_that_was_asked_for_is_the_only_choice() -> None:
    with pytest.raises(ConfigError, match=r"here; vulkan: .*invalid value.*unset MUJOCO_GL"):
        find_backend("vulkan")


def test_a_fork_of_a_process_that_has_drawn_refuses_to_draw(monkeypatch) -> None:
    case = make()
    monkeypatch.setattr(module, "_drew_pid", os.getppid())  # as a fork sees it
    with pytest.raises(ConfigError, match=r"has drawn, of which this one, \d+, is a fork"):
        case.env.render()


def test_pictures_that_opengl_has_no_memory_for_are_refused():
    env = MujocoBatchEnv("InvertedPendulum-v5", 1, render_width=40_000, render_height=32)
    with pytest.raises(ConfigError, match=r"40000 x 32 pixels, .*Use a smaller size"):
        env.render()
    env.close()
