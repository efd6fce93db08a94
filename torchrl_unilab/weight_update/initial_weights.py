"""The initial weights of each worker, from any of the arguments that TorchRL's senders take.

A sender is given a collector, a model or weights with devices or a map, or each worker's weights.
`initial_weights` changes none of them. `UniLabShmScheme` creates its cells from the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.weight_update.utils import _resolve_model

from torchrl_unilab.checks import as_instance
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.weight_update.module_weights import Weights, named_tensors

NO_MODEL_ID = (
    "context: given without model_id (expected both). Pass the name of the model in the context, "
    "such as 'policy'."
)
_NEEDED = (
    "init_on_sender: no weights (expected params_map, or context and model_id, or model or weights "
    "and devices). Pass one of them."
)

_DISTRIBUTED = "torchrl.collectors.distributed"  # not imported: it is slow, and rarely used


@dataclass(frozen=True)
class InitialWeights:
    """What a sender starts from.

    Attributes:
        of_workers: Worker index to its weights; workers with the same object share a cell.
        per_worker: Whether each worker has separate weights.
        casts: Whether workers may have other dtypes than the weights that are published.
        model: The model to publish, if there is no context to find it in.
    """

    of_workers: Mapping[int, Weights]
    per_worker: bool
    casts: bool = False
    model: nn.Module | None = None


def initial_weights(
    per_worker: bool,
    *,
    model_id: str | None = None,
    context: Any = None,
    weights: TensorDictBase | None = None,
    model: nn.Module | None = None,
    params_map: dict[int, TensorDictBase] | None = None,
    devices: Sequence[torch.device] | None = None,
    device_map_fn: Callable[[int, TensorDictBase], TensorDictBase] | None = None,
    num_workers: int | None = None,
    ctx: Any = None,
    remote_collectors: Sequence[Any] | None = None,
) -> InitialWeights:
    """Return the initial weights of each worker.

    Args:
        per_worker: Give each worker separate weights.
        model_id: The model's name in the context.
        context: A collector: gives the model and the number of workers.
        weights: Initial weights, instead of a model.
        model: The model to publish, instead of a context.
        params_map: Initial weights of each worker, instead of all others.
        devices: One device per worker (counts the workers; each worker copies to the
            device of its model).
        device_map_fn: Maps (worker index, weights) to that worker's weights.
        num_workers: How many workers, with `device_map_fn`.
        ctx: Unused: cells need no multiprocessing context.
        remote_collectors: Refused, as is such a context: those of a `RayCollector`.

    Raises:
        ConfigError: The workers may be on other machines, or arguments are missing, or exclude
            one another.
        TypeError: The model is no module.
    """
    if remote_collectors is not None or _is_remote(context):
        raise ConfigError(
            "weight_sync_schemes of a distributed collector: UniLabShmScheme (expected one that "
            "reaches other machines, which shared memory does not). Leave it out, and give it to "
            "the collectors that are made there: "
            "collector_kwargs={'weight_sync_schemes': {'policy': UniLabShmScheme()}}."
        )
    others = {"weights": weights, "model": model, "devices": devices}
    others["device_map_fn"] = device_map_fn
    if params_map is not None:
        others |= {"context": context, "model_id": model_id, "num_workers": num_workers}
        _refuse_given(others, "params_map")
        remedy = "Map indices of workers to their weights."
        as_instance("params_map", params_map, dict, remedy)  # the transport checks what is in it
        return InitialWeights(params_map, per_worker, casts=True)
    if context is not None:
        if model_id is None:
            raise ConfigError(NO_MODEL_ID)
        policy_device = context.policy_device
        workers = len(policy_device) if isinstance(policy_device, (list, tuple)) else 1
        if num_workers != workers:
            others["num_workers"] = num_workers
        _refuse_given(others, "context")
        return _from_context(context, model_id, workers, per_worker)
    if (model is None) == (weights is None):
        raise ConfigError(_NEEDED)
    source: Any = weights if model is None else checked_module(model, "model")
    if devices is not None:
        of_workers = _by_worker(source, len(devices), per_worker)
    elif device_map_fn is not None and num_workers is not None:
        whole = source if model is None else TensorDict.from_module(source)
        of_workers = {i: device_map_fn(i, whole.data) for i in range(num_workers)}
    else:
        raise ConfigError(_NEEDED)
    casts = devices is None  # weights that were mapped may have other dtypes
    return InitialWeights(of_workers, per_worker, casts, model)


def _is_remote(context: Any) -> bool:
    """Return whether a collector's workers may be on other machines."""
    return any(kind.__module__.startswith(_DISTRIBUTED) for kind in type(context).__mro__)


def _from_context(context: Any, model_id: str, workers: int, per_worker: bool) -> InitialWeights:
    model = find_model(context, model_id)
    if model is None and model_id == "policy":
        factories = context.policy_factory
        if any(factory is not factories[0] for factory in factories):
            policies = {i: checked_module(make(), "policy") for i, make in enumerate(factories)}
            return InitialWeights(policies, per_worker=True)
        if factories[0] is not None:  # without policy and factory, workers act at random
            model = factories[0]()
    module = checked_module(model, model_id)
    return InitialWeights(_by_worker(module, workers, per_worker), per_worker)


def _by_worker(source: Weights, workers: int, per_worker: bool) -> Mapping[int, Weights]:
    if not per_worker:
        return dict.fromkeys(range(workers), source)
    # Separate objects of equal content: workers with the same object would share a cell.
    return {i: named_tensors(source) for i in range(workers)}


def find_model(context: Any, model_id: str | None) -> Any:
    """Return a collector's model, or else a policy that was given beside a factory, or None."""
    model = _resolve_model(context, model_id or "policy")
    if model is None and model_id == "policy":
        return context.__dict__.get("_fallback_policy")
    return model


def checked_module(model: Any, model_id: str) -> nn.Module:
    """Return `model` if it is a module.

    Raises:
        TypeError: `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"UniLabShmScheme: {model_id!r} is {type(model)} (expected an nn.Module). Leave the "
            "scheme out: a policy without weights, such as RandomPolicy, needs none."
        )
    return model


def _refuse_given(given: Mapping[str, Any], reason: str) -> None:
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{name}: given beside {reason} (expected one of both). Leave it out."
            )
