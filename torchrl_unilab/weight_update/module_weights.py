"""A module's weights by dotted name: parameters, buffers and extra state, used where they are.

A sender publishes `ModuleWeights.tensors`; a receiver copies snapshots into them. Invariant: a
tensor is looked up in the module at each use, and never kept.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from operator import is_
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase, TensorDictParams
from torch import nn
from torch.nn.parameter import is_lazy

from torchrl_unilab.errors import ConfigError, LayoutError, LayoutKeyError
from torchrl_unilab.shm.layout import dotted

EXTRA_STATE = "_extra_state"
"""Name under which a module's extra state lies, as in its ``state_dict()``."""

_SCALARS: dict[str, tuple[type, torch.dtype]] = {
    "bool": (bool, torch.bool),
    "int": (int, torch.int64),
    "float": (float, torch.float64),
}

_quiet = threading.RLock()  # the filters of warnings are the process's: one thread at a time

_TORCHRL_EXTRA_STATE = "__extra_state__"  # as TorchRL's strategies name it

Weights: TypeAlias = TensorDictBase | nn.Module | Mapping[str, Any]


class ModuleWeights:
    """A module's parameters, buffers and extra state, in a fixed order.

    A parameter that was replaced (``load_state_dict(assign=True)``, ``module.to(...)``) is seen
    at once; for a submodule that was replaced, or a name that was added or removed, look the
    module up anew. Tied tensors come under each of their names.

    Extra state is what submodules return from ``get_extra_state``: a tensor, a number, or
    (nested) dictionaries of these. Its keys are ``<submodule>._extra_state.<key>``.

    Args:
        module: The module to look into.

    Attributes:
        names: Dotted names of parameters and buffers.
        keys: These, and the keys of extra state.
        is_stateful: Whether there is extra state.
        optional: The keys that a state dict or ``TensorDict.from_module`` may lack:
            buffers that are not persistent, and extra state.

    Raises:
        ConfigError: A parameter is lazy and has no shape yet, extra state holds something
            else, or a module was compiled by ``torch.jit``.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._stateful: list[tuple[str, nn.Module]] = []
        optional: set[str] = set()
        # The dictionaries in which modules keep their tensors; None where a name has no tensor.
        registries: list[tuple[str, dict[str, Any] | _ParamsRegistry]] = []
        submodules = list(module.named_modules(remove_duplicate=False))
        for prefix, submodule in submodules:
            dot = f"{prefix}." if prefix else ""
            if isinstance(submodule, torch.jit.ScriptModule):
                raise ConfigError(
                    f"module {prefix!r}: compiled by torch.jit (expected Python's own, which gives "
                    "its tensors). Publish the module that was compiled, or use torch.compile."
                )
            if isinstance(submodule, TensorDictParams):
                registries.append((dot, _ParamsRegistry(submodule)))
            else:  # those of this submodule, without its children's
                registries += [(dot, submodule._parameters), (dot, submodule._buffers)]
            optional.update(dot + name for name in submodule._non_persistent_buffers_set)
            if type(submodule).get_extra_state is not nn.Module.get_extra_state:
                self._stateful.append((dot + EXTRA_STATE, submodule))
        slots = [(dot, registry, name) for dot, registry in registries for name in registry]
        self._slots = [(registry, name) for _, registry, name in slots]
        self._absent = [registry[name] is None for registry, name in self._slots]
        self._some_absent = any(self._absent)
        present = [slot for slot, absent in zip(slots, self._absent, strict=True) if not absent]
        self._entries = [(registry, name) for _, registry, name in present]
        self.names = [_checked_name(dot + name, registry[name]) for dot, registry, name in present]
        extra = self.extra_state()
        self.keys = (*self.names, *extra)
        self.is_stateful = bool(self._stateful)
        self.optional = frozenset(optional.union(extra))
        # `tensors` compares all names, those of submodules included, and the submodules.
        children = [submodule._modules for _, submodule in submodules]
        named: list[Mapping[str, Any]] = [*(registry for _, registry in registries), *children]
        self._empty = [names for names in named if not names]
        self._filled = [names for names in named if names]
        self._all_names = list(chain.from_iterable(self._filled))
        self._children = [modules for modules in children if modules]
        self._submodules = list(chain.from_iterable(map(dict.values, self._children)))

    def tensors(self) -> list[torch.Tensor] | None:
        """Return parameters and buffers as they are now, in the order of `names`.

        None if submodules or names have changed. Called in each publish and pull, and therefore
        short.
        """
        children = chain.from_iterable(map(dict.values, self._children))
        if (
            any(self._empty)
            or list(chain.from_iterable(self._filled)) != self._all_names
            or not all(map(is_, children, self._submodules))
        ):
            return None
        values = [registry[name] for registry, name in self._slots]
        if [value is None for value in values] != self._absent:
            return None
        return [value for value in values if value is not None] if self._some_absent else values

    def extra_state(self) -> dict[str, torch.Tensor]:
        """Return the extra state as it is now, by dotted key."""
        flat: dict[str, torch.Tensor] = {}
        for prefix, submodule in self._stateful:
            with _quiet, warnings.catch_warnings():
                # TorchRL's normalisers warn when they have no statistics yet.
                warnings.simplefilter("ignore", UserWarning)
                flat.update(flatten_extra_state(prefix, submodule.get_extra_state()))
        return flat

    def named(self) -> dict[str, torch.Tensor]:
        """Return everything as it is now, by dotted key, detached."""
        registered = (registry[name].detach() for registry, name in self._entries)
        return dict(zip(self.names, registered, strict=True)) | self.extra_state()

    def set_extra_state(self, values: Mapping[str, torch.Tensor]) -> None:
        """Give submodules their extra state, copied, from tensors by dotted key."""
        for prefix, submodule in self._stateful:
            under = (f"{prefix}.", f"{prefix}#")
            own = {k: v.clone() for k, v in values.items() if k == prefix or k.startswith(under)}
            if own:
                submodule.set_extra_state(nest_extra_state(prefix, own))

    def make_private(self) -> None:
        """Move each tensor that another process may hold into memory of this process.

        A tensor stays the same object with the same values, so other references to it stay valid.
        Tensors on the meta device are replaced by new ones on the host, of the same type and flags;
        tied tensors stay tied. Views of a common memory no longer share it.
        """
        replaced: dict[int, torch.Tensor] = {}
        for registry, name in self._entries:
            old = registry[name]
            if not old.is_meta:
                if old.is_shared() or is_expanded(old):
                    old.data = old.detach().clone()
                continue
            if id(old) not in replaced:
                data = torch.empty_like(old, device="cpu")
                if isinstance(old, nn.Parameter):
                    data = nn.Parameter(data, requires_grad=old.requires_grad)
                replaced[id(old)] = data
            registry[name] = replaced[id(old)]


class _ParamsRegistry(Mapping[str, Any]):
    """The leaves of a `TensorDictParams` by dotted name, like a module's registries."""

    def __init__(self, params: TensorDictParams) -> None:
        self._params = params
        self._paths = self._find_paths()

    def _find_paths(self) -> dict[str, Any]:
        """Return each leaf's key by dotted name; a key may have dots of its own."""
        keys = self._params.keys(include_nested=True, leaves_only=True)
        return {dotted(key): key for key in keys}

    def __getitem__(self, name: str) -> Any:
        return self._params.get(self._paths[name])

    def __setitem__(self, name: str, value: Any) -> None:
        with self._params.unlock_():
            # A policy that came through the meta device would cast the value back to it. The
            # wrapper's own `clear_device_` leaves the device of its top level (tensordict 0.14).
            self._params._param_td.clear_device_()
            self._params.set(self._paths[name], value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._find_paths())

    def __len__(self) -> int:
        return len(self._find_paths())


