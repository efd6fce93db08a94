"""MuJoCo's stopwatch, which costs a small robot a tenth of its physics."""

from __future__ import annotations

import ctypes

import mujoco
from torchrl import logger as torchrl_logger

__all__ = ["stop_physics_clock"]


def stop_physics_clock() -> None:
    """Have MuJoCo not time the stages of its steps, in all of this process.

    MuJoCo reads a clock some twenty times in a substep to fill ``MjData.timer``, which a
    batch shows nobody. Its callback for the time may be null, and then it reads none; Python's
    ``mujoco.set_mjcb_time`` can set any function but not null, so this writes the variable of
    MuJoCo's C interface. ``mujoco.set_mjcb_time(None)`` starts the clock again. A clock of the
    caller's own stays, and where the variable cannot be found so does MuJoCo's.

    Example:
        >>> import mujoco
        >>> from torchrl_unilab.envs.physics_clock import stop_physics_clock
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
        torchrl_logger.debug("MuJoCo's clock goes on: %s", error)
        return
    callback.value = None
