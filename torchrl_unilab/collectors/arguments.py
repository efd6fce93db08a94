"""The arguments of collectors, checked before anything starts."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

import cloudpickle
import torch
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.envs import EnvBase, EnvCreator
from torchrl.envs.utils import ExplorationType
from torchrl.weight_update import WeightSyncScheme

from torchrl_unilab.checks import as_choice, as_instance, as_integer
from torchrl_unilab.collectors.worker import Measure
from torchrl_unilab.errors import ConfigError, UsageError
from torchrl_unilab.weight_update import UniLabShmScheme

CreateEnv = Callable[[], EnvBase]


class WorkerSettings(TypedDict, total=False):
    """Keyword arguments of `WorkerCollector`."""

    total_frames: int
    num_collectors: int | None
    weight_sync_schemes: Mapping[str, WeightSyncScheme] | None
    lockstep: bool
    inline: bool
    num_threads: int
    exploration_type: ExplorationType | str | None
    seed: int | None
    timeout: float | None
    restart_workers: int
    policy_device: torch.device | str | None
    measure: Measure
    worker_idx: int | None
    policy_factory: Callable[[], TensorDictModuleBase] | None


class StockSettings(WorkerSettings, total=False):
    """These, and arguments of TorchRL's collectors, typed as what `STOCK_ARGUMENTS` accepts."""

    max_frames_per_traj: int | None
    reset_at_each_iter: bool
    reset_when_done: bool
    set_truncated: bool
    split_trajs: bool | None
    trajs_per_batch: None
    trajs_per_write: None
    traj_format: None
    track_traj_ids: bool
    cat_results: None
    preemptive_threshold: float | None
    return_same_td: bool
    compact_obs: bool
    postproc: None
    pre_collect_hook: None
    post_collect_hook: None
    replay_buffer: None
    extend_buffer: bool
    compile_policy: bool | None
    cudagraph_policy: bool | None
    track_policy_version: bool | None
    device: torch.device | str | None
    storing_device: torch.device | str | None
    env_device: torch.device | str | None
    trust_policy: bool | None
    auto_register_policy_transforms: bool | None
    create_env_kwargs: Mapping[str, Any] | None
    init_fn: None
    interruptor: None
    collector_class: None
    num_workers: None
    num_sub_threads: int | None
    backend: None
    backend_options: None
    sync: bool | None
    update_at_each_batch: bool
    weight_updater: None
    weight_recv_schemes: None
    no_cuda_sync: bool | None


class RolloutSettings(StockSettings, total=False):
    """Keyword arguments of `APPOCollector`, besides its own."""

    init_random_frames: int | None


class ReplaySettings(StockSettings, total=False):
    """Keyword arguments of `ReplayCollector`, besides its own."""

    use_buffers: bool | None


_LEAVE_OUT = "Leave it out: these collectors do without"
_SPLIT = "Take torchrl.collectors.utils.split_trajectories"
_HOOK = "Take what is yielded, or record a trace"
STOCK_ARGUMENTS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "max_frames_per_traj": ((None, 0, -1), "Append a StepCounter(max_steps) to the environment"),
    "init_random_frames": ((None, 0, -1), "Use a ReplayCollector, which has it"),
    "reset_at_each_iter": ((False,), _LEAVE_OUT),
    "reset_when_done": ((True,), _LEAVE_OUT),
    "set_truncated": ((False,), "Set it in what is yielded"),
    "split_trajs": ((None, False), _SPLIT),
    "trajs_per_batch": ((None,), _SPLIT),
    "trajs_per_write": ((None,), _SPLIT),
    "traj_format": ((None,), _SPLIT),
    "track_traj_ids": ((True,), "Leave it out: batches always have them"),
    "cat_results": ((None,), "Stack what is yielded: one rollout of one worker at a time"),
    "preemptive_threshold": ((None, 1.0), _LEAVE_OUT),
    "return_same_td": ((False,), _LEAVE_OUT),
    "use_buffers": ((None, False), _LEAVE_OUT),
    "compact_obs": ((False,), _LEAVE_OUT),
    "postproc": ((None,), "Call it with what is yielded"),
    "pre_collect_hook": ((None,), _HOOK),
    "post_collect_hook": ((None,), _HOOK),
    "replay_buffer": ((None,), "Extend it by what is yielded, or use a ReplayCollector"),
    "extend_buffer": ((True, False), ""),
    "compile_policy": ((None, False), "Give torch.compile(policy)"),
    "cudagraph_policy": ((None, False), _LEAVE_OUT),
    "track_policy_version": ((None, True), "Leave it out: batches always have it"),
    "device": ((None, "cpu"), _LEAVE_OUT),
    "storing_device": ((None, "cpu"), _LEAVE_OUT),
    "env_device": ((None, "cpu"), _LEAVE_OUT),
    "trust_policy": ((None, False, True), ""),
    "auto_register_policy_transforms": ((None, False), "Append them to the environment"),
    "create_env_kwargs": ((None, {}), "Give functools.partial(create_env, ...)"),
    "init_fn": ((None,), "Call it in the function that makes the environment"),
    "interruptor": ((None,), _LEAVE_OUT),
    "collector_class": ((None,), _LEAVE_OUT),
    "num_workers": ((None,), "Use num_collectors"),
    "num_sub_threads": ((None, 1), "Use num_threads"),
    "backend": ((None,), "Use num_collectors, or inline=True"),
    "backend_options": ((None,), _LEAVE_OUT),
    "sync": ((None, False), "Use lockstep=True"),
    "update_at_each_batch": ((False,), "Call update_policy_weights_() where you learn"),
    "weight_updater": ((None,), "Use weight_sync_schemes"),
    "weight_recv_schemes": ((None,), "Use RayCollector, or TorchRL's MultiSyncCollector here"),
    "no_cuda_sync": ((None, False, True), ""),
}
"""Arguments of TorchRL's collectors: accepted values, and remedies."""