def _checked_name(name: str, tensor: torch.Tensor) -> str:
    if is_lazy(tensor):
        raise ConfigError(
            f"cannot share weights: {name!r} is lazy and has no shape yet (expected an "
            "initialised parameter). Run one forward pass first."
        )
    return name


def flatten_extra_state(prefix: str, state: Any) -> dict[str, torch.Tensor]:
    """Return extra state as tensors by dotted key under `prefix`.

    A Python number becomes a 0-d tensor whose key ends in ``#`` and its type.

    Raises:
        ConfigError: `state` holds something that is no tensor or number, or a key with a ``.``
            or ``#``.

    Examples:
        >>> sorted(flatten_extra_state("_extra_state", {"a": torch.zeros(1), "n": 3}))
        ['_extra_state.a', '_extra_state.n#int']
    """
    if state is None:
        return {}
    if isinstance(state, torch.Tensor):
        return {prefix: state.detach()}
    if isinstance(state, (dict, TensorDictBase)):
        flat: dict[str, torch.Tensor] = {}
        for key, value in state.items():
            if not isinstance(key, str) or {".", "#"} & {*key}:
                raise ConfigError(
                    f"cannot share extra state {prefix!r}: key {key!r} (expected a text without "
                    "'.' and '#', which divide keys). Return another from get_extra_state."
                )
            flat.update(flatten_extra_state(f"{prefix}.{key}", value))
        return flat
    for name, (kind, dtype) in _SCALARS.items():
        if type(state) is kind:
            return {f"{prefix}#{name}": torch.tensor(state, dtype=dtype, device="cpu")}
    raise ConfigError(
        f"cannot share extra state {prefix!r}: {type(state).__name__} (expected tensors, "
        "numbers, or dictionaries of these). Return those from get_extra_state."
    )


