"""Pictures of the simulations of a batch, drawn by `mujoco.Renderer`."""

from __future__ import annotations

import copy
import ctypes.util
import functools
import importlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import Any, TypeAlias

import mujoco
import numpy as np
from mujoco.batch import Batch
from mujoco.rendering.classic import gl_context
from numpy.typing import NDArray

from torchrl_unilab.checks import as_integer
from torchrl_unilab.errors import ConfigError, UsageError

Camera: TypeAlias = str | int | mujoco.MjvCamera | None
Pictures: TypeAlias = NDArray[np.uint8]

# What MuJoCo's OpenGL backends load, and the package of Debian and Ubuntu that has it.
_LIBRARIES = {
    "glfw": ("GL", "libgl1"),
    "egl": ("EGL", "libegl1"),
    "osmesa": ("OSMesa", "libosmesa6"),
}
_PROBE = "import mujoco; mujoco.Renderer(mujoco.MjModel.from_xml_string('<mujoco/>'), 8, 8).close()"
_PROBE_SECONDS = 60
# mujoco.Renderer takes its context class from a module; `_start` replaces it there meanwhile
_choosing_context = threading.Lock()


class BatchRenderer:
    """Draws simulations of a batch, each with its own model, one after the other.

    Nothing of OpenGL is loaded before the first picture. The OpenGL context is
    current in a thread only while it draws, so any thread may ask for pictures or close
    (they take turns), and a context of the caller's stays what it was. A picture depends
    on the state of its simulation alone.

    Args:
        batch: The simulations.
        width: Width of a picture in pixels.
        height: Height of a picture in pixels.
        camera: A camera of the model by name or number; -1 for a view of the whole
            model; an ``mujoco.MjvCamera``; or None for the model's first camera that
            follows a body, and where it has none, a view that follows the robot if
            its root can leave its place, else that of the whole model.

    Raises:
        ConfigError: A size is not positive or the model has no such camera.

    Examples:
        >>> import mujoco
        >>> from mujoco.batch import Batch
        >>> from torchrl_unilab.envs.rendering import BatchRenderer
        >>> xml = "<mujoco><worldbody><geom size='1'/><light pos='0 0 9'/></worldbody></mujoco>"
        >>> batch = Batch(mujoco.MjModel.from_xml_string(xml), 3)
        >>> renderer = BatchRenderer(batch, width=64, height=48)
        >>> renderer.render([0, 2]).shape
        (2, 48, 64, 3)
        >>> renderer.close()
    """

    def __init__(
        self, batch: Batch, *, width: int = 320, height: int = 240, camera: Camera = None
    ) -> None:
        for name, value in (("width", width), ("height", height)):
            as_integer(f"rendering {name}", value, "Give pixels.")
        _check_camera(batch.model, camera)
        self.width, self.height = width, height
        self._batch: Batch | None = batch
        self._camera: Camera = _tracking_camera(batch.model) if camera is None else camera
        self._robot_view = _robot_view(batch.model) if self._camera is None else None
        self._drawing: tuple[Any, mujoco.Renderer, mujoco.MjData] | None = None
        self._turn = threading.Lock()

    def render(self, ids: Sequence[int] | NDArray[np.intp]) -> Pictures:
        """Draw simulations.

        Args:
            ids: The simulations.

        Returns:
            ``(len(ids), height, width, 3)`` uint8, red, green and blue, top row first.

        Raises:
            ConfigError: OpenGL cannot draw here; names what is missing.
            UsageError: The renderer is closed.
        """
        pictures = np.empty((len(ids), self.height, self.width, 3), dtype=np.uint8)
        if not len(ids):
            return pictures
        with self._turn:
            self._draw(pictures, ids)
        return pictures

    def _draw(self, pictures: Pictures, ids: Sequence[int] | NDArray[np.intp]) -> None:
        if self._batch is None:
            raise UsageError("BatchRenderer: closed (expected an open one). Make a new one.")
        _refuse_forks()
        if self._drawing is None:
            self._drawing = self._start(self._batch.model)
        context, renderer, data = self._drawing
        with context.as_current():
            for picture, i in zip(pictures, ids, strict=True):
                self._batch.get_model(int(i), renderer.model)
                self._batch.get_data(int(i), data)
                mujoco.mj_forward(renderer.model, data)
                camera = self._camera
                if self._robot_view is not None:
                    # MuJoCo's own tracking would depend on earlier pictures
                    camera = self._robot_view
                    camera.lookat = data.subtree_com[1]
                renderer.update_scene(data, -1 if camera is None else camera)
                renderer.render(out=picture)

    def close(self) -> None:
        """Free the OpenGL context, and release the batch. Closing again does nothing."""
        with self._turn:
            self._batch = None
            if self._drawing is not None:
                self._drawing[1].close()
                self._drawing = None

    def _start(self, model: mujoco.MjModel) -> tuple[Any, mujoco.Renderer, mujoco.MjData]:
        model = copy.copy(model)
        model.vis.global_.offwidth = self.width
        model.vis.global_.offheight = self.height
        # no finer than visible: without a graphics card, shadows take most of the time
        quality = model.vis.quality
        quality.shadowsize = min(quality.shadowsize, 2 * max(self.width, self.height))
        backend = find_backend(os.environ.get("MUJOCO_GL", "").lower().strip())
        context = _context_class(backend)(self.width, self.height)
        with _choosing_context, context.as_current():
            chosen = gl_context.GLContext
            # MuJoCo chose when it was imported: a window, unless MUJOCO_GL said otherwise
            gl_context.GLContext = lambda width, height: context
            try:
                renderer = mujoco.Renderer(model, self.height, self.width)
            except mujoco.FatalError as error:
                raise ConfigError(
                    f"rendering: {self.width} x {self.height} pixels, {error} (expected a size "
                    "that OpenGL has memory for). Use a smaller size."
                ) from error
            finally:
                gl_context.GLContext = chosen
        return context, renderer, mujoco.MjData(model)