def check_settings(
    workers: int, *, inline: bool, lockstep: bool, restart_workers: int, worker_idx: int | None
) -> None:
    """Refuse numbers out of range, and ways to collect that exclude each other.

    The arguments are `WorkerCollector`'s.
    """
    if inline and workers > 1:
        raise ConfigError(f"inline: {workers} workers (expected 1). Use lockstep=True.")
    if as_integer("restart_workers", restart_workers, "Use 0.", least=0) and (lockstep or inline):
        raise ConfigError(
            f"restart_workers: {restart_workers} (expected 0 in lock-step: a run with a replaced "
            "worker is not repeatable). Use 0."
        )
    if worker_idx is not None:
        as_integer("worker_idx", worker_idx, "Leave it out.", least=0)
    if lockstep and worker_idx is not None:
        raise ConfigError(
            f"lockstep: True in collector {worker_idx} of a distributed collector (expected False: "
            "rollouts of several machines come in no fixed order). Leave it out."
        )


def exploration_of(kind: ExplorationType | str | None) -> ExplorationType:
    """Return how a policy acts, also by its name; at random for None, as in TorchRL.

    Raises:
        ConfigError: `kind` is unknown; the message lists those that are known.
    """
    names = [each.value for each in ExplorationType]
    known = as_choice("exploration_type", kind or "random", names, "Use 'random', for example.")
    return ExplorationType(known)


def find_device(setting: str, device: torch.device | str) -> torch.device:
    """Return a device of this machine, which a setting names.

    Raises:
        ConfigError: The machine does not have it; names what it has.
    """
    known = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    with contextlib.suppress(RuntimeError, TypeError):  # PyTorch does not know the device
        found = torch.device(device)
        named = {"cpu": "cpu", "cuda": f"cuda:{found.index or 0}"}
        if named.get(found.type) in known:
            return found
    raise ConfigError(
        f"{setting}: {str(device)!r} (expected one that torch {torch.__version__} finds here: "
        f"{', '.join(known)}). Use one of these."
    )


def check_state(state: Mapping[str, Any], keys: Sequence[str], envs: Sequence[int]) -> None:
    """Refuse a state without these keys, or of workers with other numbers of environments."""
    if missing := [key for key in keys if key not in state]:
        raise ConfigError(
            f"state without {missing} (expected all of {[*keys]}). Load what a collector of the "
            "same class returned."
        )
    saved = [len(worker["log"]["returns"]) for worker in state["workers"] or ()]
    if saved and saved != [*envs]:
        raise ConfigError(
            f"state of {len(saved)} workers, of {saved} environments (expected {[*envs]}). Make as "
            "many as when it was saved."
        )


def check_done_keys(env: EnvBase) -> None:
    """Refuse an environment whose episodes end for some agents alone."""
    if not {"done", "terminated"} <= {*env.done_keys}:
        raise ConfigError(
            f"environment: done keys {env.done_keys} (expected 'done' and 'terminated' of the "
            "whole environment, too). Append a transform that writes them."
        )


def steps_per_rollout(frames_per_batch: int, num_envs: int, share: int) -> int:
    """Return the steps of a rollout; a ConfigError unless they are whole.

    Args:
        frames_per_batch: Frames of a batch.
        num_envs: Environments of a worker.
        share: Workers that collect a batch together.
    """
    together = num_envs * share
    if as_integer("frames_per_batch", frames_per_batch, f"Use {together}.") % together:
        raise ConfigError(
            f"frames_per_batch: {frames_per_batch} (expected a multiple of {together}, "
            f"{share} worker(s) with {num_envs} environment(s) each). Use "
            f"{-(-frames_per_batch // together) * together}."
        )
    return frames_per_batch // together