def nest_extra_state(prefix: str, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return what `flatten_extra_state` took apart, with each number's own type."""
    nested: dict[str, Any] = {}
    for key, tensor in tensors.items():
        path, _, kind = key.removeprefix(prefix).partition("#")
        value: Any = _SCALARS[kind][0](tensor.item()) if kind else tensor
        if not path:
            return value
        *parents, last = path.removeprefix(".").split(".")
        level = nested
        for parent in parents:
            level = level.setdefault(parent, {})
        level[last] = value
    return nested


def named_tensors(weights: Weights) -> dict[str, torch.Tensor]:
    """Return the tensors of a module, TensorDict or (nested) state dict by dotted key.

    Raises:
        ConfigError: `weights` is something else.
        LayoutKeyError: Two entries have the same dotted key.
    """
    if isinstance(weights, nn.Module):
        return ModuleWeights(weights).named()
    if not isinstance(weights, (dict, TensorDictBase)):
        raise ConfigError(
            f"weights: {type(weights).__name__} (expected a module, a "
            "TensorDict or a state dict). Pass one of these."
        )
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in _leaves(weights, ""):
        if name in tensors:
            raise LayoutKeyError(
                f"weights: key {name!r} comes twice (expected once). Leave one of them out."
            )
        tensors[name] = tensor
    return tensors


def _leaves(weights: Any, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in weights.items():
        if not isinstance(key, (str, tuple)):
            raise ConfigError(
                f"weights: key {key!r} (expected names). Pass the weights of one module."
            )
        name = prefix + ("" if not prefix else ".") + dotted(key)
        name = name.replace(_TORCHRL_EXTRA_STATE, EXTRA_STATE)
        if isinstance(value, torch.Tensor):
            yield name, value
        elif name.split(".")[-1] == EXTRA_STATE:
            yield from flatten_extra_state(name, value).items()
        elif isinstance(value, (dict, TensorDictBase)):
            yield from _leaves(value, name)
        else:
            raise ConfigError(
                f"weights: {name!r} is a {type(value).__name__} (expected a "
                "tensor). Leave it out, or make it a tensor."
            )


def tied_names(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, str]]:
    """Return pairs of names that one tensor has."""
    first: dict[Any, str] = {}  # name of each tensor; it may have others
    named = [((t.data_ptr(), t.shape, t.stride()), name) for name, t in tensors.items()]
    return [(first[at], name) for at, name in named if first.setdefault(at, name) != name]


def check_tied(tied: Iterable[tuple[str, str]], values: Mapping[str, torch.Tensor]) -> None:
    """Refuse values that differ under the names of one tensor: it can have one of them."""
    for first, second in tied:
        one, other = (values[name].reshape(-1).view(torch.uint8) for name in (first, second))
        if not torch.equal(one, other):
            raise LayoutError(
                f"weights: {first!r} and {second!r} differ (expected them equal, as the model that "
                "reads them ties them). Tie them in the published model, or in neither."
            )


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether several elements of a tensor share memory."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in strides)


def nested(tensors: Mapping[str, torch.Tensor]) -> TensorDictBase:
    """Return tensors by dotted key as a nested TensorDict."""
    return TensorDict(dict(tensors)).unflatten_keys(".")
