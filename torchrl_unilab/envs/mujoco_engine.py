"""Two changes to MuJoCo's engine: contact forces after each step, and no stopwatch.

``mj_step`` computes ``cfrc_ext`` only for a model with a sensor that needs it, and
with the RK4 integrator in the first of its four evaluations, while the positions
and contacts that a step leaves are those of the last. Gymnasium calls
``mj_rnePostConstraint`` after its steps instead. A batch of simulations keeps no
contacts between its calls, so here the call is made at the end of each substep, by
an engine plugin that consists of this one call. `MujocoTask` adds it where it is read.

MuJoCo's stopwatch costs a small robot a tenth of its physics. `Simulations` stops it.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

import mujoco

logger = logging.getLogger("torchrl")  # TorchRL's own, without an import of it
_NAME = "torchrl_unilab.contact_forces"
CONTACT_FIELDS = frozenset({"cfrc_ext", "cfrc_int", "cacc"})
"""Fields that ``mj_rnePostConstraint`` computes."""


class _Plugin(ctypes.Structure):
    """``mjpPlugin``, the functions that MuJoCo calls for a plugin."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("nattribute", ctypes.c_int),
        ("attributes", ctypes.c_void_p),
        ("capabilityflags", ctypes.c_int),
        ("needstage", ctypes.c_int),
        ("nstate", ctypes.c_void_p),
        # nsensordata, init, destroy, copy, reset and compute
        ("before_advance", ctypes.c_void_p * 6),
        ("advance", ctypes.c_void_p),
        # visualize, actuator_* and sdf_*, and room for what later versions add
        ("unused", ctypes.c_void_p * 32),
    )


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
def _no_state(model: int | None, instance: int) -> int:
    """Return the size of an instance's state; called when a model is compiled."""
    return 0


@cache
def _register() -> _Plugin:
    """Register the plugin with MuJoCo, once in a process, and keep it alive."""
    library = ctypes.CDLL(str(next(Path(mujoco.__file__).parent.glob("libmujoco*"))))
    plugin = _Plugin(
        name=_NAME.encode(),
        nstate=ctypes.cast(_no_state, ctypes.c_void_p),
        # advance(model, data, instance) is called when a substep has been integrated;
        # mj_rnePostConstraint(model, data) leaves the third argument in its register
        advance=ctypes.cast(library.mj_rnePostConstraint, ctypes.c_void_p),
    )
    library.mjp_registerPlugin(ctypes.byref(plugin))
    return plugin


def add_contact_forces(spec: mujoco.MjSpec) -> None:
    """Make the steps of a model compute ``cfrc_ext``, and nothing else differently.

    After ``mj_step`` the fields ``cfrc_ext``, ``cfrc_int`` and ``cacc`` are those that
    ``mj_rnePostConstraint`` would then give. ``mj_forward`` does not compute them.

    Args:
        spec: The model, before it is compiled; it is changed. A process that compiles or loads
            it must have called this function.

    Examples:
        >>> import mujoco
        >>> from torchrl_unilab.envs.mujoco_engine import add_contact_forces
        >>> spec = mujoco.MjSpec.from_string(
        ...     "<mujoco><worldbody><geom type='plane' size='1 1 1'/><body pos='0 0 .09'>"
        ...     "<freejoint/><geom size='.1' mass='1'/></body></worldbody></mujoco>"
        ... )
        >>> add_contact_forces(spec)
        >>> model = spec.compile()
        >>> data = mujoco.MjData(model)
        >>> mujoco.mj_step(model, data)
        >>> bool(data.cfrc_ext[1, 5] > 0.0)
        True
    """
    _register()
    spec.activate_plugin(_NAME)
    spec.add_plugin(name=_NAME, plugin_name=_NAME)


def stop_physics_clock() -> None:
    """Have MuJoCo not time the stages of its steps, in all of this process.

    MuJoCo reads a clock some twenty times in a substep to fill ``MjData.timer``, which a
    batch does not expose. Its callback for the time may be null, and then it reads none; Python's
    ``mujoco.set_mjcb_time`` can set any function but not null, so this writes the variable of
    MuJoCo's C interface. ``mujoco.set_mjcb_time(None)`` starts the clock again. A clock of the
    caller's own stays, and where the variable cannot be found so does MuJoCo's.

    Examples:
        >>> import mujoco
        >>> from torchrl_unilab.envs.mujoco_engine import stop_physics_clock
        >>> stop_physics_clock()
        >>> model = mujoco.MjModel.from_xml_string("<mujoco/>")
        >>> data = mujoco.MjData(model)
        >>> mujoco.mj_step(model, data)
        >>> data.timer[mujoco.mjtTimer.mjTIMER_STEP].duration
        0.0
        >>> mujoco.set_mjcb_time(None)
    """
    if mujoco.get_mjcb_time() is not None:
        return
    try:
        # the module of the callbacks is linked to MuJoCo's library, wherever that lies
        library = ctypes.CDLL(mujoco._callbacks.__file__)
        callback = ctypes.c_void_p.in_dll(library, "mjcb_time")
    except (OSError, ValueError) as error:
        logger.debug("MuJoCo's clock keeps running: %s", error)
        return
    callback.value = None