def _refuse_forks() -> None:
    """Refuse to draw in a fork of a process that has drawn: OpenGL would wait there for ever."""
    global _drew_pid
    _drew_pid = _drew_pid or os.getpid()
    if _drew_pid != os.getpid():
        raise ConfigError(
            f"render: process {_drew_pid} has drawn, of which this one, {os.getpid()}, is a fork "
            "(expected a process that was spawned). Start workers by spawn, or draw in them alone."
        )


_drew_pid: int | None = None
"""Id of the first process to draw, among this one and those that it was forked from."""


class Pixels:
    """The present pictures of some simulations of a batch, drawn once for each change.

    Args:
        renderer: Draws them.
        nsim: Number of simulations.
        ids: The simulations to draw; the pictures of the others stay black.

    Attributes:
        shape: ``(nsim, height, width, 3)``.
    """

    def __init__(self, renderer: BatchRenderer, nsim: int, ids: NDArray[np.intp]) -> None:
        self.shape = (nsim, renderer.height, renderer.width, 3)
        self._renderer = renderer
        self._pictures: Pictures = np.zeros(self.shape, dtype=np.uint8)
        self._drawn = np.isin(np.arange(nsim), ids)
        self._outdated = np.ones(nsim, dtype=bool)

    def outdate(self, rows: NDArray[np.intp] | slice) -> None:
        """Mark the pictures of these simulations as outdated."""
        self._outdated[rows] = True

    def current(self) -> Pictures:
        """Return the pictures, in memory that the next call writes to."""
        ids = np.flatnonzero(self._drawn & self._outdated)
        self._pictures[ids] = self._renderer.render(ids)
        self._outdated[:] = False
        return self._pictures