def resolve_policy(
    policy: TensorDictModuleBase | None, factory: Callable[[], TensorDictModuleBase] | None
) -> TensorDictModuleBase:
    """Return the policy, given or made by the factory; a ConfigError unless exactly one is."""
    if (policy is None) == (factory is None):
        raise ConfigError(
            f"policy: {'neither it nor' if policy is None else 'both it and'} policy_factory "
            "(expected one of them). Pass one of them."
        )
    made = factory() if policy is None else policy  # type: ignore[misc]
    module = made._modules.get("_orig_mod", made) if isinstance(made, nn.Module) else made
    remedy = "Use TensorDictModule(module, in_keys=['observation'], out_keys=['action'])."
    as_instance("policy", module, TensorDictModuleBase, remedy)  # compiled or not
    return made


def metric_names(measure: Measure, env: EnvBase) -> list[str]:
    """Return the names of an environment's further metrics; a ConfigError unless they are numbers.

    Errors that `measure` raises are its own.
    """
    found = measure(env) if callable(measure) else measure
    try:
        return list({name: float(value) for name, value in found.items()})
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"measure: {found!r} (expected a function of the environment that returns numbers by "
            "name). Return for example {'height': 1.0}."
        ) from error


def check_factory(create_env: Any) -> None:
    """Refuse an environment, or anything else, in place of a function that makes one."""
    if isinstance(create_env, EnvBase) or not callable(create_env):
        kind = ", an environment" if isinstance(create_env, EnvBase) else ""
        raise ConfigError(
            f"create_env: {type(create_env).__name__}{kind} (expected a function that makes an "
            "environment). Pass the function: each worker makes its own."
        )


def env_factories(
    create_env_fn: CreateEnv | Sequence[CreateEnv], num_collectors: int | None
) -> list[CreateEnv]:
    """Return one environment function per worker; a ConfigError if the counts differ."""
    if callable(create_env_fn) or not isinstance(create_env_fn, Iterable):
        workers = 1 if num_collectors is None else num_collectors
        factories = [create_env_fn] * as_integer("num_collectors", workers, "Use 1.")
    else:
        factories = list(create_env_fn)
        if not factories or num_collectors not in (None, len(factories)):
            raise ConfigError(
                f"num_collectors: {num_collectors} with {len(factories)} environment functions "
                "(expected one function for each). Leave num_collectors out."
            )
    for create_env in factories:
        check_factory(create_env)
    return factories


def pack(what: str, value: Any) -> bytes:
    """Pickle by value what workers get; a ConfigError, with the cause, if that is impossible."""
    try:
        packed: bytes = cloudpickle.dumps(value)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise ConfigError(
            f"{what}: {error} (expected what can be pickled, for the workers). Leave that out; "
            "compile a policy by torch.compile(policy), not by policy.compile()."
        ) from error
    return packed


def pack_factory(create_env: CreateEnv) -> bytes | EnvCreator:
    """Pickle a factory by value, for a worker; or return it, as an `EnvCreator` shares memory.

    What that shares among workers can only be pickled while a process is spawned.
    """
    return create_env if isinstance(create_env, EnvCreator) else pack("create_env_fn", create_env)


def unpack_factory(packed: bytes | EnvCreator) -> CreateEnv:
    """Return what `pack_factory` has packed: a copy, with transforms of its own."""
    factory: CreateEnv = packed if isinstance(packed, EnvCreator) else cloudpickle.loads(packed)
    return factory


def policy_scheme(schemes: Mapping[str, WeightSyncScheme] | None) -> UniLabShmScheme:
    """Return the one scheme of ``{"policy": UniLabShmScheme()}``, or a new one."""
    given = {"policy": UniLabShmScheme()} if schemes is None else schemes
    scheme = given.get("policy") if isinstance(given, Mapping) and len(given) == 1 else None
    if not isinstance(scheme, UniLabShmScheme):
        raise ConfigError(
            f"weight_sync_schemes: {schemes!r} (expected {{'policy': UniLabShmScheme()}}). "
            "Leave it out, or give a UniLabRayScheme's node()."
        )
    remedy = "Leave it out: `receive` cannot be called in the workers."
    as_choice("pull of weight_sync_schemes", scheme.pull_at, ("rollout", "step"), remedy)
    if scheme.synchronized_on_sender:
        raise UsageError(
            "weight_sync_schemes: a scheme that another collector publishes by (expected a new "
            "one). Give each collector its own."
        )
    return scheme


def refuse_hook(collector: Any, hook: Callable[..., Any] | None) -> None:
    """Refuse to set a hook of TorchRL's collectors, the profiler's among them."""
    if hook is not None:
        raise ConfigError(
            f"hook of {type(collector).__name__}: {hook!r} (expected None: rollouts go into shared "
            "memory, in other processes). Take what is yielded, or record a trace."
        )
