"""The hooks on TorchRL's own trainers, whose collectors use the shared-memory scheme."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import BaseCollector, MultiAsyncCollector, MultiSyncCollector
from torchrl.data import (
    Bounded,
    Composite,
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    Unbounded,
)
from torchrl.envs import EnvBase
from torchrl.modules import (
    AdditiveGaussianModule,
    ProbabilisticActor,
    TanhNormal,
    ValueOperator,
)
from torchrl.objectives import ClipPPOLoss, SACLoss, SoftUpdate, TD3Loss
from torchrl.trainers import Trainer
from torchrl.trainers.algorithms import PPOTrainer, SACTrainer, TD3Trainer
from torchrl.trainers.algorithms.td3 import TD3OptimizationStepper
from torchrl.trainers.trainers import UpdateWeights

from tests.support.processes import live_children
from torchrl_unilab.trainers import LogPolicyLag, PublishWeights
from torchrl_unilab.weight_update import UniLabShmScheme

FRAMES = 16
# Of five batches from two workers, one worker made three: it began the third one after a
# publish, as it is told to go on when its last batch is taken.
BATCHES = 6

# What TorchRL says about its own trainers.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:(PPO|SAC|TD3)Trainer is an experimental/prototype feature:UserWarning"
    ),
    pytest.mark.filterwarnings(
        "ignore:The '(optimizer|post_loss)' hook stage will be replaced:FutureWarning"
    ),
]


class PointEnv(EnvBase):
    """A point that the action pushes; reward for being near the origin; ten steps long."""

    def __init__(self) -> None:
        super().__init__(batch_size=[])
        self.observation_spec = Composite(observation=Unbounded((3,)))
        self.action_spec = Bounded(-1.0, 1.0, (1,))
        self.reward_spec = Unbounded((1,))
        self._point = torch.zeros(3)
        self._steps = 0

    def _reset(self, tensordict: TensorDictBase | None = None, **_: object) -> TensorDictBase:
        self._point = torch.rand(3)
        self._steps = 0
        return TensorDict(observation=self._point)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._point = self._point + 0.1 * tensordict["action"]
        self._steps += 1
        reward = -self._point.square().sum(-1, keepdim=True)
        done = torch.tensor([self._steps >= 10])
        return TensorDict(observation=self._point, reward=reward, done=done)

    def _set_seed(self, seed: int | None) -> None:
        pass


class Setup:
    """A stock trainer, and what it is made of.

    Attributes:
        out: The key under which the policy leaves what follows from weights alone.
    """

    def __init__(
        self,
        make: Callable[[BaseCollector], Trainer],
        policy: TensorDictModule,
        out: str,
        collector_class: type[BaseCollector],
        workers: int,
    ) -> None:
        self.policy = policy
        self.out = out
        self.scheme = UniLabShmScheme()
        self.collector = collector_class(
            [PointEnv] * workers,
            policy,
            frames_per_batch=FRAMES,
            total_frames=-1,
            track_policy_version=True,
            weight_sync_schemes={"policy": self.scheme},
        )
        self.trainer = make(self.collector)


def _stochastic(**kwargs: Any) -> ProbabilisticActor:
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=Bounded(-1.0, 1.0, (1,)),
        distribution_class=TanhNormal,
        **kwargs,
    )


class Quality(nn.Module):
    """A Q-network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return self.net(torch.cat([observation, action], -1))


def _qvalue() -> ValueOperator:
    return ValueOperator(Quality(), in_keys=["observation", "action"])


def _buffer(sampler: Any) -> ReplayBuffer:
    return TensorDictReplayBuffer(storage=LazyTensorStorage(128), sampler=sampler, batch_size=8)


def _common(collector: BaseCollector) -> dict[str, Any]:
    return {
        "collector": collector,
        "total_frames": BATCHES * FRAMES,
        "frame_skip": 1,
        "optim_steps_per_batch": 2,
        "progress_bar": False,
    }


def _ppo() -> Setup:
    policy = _stochastic(return_log_prob=True)
    value = ValueOperator(nn.Linear(3, 1), in_keys=["observation"])
    loss = ClipPPOLoss(policy, value)

    def make(collector: BaseCollector) -> Trainer:
        return PPOTrainer(
            loss_module=loss,
            optimizer=torch.optim.Adam(loss.parameters(), lr=0.01),
            replay_buffer=_buffer(SamplerWithoutReplacement()),
            num_epochs=1,
            weight_update_map={"policy": "loss_module.actor_network"},
            **_common(collector),
        )

    return Setup(make, policy, "loc", MultiSyncCollector, workers=2)