@functools.cache
def find_backend(asked: str) -> str:
    """Find a backend of MuJoCo's for OpenGL that can draw on this machine.

    Each is tried in a separate process, for a backend that fails can leave
    PyOpenGL unusable. The answer is kept.

    Args:
        asked: The value of ``MUJOCO_GL``, which is then the only choice; if it is empty,
            the choices are a window where there is a display, then EGL, then OSMesa.

    Returns:
        A value of ``MUJOCO_GL``.

    Raises:
        ConfigError: None can draw; names what is missing.
    """
    windows = bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    windowed = ["glfw"] if windows else []
    backends = [asked] if asked else [*windowed, "egl", "osmesa"]
    failures = []
    for backend in backends:
        try:
            done = subprocess.run(
                [sys.executable, "-c", _PROBE],
                env={**os.environ, "MUJOCO_GL": backend},
                cwd=tempfile.gettempdir(),  # a failure may leave MuJoCo's log
                capture_output=True,
                text=True,
                timeout=_PROBE_SECONDS,
            )
        except subprocess.TimeoutExpired:
            failures.append(f"{backend}: no picture in {_PROBE_SECONDS} s")
            continue
        if done.returncode == 0:
            return backend
        failures.append(f"{backend}: {_reason(backend, done)}")
    packages = " or ".join(_LIBRARIES[name][1] for name in ("egl", "osmesa"))
    raise ConfigError(
        f"rendering: no OpenGL backend can draw here; {'; '.join(failures)} (expected one of "
        f"EGL, OSMesa or a display). Install one, on Debian or Ubuntu by `apt-get install` "
        f"{packages}" + (", or unset MUJOCO_GL." if asked else ".")
    )


def _reason(backend: str, failed: subprocess.CompletedProcess[str]) -> str:
    if backend in _LIBRARIES:
        library, package = _LIBRARIES[backend]
        if ctypes.util.find_library(library) is None:
            return f"lib{library} is not installed (package {package})"
    lines = failed.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {failed.returncode}"


def _context_class(backend: str) -> Any:
    """Return MuJoCo's class of OpenGL contexts for a value of ``MUJOCO_GL``."""
    name = backend if backend in ("egl", "osmesa") else "glfw"
    return importlib.import_module(f"mujoco.{name}").GLContext


def _check_camera(model: mujoco.MjModel, camera: Camera) -> None:
    if camera is None or isinstance(camera, mujoco.MjvCamera):
        return
    names = [model.camera(i).name for i in range(model.ncam)]
    known = camera in names if isinstance(camera, str) else -1 <= camera < model.ncam
    if not known:
        named = f"one of {names}, a number from -1 to {model.ncam - 1}" if names else "-1"
        raise ConfigError(
            f"rendering: camera {camera!r} (expected {named}, an MjvCamera or None, a free one). "
            f"Choose one{'' if names else ': the model has no cameras'}."
        )


def _tracking_camera(model: mujoco.MjModel) -> int | None:
    """Return the model's first camera that follows a body; None if it has none."""
    modes = (mujoco.mjtCamLight.mjCAMLIGHT_TRACK, mujoco.mjtCamLight.mjCAMLIGHT_TRACKCOM)
    (following,) = np.nonzero(np.isin(model.cam_mode, [mode.value for mode in modes]))
    return int(following[0]) if len(following) else None


def _robot_view(model: mujoco.MjModel) -> mujoco.MjvCamera | None:
    """Return a camera with the whole robot in view; None if the robot cannot leave its place."""
    if not _can_leave(model):
        return None
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    own = model.body_rootid[model.geom_bodyid] == 1
    reach = np.linalg.norm(data.geom_xpos - data.subtree_com[1], axis=1) + model.geom_rbound
    camera = mujoco.MjvCamera()
    mujoco.mjv_defaultFreeCamera(model, camera)
    farthest = reach[own].max(initial=0.0)
    if farthest > 0.0:  # else keep MuJoCo's distance
        camera.distance = 3.0 * farthest
    camera.elevation = -20.0
    return camera


def _can_leave(model: mujoco.MjModel) -> bool:
    """Return whether the first body hangs on a free joint or slides without a limit."""
    if model.nbody < 2 or not model.body_jntnum[1]:
        return False
    joint = int(model.body_jntadr[1])
    kind = int(model.jnt_type[joint])
    slide = kind == mujoco.mjtJoint.mjJNT_SLIDE.value and not model.jnt_limited[joint]
    return kind == mujoco.mjtJoint.mjJNT_FREE.value or slide
