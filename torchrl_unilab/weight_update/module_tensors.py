"""The tensors of a module, by dotted name, read where the module keeps them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchrl_unilab.errors import ConfigError

__all__ = ["ModuleTensors"]


class ModuleTensors:
    """A module's parameters and buffers, in a fixed order.

    Looks each tensor up in the module at every call, so a parameter that was replaced
    (``load_state_dict(assign=True)``, ``module.to(...)``) is seen at once.

    Args:
        module: The module to look into.

    Raises:
        ConfigError: A parameter is lazy and has no shape yet.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.keys: list[str] = []
        self._entries: list[tuple[dict[str, torch.Tensor | None], str]] = []
        for prefix, submodule in module.named_modules(remove_duplicate=False):
            for registry in (submodule._parameters, submodule._buffers):
                for name, tensor in registry.items():
                    if tensor is None:
                        continue
                    key = f"{prefix}.{name}" if prefix else name
                    if is_lazy(tensor):
                        raise ConfigError(
                            f"cannot share weights: {key!r} is lazy and has no shape yet "
                            "(expected an initialised parameter). Run one forward pass first."
                        )
                    self.keys.append(key)
                    self._entries.append((registry, name))

    def current(self) -> list[torch.Tensor]:
        """Return the tensors as they are now, in the order of `keys`."""
        return [registry[name] for registry, name in self._entries]  # type: ignore[misc]

    def as_dict(self) -> dict[str, torch.Tensor]:
        """Return the tensors as they are now, by dotted key, detached."""
        tensors = (t.detach() for t in self.current())
        return dict(zip(self.keys, tensors, strict=True))

    def make_private(self, device: torch.device | str = "cpu") -> None:
        """Replace each tensor that another process may hold by memory of this process.

        Tensors on the meta device get memory on `device`. Kinds, flags and ties between
        tensors stay; contents of shared tensors are kept.
        """
        replaced: dict[int, torch.Tensor] = {}
        for registry, name in self._entries:
            old = registry[name]
            assert old is not None
            if id(old) not in replaced:
                if old.is_meta:
                    data = torch.empty_like(old, device=device)
                elif old.is_shared():
                    data = old.detach().clone()
                else:
                    continue
                if isinstance(old, nn.Parameter):
                    data = nn.Parameter(data, requires_grad=old.requires_grad)
                replaced[id(old)] = data
            registry[name] = replaced[id(old)]