def _sac() -> Setup:
    policy = _stochastic()
    loss = SACLoss(policy, _qvalue(), num_qvalue_nets=2)

    def make(collector: BaseCollector) -> Trainer:
        return SACTrainer(
            loss_module=loss,
            optimizer=torch.optim.Adam(loss.parameters(), lr=0.01),
            replay_buffer=_buffer(RandomSampler()),
            target_net_updater=SoftUpdate(loss, eps=0.9),
            episode_reward_key="reward",
            **_common(collector),
        )

    return Setup(make, policy, "loc", MultiAsyncCollector, workers=2)


def _td3() -> Setup:
    spec = Bounded(-1.0, 1.0, (1,))
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1), nn.Tanh())
    actor = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
    # So little noise that the action still shows the weights.
    noise = AdditiveGaussianModule(spec, sigma_init=1e-6, sigma_end=1e-6)
    loss = TD3Loss(actor, _qvalue(), action_spec=spec, num_qvalue_nets=2)

    def make(collector: BaseCollector) -> Trainer:
        stepper = TD3OptimizationStepper(
            torch.optim.Adam(loss.actor_network_params.flatten_keys().values(), lr=0.01),
            torch.optim.Adam(loss.qvalue_network_params.flatten_keys().values(), lr=0.01),
        )
        return TD3Trainer(
            loss_module=loss,
            optimization_stepper=stepper,
            replay_buffer=_buffer(RandomSampler()),
            target_net_updater=SoftUpdate(loss, eps=0.9),
            exploration_module=noise,
            **_common(collector),
        )

    policy = TensorDictSequential(actor, noise)
    return Setup(make, policy, "action", MultiAsyncCollector, workers=1)


SETUPS = {"ppo": _ppo, "sac": _sac, "td3": _td3}


def _weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in module.state_dict().items()}


def _same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


class Run:
    """Trains to the end, shuts down, and keeps what was seen on the way.

    Args:
        setup: What to train.
        register: Registers the hooks under test.

    Attributes:
        versions: The newest version after each batch.
        learned: The learner's weights by the version under which they were published.
        acted: For each batch, the versions its frames name.
        strays: How far any frame was from what the weights it names would have done.
        lags: For each batch, how many versions its frames were behind.
        logged: What the trainer logged.
        restored: What a checkpoint at the end brought back.
        left_over: Child processes that outlived the shutdown.
    """

    def __init__(self, setup: Setup, register: Callable[[Setup], None]) -> None:
        self.setup = setup
        self.versions: list[int] = []
        self.learned = {0: _weights(setup.policy)}
        self.acted: list[set[int]] = []
        self.strays: list[float] = []
        self.lags: list[float] = []
        self.restored: dict[str, Any] = {}
        self._acting = copy.deepcopy(setup.policy)
        trainer = setup.trainer
        try:
            trainer.register_op("batch_process", self._look_at_frames)
            register(setup)
            trainer.register_op("post_steps_log", self._look_at_workers)
            trainer.register_op("shutdown", self._look_at_the_end)
            trainer.train()
            self.logged = dict(trainer._log_dict)
        finally:
            setup.collector.shutdown()
            self.left_over = live_children()

    def _look_at_frames(self, batch: TensorDictBase) -> None:
        versions = batch["next", "policy_version"].reshape(-1)
        frames = batch.select("observation", self.setup.out).reshape(-1)
        self.lags.append(self.setup.scheme.version - float(versions.float().mean()))
        self.acted.append({int(version) for version in versions.unique()})
        for version in self.acted[-1]:
            self._acting.load_state_dict(self.learned[version])
            own = frames[versions == version]
            with torch.no_grad():
                expected = self._acting(own.select("observation"))[self.setup.out]
            self.strays.append(float((own[self.setup.out] - expected).abs().max()))

    def _look_at_workers(self, batch: TensorDictBase) -> None:
        version = self.setup.scheme.version
        self.versions.append(version)
        if version not in self.learned:
            self.learned[version] = _weights(self.setup.policy)
        # TorchRL's asynchronous workers drop the rollout under way, and wait for ever,
        # when they are asked for their state: those are looked at in the end.
        if isinstance(self.setup.collector, MultiSyncCollector):
            self.look_at_weights()

    def look_at_weights(self) -> None:
        """Check that the workers hold the newest weights, and say that they do."""
        scheme = self.setup.scheme
        for held in self._held():
            assert _same(held, self.learned[scheme.version])
        scheme.wait_applied(timeout=10)
        assert set(scheme.applied_versions.values()) == {scheme.version}

    def _held(self) -> list[dict[str, torch.Tensor]]:
        state = self.setup.collector.state_dict()
        workers = range(self.setup.collector.num_workers)
        return [state[f"worker{worker}"]["policy_state_dict"] for worker in workers]

    def _look_at_the_end(self) -> None:
        self.look_at_weights()
        trainer = self.setup.trainer
        learner, state = _weights(self.setup.policy), copy.deepcopy(trainer.state_dict())
        for parameter in self.setup.policy.parameters():
            parameter.data.zero_()
        trainer._post_steps_hook()
        assert self.setup.scheme.version >= self.versions[-1]
        changed = {name: module.state_dict() for name, module in trainer._modules.items()}
        trainer.load_state_dict(state)
        self.restored = {
            "saved": {name: state[name] for name in changed},
            "changed": changed,
            "loaded": {name: module.state_dict() for name, module in trainer._modules.items()},
            "learner": _same(_weights(self.setup.policy), learner),
            "workers": all(_same(held, learner) for held in self._held()),
        }


