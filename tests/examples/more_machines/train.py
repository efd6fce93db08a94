"""Train with collectors on a Ray cluster; the learner is here.

``python -m tests.examples.more_machines.train appo HalfCheetah-v5 --stop-at 3000`` takes a cluster
of two nodes of this machine; ``--address auto`` the one that ``ray start`` has made.

1. The settings, networks and loss are those of one machine.
2. A `UniLabRayScheme` publishes; each node's collectors follow its `node()`.
3. `RayCollector` makes an `APPOCollector` on each node, and has lost ones started again.
4. The trainer is that of one machine. SAC and TD3 write what arrives into a replay beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase

from torchrl_unilab.collectors import APPOCollector
from torchrl_unilab.collectors.replay import transition_keys
from torchrl_unilab.configs import SETTINGS, APPOConfig, OffPolicyConfig
from torchrl_unilab.data import PackedReplayStorage
from torchrl_unilab.distributed import UniLabRayScheme
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.trainers import APPOTrainer, OffPolicyTrainer, build_learner
from torchrl_unilab.trainers.progress import log_progress, stop_when
from torchrl_unilab.trainers.runs.builders import with_exploration_noise

OFF_POLICY_STEPS = 8  # of each environment in a batch that crosses the network


def make_policy(algorithm: str, task: str) -> TensorDictModuleBase:
    """Return a new policy; on the nodes it is made by this, as Ray keeps no large arguments."""
    config = SETTINGS[algorithm].for_task(task)
    with contextlib.closing(MujocoBatchEnv(task, 1, num_threads=1)) as env:
        return acting(config, build_learner(env, config).actor)


def acting(config: Any, actor: TensorDictModuleBase) -> TensorDictModuleBase:
    """Return what acts on the nodes: TD3 explores by noise."""
    if config.algorithm != "td3":
        return actor
    return with_exploration_noise(actor, std_min=config.noise_std_min, std_max=config.noise_std_max)


def make_collector(
    make_env: Callable[[], MujocoBatchEnv],
    policy_factory: Callable[[], TensorDictModuleBase],
    scheme: UniLabRayScheme,
    nodes: int,
    frames_per_batch: int,
    total_frames: int,
    pull: str,
    seed: int,
) -> Any:
    """Return a `RayCollector` of an `APPOCollector` on each node."""
    from torchrl.collectors.distributed import RayCollector

    # It warns of a policy that it does not have: the scheme has it.
    warnings.filterwarnings("ignore", message="The policy is not an nn.Module")
    node = {"policy": scheme.node(pull=pull)}
    collector = RayCollector(
        [make_env] * nodes,
        policy_factory=policy_factory,
        collector_class=APPOCollector,
        collector_kwargs={"weight_sync_schemes": node, "restart_workers": 3, "seed": seed},
        weight_sync_schemes={"policy": scheme},
        frames_per_batch=frames_per_batch,
        total_frames=total_frames,
        sync=False,
        remote_configs={
            "num_cpus": 1,
            "num_gpus": 0,
            "memory": 2**29,
            "scheduling_strategy": "SPREAD",
            "max_restarts": 3,  # a lost node's collector moves to another
            "max_task_retries": -1,  # and is asked again
        },
    )
    collector.update_policy_weights_()  # looks whether all nodes follow
    return collector


def make_trainer(
    algorithm: str, task: str, nodes: int, frames: int, seed: int
) -> APPOTrainer | OffPolicyTrainer:
    """Return a trainer whose collectors are on as many nodes."""
    torch.manual_seed(seed)
    config: Any = SETTINGS[algorithm].for_task(task)
    make_env = partial(MujocoBatchEnv, task, config.num_envs, num_threads=1, stagger=config.stagger)
    with contextlib.closing(make_env()) as env:
        learner = build_learner(env, config)
        keys, example = transition_keys(env), env.fake_tensordict()[0]
    scheme = UniLabRayScheme(acting(config, learner.actor))
    policy = partial(make_policy, algorithm, task)
    steps = config.num_steps if isinstance(config, APPOConfig) else OFF_POLICY_STEPS
    parts: dict[str, Any] = {
        "collector": make_collector(
            make_env, policy, scheme, nodes, config.num_envs * steps, frames, config.pull, seed
        ),
        "loss_module": learner.loss,
        "total_frames": frames,
        "normalizers": learner.normalizers,
        "scheme": scheme,
        "progress_bar": False,
    }
    if isinstance(config, APPOConfig):
        return APPOTrainer(config=config, **parts)
    return OffPolicyTrainer(
        config=per_batch(config, steps),
        storage=PackedReplayStorage(
            config.capacity, example=example.select(*keys), n_step=config.n_step, gamma=config.gamma
        ),
        **parts,
    )


def per_batch(config: OffPolicyConfig, steps: int) -> OffPolicyConfig:
    """Return settings of as many updates per frame, for batches of several steps."""
    ticks = steps // config.env_steps_per_sync
    return dataclasses.replace(config, updates_per_step=config.updates_per_step * ticks)


@contextlib.contextmanager
def cluster(address: str | None, nodes: int) -> Iterator[None]:
    """Connect to a cluster, or start one of this machine."""
    import ray

    if address is not None:
        ray.init(address, log_to_driver=False)
        yield
        ray.shutdown()
        return
    from ray.cluster_utils import Cluster

    room = {"num_cpus": 2, "object_store_memory": 2**27}
    local = Cluster(initialize_head=True, head_node_args={**room, "include_dashboard": False})
    try:
        for _ in range(nodes - 1):
            local.add_node(**room)
        ray.init(local.address, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        local.shutdown()


def main(arguments: Sequence[str] | None = None) -> float:
    """Train; return the mean return at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("algorithm", choices=SETTINGS)
    parser.add_argument("task")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--address", help="of a cluster, such as auto")
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--stop-at", type=float, help="a mean return to stop at")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with cluster(options.address, options.nodes):
        trainer = make_trainer(
            options.algorithm, options.task, options.nodes, options.frames, options.seed
        )
        stop_when(trainer, options.stop_at, None)
        log_progress(trainer, partial(print, flush=True))
        try:
            trainer.train()
        finally:
            trainer.collector.shutdown(shutdown_ray=False)
    returns = trainer.returns
    print(
        f"{options.algorithm} on {options.task}, {options.nodes} nodes: return {returns.mean:,.0f} "
        f"after {trainer.collected_frames:,} frames, {returns.seconds:.1f} s"
    )
    return returns.mean


if __name__ == "__main__":
    main()
