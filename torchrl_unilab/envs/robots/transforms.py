"""Transforms for robots that TorchRL lacks: sensor noise, and delays of sensors and actuators.

TorchRL's own transforms work with `MujocoBatchEnv` as well:
``ActionScaling`` lets the policy act in ``[-1, 1]``. For control at a lower rate give the
task a larger ``frame_skip``; ``FrameSkipTransform`` is for environments whose episodes all
end at once, since it continues a simulation that has ended, and it must come first, since
it would apply the transforms before it to the action again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs.transforms import ObservationTransform, Transform

from torchrl_unilab.errors import ConfigError, UsageError

Delay = int | tuple[int, int]
Keys: TypeAlias = NestedKey | Sequence[NestedKey]
Numbers = float | Sequence[float] | torch.Tensor


def _listed(keys: Keys) -> list[NestedKey]:
    """Return one key, or several, as a list; a tuple is of several."""
    return [keys] if isinstance(keys, str) else list(keys)


class ObservationNoise(ObservationTransform):
    """Adds normal noise to observations, new at each step and reset.

    The noise comes from torch's default generator, which collectors seed in each worker and
    ``torch.manual_seed`` anywhere. Add noise only to ``observation``, and let the critic read a
    group without noise.

    Args:
        std: Standard deviation; one number, or one for each of the ``k`` numbers of an
            observation, ``(k,)``. Not negative.
        in_keys: The observations, of a floating-point type.

    Raises:
        ConfigError: `std` is negative or not finite. Once the environment is known: `std` has
            another size than an observation.

    Examples:
        >>> from torchrl.envs import TransformedEnv
        >>> from torchrl_unilab.envs import MujocoBatchEnv
        >>> from torchrl_unilab.envs.robots.transforms import ObservationNoise
        >>> env = TransformedEnv(MujocoBatchEnv("Hopper-v5", 2, seed=0), ObservationNoise(0.1))
        >>> env.reset()["observation"].shape
        torch.Size([2, 11])
        >>> env.close()
    """

    def __init__(self, std: Numbers, in_keys: Keys = ("observation",)) -> None:
        try:
            deviation = torch.as_tensor(std, dtype=torch.float64)
        except (RuntimeError, TypeError, ValueError):  # no numbers
            deviation = torch.tensor(torch.nan)
        if not deviation.isfinite().all() or (deviation < 0).any():
            raise ConfigError(
                f"ObservationNoise: std is {std} (expected finite numbers of at least 0). "
                "Use 0 where an observation has no noise."
            )
        keys = _listed(in_keys)
        super().__init__(in_keys=keys, out_keys=keys)
        self.register_buffer("std", deviation)

    def _apply_transform(self, obs: torch.Tensor) -> torch.Tensor:
        return torch.randn_like(obs).mul_(self.std.to(obs.dtype)).add_(obs)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        noisy: TensorDictBase = self._call(next_tensordict)
        if (mask := tensordict.get("_step", None)) is not None:  # the others keep what they had
            before = tensordict.select(*self.in_keys, strict=False)
            stepped = mask.reshape(noisy.batch_size)
            noisy.update(noisy.select(*before.keys(True, True)).where(stepped, before))
        return noisy

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        # rows that continue keep what they had: the environment takes those that start
        return self._call(tensordict_reset)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Remove the bounds, which noise may exceed."""
        for key in self.in_keys:
            spec = observation_spec[key]
            if self.std.ndim and self.std.shape != spec.shape[-1:]:
                raise ConfigError(
                    f"ObservationNoise: {self.std.numel()} numbers in std (expected one, or "
                    f"{spec.shape[-1]}, the size of {key!r}). Give one for each."
                )
            if isinstance(spec, Bounded):
                observation_spec[key] = Unbounded(spec.shape, dtype=spec.dtype, device=spec.device)
        return observation_spec


