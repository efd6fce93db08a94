"""The forms in which a task is given its model."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import imageio
import mujoco
import numpy as np
import pytest
import torch
from torchrl.envs.utils import check_env_specs

from tests.support.carts import CART, Cart, make
from torchrl_unilab.errors import ConfigError

URDF = """
<robot name="cart">
  <mujoco><compiler discardvisual="false"/></mujoco>
  <link name="base"><inertial><mass value="5"/><inertia ixx="1" iyy="1" izz="1" ixy="0" ixz="0"
    iyz="0"/></inertial></link>
  <link name="cart"><inertial><mass value="1"/><inertia ixx=".1" iyy=".1" izz=".1" ixy="0" ixz="0"
    iyz="0"/></inertial></link>
  <joint name="x" type="prismatic"><parent link="base"/><child link="cart"/><axis xyz="1 0 0"/>
    <limit lower="-1" upper="1" effort="2" velocity="3"/></joint>
</robot>
"""


def test_a_spec_that_does_not_compile_is_refused() -> None:
    spec = mujoco.MjSpec()
    spec.worldbody.add_body(name="massless").add_freejoint()
    handler = mujoco.get_mju_user_warning()
    with pytest.raises(ConfigError, match=r"^model of Cart: .*mass.* Correct the MjSpec"):
        Cart(model=spec)
    assert mujoco.get_mju_user_warning() is handler


def test_every_form_of_a_model_gives_the_same_steps(tmp_path: Path) -> None:
    path = tmp_path / "cart.xml"
    path.write_text(CART)
    spec = mujoco.MjSpec.from_string(CART)
    seen = []
    for model in (CART, path, str(path), spec):
        env = make(pickle.loads(pickle.dumps(Cart(model=model))))
        root = env.reset().set("action", torch.full((3, 1), 0.5))
        seen.append(env.step(root)["next", "observation"])
    assert all(torch.equal(one, seen[0]) for one in seen[1:])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (CART.replace("<geom size", "<geon size"), "Element 'geon', line 7 .*Correct its text"),
        (CART.replace('joint="x"', 'joint="y"'), "unknown .*'y'.*Correct its text"),
    ],
    ids=["an unknown element", "an unknown joint"],
)
def test_a_model_that_mujoco_does_not_compile_is_refused_by_the_tasks_name(
    model: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"^model of Cart: .*{message}"):
        make(Cart(model=model))
    file = tmp_path / "cart.xml"
    file.write_text(model)
    with pytest.raises(ConfigError, match=r"Correct .*cart\.xml"):
        make(Cart(model=file))


def test_an_edited_spec_is_kept_as_it_was_given() -> None:
    spec = mujoco.MjSpec.from_string(CART)
    spec.body("cart").geoms[0].mass = 7.0
    task = Cart(model=spec)
    spec.body("cart").geoms[0].mass = 9.0
    assert pickle.loads(pickle.dumps(task)).load_model().body("cart").mass[0] == 7.0


MESHED = CART.replace('geom size=".1"', 'geom type="mesh" mesh="wedge"').replace(
    "<worldbody>",
    """<compiler meshdir="meshes" texturedir="skins"/>
    <asset><mesh name="wedge" file="wedge.obj"/><texture name="t" type="2d" file="t.png"/></asset>
    <worldbody>""",
)


WEDGE = b"v 0 0 0\nv 1 0 0\nv 0 1 0\nv 0 0 1\nf 1 3 2\nf 1 2 4\nf 2 3 4\nf 1 4 3\n"


@pytest.mark.parametrize("form", ["beside the file", "in memory", "as assets of the task"])
def test_a_spec_brings_the_files_it_names(form, tmp_path, monkeypatch):
    picture = io.BytesIO()
    imageio.imwrite(picture, np.full((2, 2, 3), 200, dtype=np.uint8), format="png")
    files = {"meshes/wedge.obj": WEDGE, "skins/t.png": picture.getvalue()}
    if form == "beside the file":
        for name, content in files.items():
            (tmp_path / "robot" / name).parent.mkdir(parents=True)
            (tmp_path / "robot" / name).write_bytes(content)
        (tmp_path / "robot" / "cart.xml").write_text(MESHED)
        monkeypatch.chdir(tmp_path)
        spec = mujoco.MjSpec.from_file("robot/cart.xml")
    else:
        spec = mujoco.MjSpec.from_string(MESHED, assets=files)
    task = Cart(model=spec, assets=files if form == "as assets of the task" else {})
    monkeypatch.chdir("/")
    model = pickle.loads(pickle.dumps(task)).load_model()
    assert model.nmeshvert == 4
    assert model.tex_data[0] == 200


@pytest.mark.parametrize("form", ["text", "file", "spec"])
def test_a_urdf_makes_a_task_once_it_has_actuators(form: str, tmp_path: Path) -> None:
    path = tmp_path / "cart.urdf"
    path.write_text(URDF)
    spec = mujoco.MjSpec.from_file(str(path))
    push = spec.add_actuator(name="push", target="x", trntype=mujoco.mjtTrn.mjTRN_JOINT)
    push.ctrlrange, push.ctrllimited = [-1.0, 1.0], True
    bare = {"text": URDF, "file": path, "spec": mujoco.MjSpec.from_string(URDF)}[form]
    model = Cart(model=bare).load_model()
    assert [model.joint(i).name for i in range(model.njnt)] == ["x"]
    assert model.nu == 0
    task = pickle.loads(pickle.dumps(Cart(model=spec)))
    assert task.joints.names == ("x",)
    env = make(task)
    check_env_specs(env)
    env.step(env.reset().set("action", torch.ones(3, 1)))
    assert (env.get_state()[1] > 0).all()