def _own_update(setup: Setup) -> None:
    """The trainer's own update stays as it is."""
    LogPolicyLag(setup.scheme).register(setup.trainer)


def _publish_weights(setup: Setup, every: int) -> None:
    """`PublishWeights` takes the place of the trainer's own update."""
    setup.trainer._post_steps_ops = [
        (op, kwargs)
        for op, kwargs in setup.trainer._post_steps_ops
        if not isinstance(inspect.unwrap(op), UpdateWeights)
    ]
    PublishWeights(setup.collector, every=every).register(setup.trainer)
    LogPolicyLag(setup.scheme).register(setup.trainer, name="lag_of_the_policy")


EVERY = {"ppo": 1, "sac": 1, "td3": 2}


@pytest.fixture(scope="module", params=SETUPS)
def own(request: pytest.FixtureRequest) -> Run:
    """A run of a trainer that updates the workers by itself."""
    torch.manual_seed(0)
    return Run(SETUPS[request.param](), _own_update)


@pytest.fixture(scope="module", params=SETUPS)
def hooked(request: pytest.FixtureRequest) -> Run:
    """A run of a trainer whose workers are updated by `PublishWeights`."""
    torch.manual_seed(0)
    register = partial(_publish_weights, every=EVERY[request.param])
    return Run(SETUPS[request.param](), register)


def test_a_stock_trainers_own_update_publishes_once_a_batch(own):
    assert own.versions == [1, 2, 3, 4, 5, 6]
    assert max(own.strays) < 1e-4
    assert max(set().union(*own.acted)) >= 1
    assert own.logged["policy_lag"] == own.lags
    assert own.left_over == []


def test_publish_weights_is_the_only_publisher_where_it_replaces_the_own_update(hooked):
    every = hooked.setup.trainer._modules["publish_weights"].every
    assert hooked.versions == [(batch + 1) // every for batch in range(BATCHES)]


def test_each_frame_is_acted_with_the_learners_weights_of_the_version_it_names(hooked):
    assert len(hooked.acted) == BATCHES
    assert max(hooked.strays) < 1e-4
    assert max(set().union(*hooked.acted)) >= 1
    first, last = hooked.learned[0], hooked.learned[hooked.versions[-1]]
    assert not _same(first, last)


def test_workers_that_wait_for_the_learner_are_never_behind(hooked):
    if isinstance(hooked.setup.collector, MultiSyncCollector):
        assert hooked.lags == [0.0] * BATCHES


def test_the_lag_of_each_batch_is_logged(hooked):
    assert hooked.logged["policy_lag"] == hooked.lags
    assert min(hooked.lags) >= 0


def test_a_checkpoint_brings_back_the_hooks_the_learner_and_the_workers(hooked):
    restored = hooked.restored
    assert restored["saved"]["publish_weights"] == {"batches": BATCHES}
    assert restored["changed"]["publish_weights"] == {"batches": BATCHES + 1}
    assert restored["loaded"]["publish_weights"] == {"batches": BATCHES}
    assert restored["loaded"]["lag_of_the_policy"] == {}
    assert restored["learner"]
    assert restored["workers"]


def test_a_name_serves_one_hook_only(hooked):
    with pytest.raises(RuntimeError, match="publish_weights is already registered"):
        PublishWeights(hooked.setup.collector).register(hooked.setup.trainer)


def test_no_worker_outlives_the_training(hooked):
    assert hooked.left_over == []