class _Delay(Transform):
    """Base of the delays of observations and actions: keeps the values of the last steps."""

    def __init__(self, delay: Delay, **keys: list[NestedKey]) -> None:
        super().__init__(**keys)
        bounds = np.ravel(delay)
        whole = bounds.dtype.kind in "iu" and bounds.size in (1, 2)
        if not whole or not 0 <= bounds[0] <= bounds[-1]:
            raise ConfigError(
                f"{type(self).__name__}: delay is {delay} (expected a number of steps of at "
                "least 0, or the smallest and the largest). Use for example 1, or (0, 2)."
            )
        self._range = int(bounds[0]), int(bounds[-1])
        self._delays: torch.Tensor | None = None
        self._history: dict[NestedKey, torch.Tensor] = {}

    @property
    def delays(self) -> torch.Tensor:
        """Each simulation's present delay in steps, ``(n,)``, n the batch's size."""
        if self._delays is None:
            self._delays = self._draw_delays()
        return self._delays

    def clone(self) -> Self:
        """Return a transform with the same settings, without an environment or history."""
        copied: Self = super().clone()
        copied._delays, copied._history = None, {}
        return copied

    def get_extra_state(self) -> dict[str, Any]:
        """Return the delays and what went in, which ``state_dict`` carries."""
        return {"delays": self._delays, "history": dict(self._history)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Continue from what `get_extra_state` returned.

        Raises:
            ConfigError: The state is of another range of delays, or number of simulations.
        """
        expected = [self._range[1] + 1]
        if self.parent is not None:
            expected.append(self._batch_size().numel())
        for known in state["history"].values():
            if (found := [*known.shape[: len(expected)]]) != expected:
                raise ConfigError(
                    f"state of {type(self).__name__}: {found} steps and simulations (expected "
                    f"{expected}). Load that of a transform like this one."
                )
        self._delays = state["delays"]
        self._history = dict(state["history"])

    def _draw_delays(self) -> torch.Tensor:
        low, high = self._range
        n = self._batch_size().numel()
        if low == high:
            return torch.full((n,), low)  # nothing is drawn
        return torch.randint(low, high + 1, (n,))

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        """Draw the delays of rows that start an episode, and forget their past."""
        rows, drawn = self._mask(tensordict, "_reset"), self._draw_delays()
        if rows is not None:
            drawn = torch.where(rows.to(drawn.device), drawn, self.delays)
        self._delays = drawn
        last = {key: known[0] for key, known in self._history.items()}  # for actions
        first = {key: self._flat(tensordict_reset[key]) for key in self.in_keys}
        for key, value in (last | first).items():
            self._fill(key, rows, value)
        return tensordict_reset

    def _fill(self, key: NestedKey, rows: torch.Tensor | None, value: torch.Tensor) -> None:
        """Fill the history of `rows`, all if None, with `_initial_output` of a value."""
        filled = self._initial_output(value).expand(self._range[1] + 1, *value.shape)
        self._history[key] = _in_rows(rows, filled, self._history.get(key)).clone()

    def _initial_output(self, value: torch.Tensor) -> torch.Tensor:
        """Return what comes out until an episode's first value does; by default that value."""
        return value

    def _delay_values(
        self, keys: Sequence[NestedKey], tensordict: TensorDictBase, rows: torch.Tensor | None
    ) -> TensorDictBase:
        """Put values of `rows`, all if None, into the history; replace them by delayed ones."""
        for key in keys:
            value = tensordict[key]
            flat = self._flat(value)
            if key not in self._history:
                self._fill(key, None, flat)
            known = self._history[key]
            moved = _in_rows(rows, torch.cat((flat.unsqueeze(0), known[:-1])), known)
            self._history[key] = moved
            delays = self.delays.to(moved.device)
            late = moved[delays, torch.arange(len(delays), device=moved.device)]
            tensordict.set(key, late.reshape(value.shape))
        return tensordict

    def _batch_size(self) -> torch.Size:
        if self.parent is None:
            raise UsageError(
                f"{type(self).__name__}: it has no environment (expected a TransformedEnv). "
                "Append it to one; it does not work on replay buffers."
            )
        size: torch.Size = self.parent.batch_size
        return size

    def _flat(self, value: torch.Tensor) -> torch.Tensor:
        """Return a value with the batch dimensions of the environment flattened to one."""
        size = self._batch_size()
        return value.reshape(size.numel(), *value.shape[len(size) :])

    def _mask(self, tensordict: TensorDictBase, key: str) -> torch.Tensor | None:
        """Return the rows that ``_reset`` or ``_step`` select, ``(n,)``; None for all."""
        mask: torch.Tensor | None = tensordict.get(key, None)
        if mask is None or mask.all():
            return None
        return mask.reshape(self._batch_size().numel(), -1).any(-1)


def _in_rows(
    rows: torch.Tensor | None, new: torch.Tensor, old: torch.Tensor | None
) -> torch.Tensor:
    """Return a new history, ``(depth, n, ...)``, in rows ``(n,)``, all if None; else the old."""
    if rows is None or old is None:
        return new
    return torch.where(rows.reshape(1, -1, *(1,) * (new.ndim - 2)), new, old)


class ObservationDelay(_Delay):
    """Delays observations by some steps; until then, it shows the episode's first.

    Args:
        delay: Steps; a range ``(least, greatest)`` draws each simulation's delay anew
            for each episode, uniformly, from torch's default generator.
        in_keys: The observations.

    Raises:
        ConfigError: `delay` is negative or a range out of order.

    Examples:
        >>> from torchrl.envs import TransformedEnv
        >>> from torchrl_unilab.envs import MujocoBatchEnv
        >>> from torchrl_unilab.envs.robots.transforms import ObservationDelay
        >>> env = TransformedEnv(MujocoBatchEnv("Hopper-v5", 2, seed=0), ObservationDelay(2))
        >>> seen = env.rollout(3)["next", "observation"]
        >>> bool((seen[:, 0] == seen[:, 1]).all()), bool((seen[:, 1] == seen[:, 2]).all())
        (True, False)
        >>> env.close()
    """

    def __init__(self, delay: Delay, in_keys: Keys = ("observation",)) -> None:
        keys = _listed(in_keys)
        super().__init__(delay, in_keys=keys, out_keys=keys)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self._delay_values(self.in_keys, next_tensordict, self._mask(tensordict, "_step"))


class ActionDelay(_Delay):
    """Delays actions by some steps; until then, a given action is in effect.

    The data keeps the policy's action; the environment, and therefore any cost of actions in the
    reward, gets the delayed one.

    Args:
        delay: Steps; a range ``(least, greatest)`` draws each simulation's delay anew
            for each episode, uniformly, from torch's default generator.
        before: The action in effect before an episode's first, one number or ``(k,)``.
        in_keys_inv: The actions.

    Raises:
        ConfigError: `delay` is negative or a range out of order.

    Examples:
        >>> from torchrl.envs import TransformedEnv
        >>> from torchrl_unilab.envs import MujocoBatchEnv
        >>> from torchrl_unilab.envs.robots.transforms import ActionDelay
        >>> env = TransformedEnv(MujocoBatchEnv("Hopper-v5", 2, seed=0), ActionDelay((0, 2)))
        >>> env.rollout(3)["action"].shape
        torch.Size([2, 3, 3])
        >>> env.close()
    """

    def __init__(
        self, delay: Delay, before: Numbers = 0.0, in_keys_inv: Keys = ("action",)
    ) -> None:
        keys = _listed(in_keys_inv)
        super().__init__(delay, in_keys_inv=keys, out_keys_inv=keys)
        self.register_buffer("before", torch.as_tensor(before, dtype=torch.float64))

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._delay_values(self.in_keys_inv, tensordict, self._mask(tensordict, "_step"))

    def _initial_output(self, value: torch.Tensor) -> torch.Tensor:
        before: torch.Tensor = self.before.to(value)
        return before.expand(value.shape)
