"""Adam over one flat tensor; all parameters are views of it.

The fused updates step with it: one operation for all parameters, one for the gradient's norm.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import nn

from torchrl_unilab.errors import ConfigError
from torchrl_unilab.objectives.fused.graphs import DeviceNumber, capturer_of

_ZERO_BELOW = 1e-36
"""Moments below it become 0."""

_UNSUPPORTED = ("amsgrad", "maximize", "decoupled_weight_decay")

_ZERO_EVERY = 32
"""Steps between two times. By 0.9 per step, 1e-36 decays to no less than 3e-38 in so many."""


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Make tensors views of one flat tensor, which is returned.

    They keep their identities and values; their memory moves.

    Examples:
        >>> import torch
        >>> from torchrl_unilab.objectives.fused.adam import flatten
        >>> parts = [torch.zeros(2), torch.ones(1, 1)]
        >>> flat = flatten(parts)
        >>> _ = flat.add_(1.0)
        >>> parts[1].item()
        2.0
    """
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    nn.utils.vector_to_parameters(flat, tensors)
    return flat


def learnable(parameters: TensorDictBase) -> dict[NestedKey, nn.Parameter]:
    """Return those of a loss's parameters that are learnt; buffers are left out."""
    leaves = parameters.items(include_nested=True, leaves_only=True)
    return {key: leaf for key, leaf in leaves if leaf.requires_grad}


class FlatAdam:
    """Adam that takes one operation for all parameters.

    The parameters and their gradients become views of two tensors. The modules keep their
    `nn.Parameter` objects, whose memory moves: make this before whatever holds on to that
    memory, such as ``parameter.data``. `check` says whether that memory has moved since.

    Args:
        parameters: What it steps.
        lr: Learning rate; a tensor if it is changed on the device.

    Attributes:
        flat: The parameters' values.
        grad: Their gradients.
        optimizer: Adam over the one tensor, to be checkpointed; its first parameter group's
            settings hold for each step.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float | torch.Tensor) -> None:
        self.flat = flatten(parameters)
        self.grad = torch.zeros_like(self.flat)
        gradients = self.grad.split([parameter.numel() for parameter in parameters])
        self._views = [
            (parameter, gradient.view(parameter.shape), parameter.data_ptr())
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]
        for parameter, gradient, _ in self._views:
            parameter.grad = gradient
        self._steps = 0  # an int: reading the optimiser's own count would wait for the device
        device = self.flat.device
        self._rate = None if capturer_of(device) is None else DeviceNumber(device)
        self._parameter = nn.Parameter(self.flat)
        self._parameter.grad = self.grad
        self.optimizer = torch.optim.Adam([self._parameter], lr=lr, fused=True)
        vars(self.optimizer)["_opt_called"] = True  # or torch's schedulers warn: `step` below is it
        self.optimizer.register_load_state_dict_post_hook(self._after_load)
        self.optimizer.state[self._parameter] = {
            "step": torch.zeros((), device=self.flat.device),
            "exp_avg": torch.zeros_like(self.grad),
            "exp_avg_sq": torch.zeros_like(self.grad),
        }

    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over the learning rate and the step count of a loaded state."""
        _move_rate(self.flat.device, optimizer)
        self._steps = int(optimizer.state[self._parameter]["step"])

    def check(self) -> None:
        """Check that steps reach the parameters, and take over gradients that were set elsewhere.

        ``zero_grad`` of a module or of the optimiser drops gradients, which are views again then.

        Raises:
            ConfigError: A parameter's memory has moved, so that no step would change it, or it was
                frozen; or the optimiser has several groups or options beyond plain Adam's.
        """
        if (groups := len(self.optimizer.param_groups)) > 1:
            raise ConfigError(
                f"optimizer: {groups} groups of parameters (expected 1: a fused update steps those "
                "that it was made of). Make an optimiser of your own for others."
            )
        group = self.optimizer.param_groups[0]
        if other := [name for name in _UNSUPPORTED if group.get(name)]:
            raise ConfigError(
                f"optimizer: {other} of a fused update (expected none: it takes Adam's own step). "
                "Leave it out, or take fused=False."
            )
        for parameter, gradient, address in self._views:
            if parameter.data_ptr() != address:
                raise ConfigError(
                    f"parameter of shape {tuple(parameter.shape)}: its memory has moved since the "
                    "update that steps it was made (expected it to stay). Make the update, or the "
                    "trainer, after `to`, `deepcopy`, load_state_dict(assign=True), and only one."
                )
            if not parameter.requires_grad:
                raise ConfigError(
                    f"parameter of shape {tuple(parameter.shape)}: frozen since the update that "
                    "steps it was made (expected it to be learnt). Freeze it before, or take "
                    "fused=False."
                )
            if parameter.grad is None:
                gradient.zero_()
            elif parameter.grad is not gradient:
                gradient.copy_(parameter.grad)
            parameter.grad = gradient
        self._parameter.grad = self.grad

    def constants(self) -> tuple[Hashable, ...]:
        """Return what a replayed `step` does not read again: numbers, and where its memory is.

        Settings may have changed, and a state may have been loaded.
        """
        group, state, lr = *self._settings(), self._lr()
        memory = [state["step"], state["exp_avg"], state["exp_avg_sq"]]
        addresses = (t.data_ptr() for t in (*memory, lr) if isinstance(t, torch.Tensor))
        return *group["betas"], group["weight_decay"], group["eps"], *addresses

    def _settings(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        return self.optimizer.param_groups[0], self.optimizer.state[self._parameter]

    def _lr(self) -> Any:
        """Return the learning rate, a number or a tensor, as a step reads it."""
        lr = self.optimizer.param_groups[0]["lr"]
        there = isinstance(lr, torch.Tensor) and lr.device == self.flat.device
        return lr if self._rate is None or there else self._rate.of(float(lr))

    def step(self) -> None:
        """Do what the optimiser's ``step`` does, which takes five times the kernel's time.

        The moments of silent units would decay to denormal numbers (below 1.2e-38), on which Adam
        takes seven times as long on a CPU. They become 0.
        """
        group, state = self._settings()
        state["step"].add_(1)
        torch._fused_adam_(
            [self._parameter],
            [self.grad],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            lr=self._lr(),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
        self._steps += 1
        if self.flat.device.type == "cpu" and self._steps % _ZERO_EVERY == 0:
            for moment in (state["exp_avg"], state["exp_avg_sq"]):
                torch.ops.aten.hardshrink.out(moment, _ZERO_BELOW, out=moment)


def rate_of(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Return the learning rate, a tensor of the optimiser's own, also after it was set to a number.

    Examples:
        >>> import torch
        >>> from torchrl_unilab.objectives.fused.adam import rate_of
        >>> optimizer = torch.optim.Adam([torch.zeros(1)], lr=torch.tensor(1e-3))
        >>> optimizer.param_groups[0]["lr"] = 0.5
        >>> rate_of(optimizer).mul_(0.5), optimizer.param_groups[0]["lr"]
        (tensor(0.2500), tensor(0.2500))
    """
    group = optimizer.param_groups[0]
    if not isinstance(group["lr"], torch.Tensor):
        device = group["params"][0].device
        with torch.inference_mode(False):  # it is changed outside, too
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=device)
    lr: torch.Tensor = group["lr"]
    return lr


def _move_rate(device: torch.device, optimizer: torch.optim.Optimizer) -> None:
    """Bring a learning rate that was loaded to the device that it is read on."""
    group = optimizer.param_groups[0]
    if isinstance(group["lr"], torch.Tensor):
        group["lr"] = group["lr"].to(device)
