"""The hooks on TorchRL's own trainers, whose collectors use the shared-memory scheme."""

from __future__ import annotations

import copy
from collections.abc import Callable
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

from tests.support.bounds import DEADLINE
from tests.support.processes import live_children
from torchrl_unilab.trainers import LogPolicyLag, PublishWeights
from torchrl_unilab.weight_update import UniLabShmScheme

FRAMES = 16
# Of five batches from two workers, one worker made three: it began the third one after a
# publish, as it is told to go on when its last batch is taken.
PHASE = 6
BATCHES = 2 * PHASE

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


def _buffer(sampler: Any, frames: int) -> ReplayBuffer:
    return TensorDictReplayBuffer(storage=LazyTensorStorage(frames), sampler=sampler, batch_size=8)


def _common(collector: BaseCollector, steps: int | None = 2) -> dict[str, Any]:
    return {
        "collector": collector,
        "total_frames": BATCHES * FRAMES,
        "frame_skip": 1,
        "optim_steps_per_batch": steps,
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
            replay_buffer=_buffer(SamplerWithoutReplacement(), FRAMES),
            num_epochs=1,
            weight_update_map={"policy": "loss_module.actor_network"},
            **_common(collector, steps=None),  # as many as the buffer has minibatches
        )

    return Setup(make, policy, "loc", MultiSyncCollector, workers=2)


def _sac() -> Setup:
    policy = _stochastic()
    loss = SACLoss(policy, _qvalue(), num_qvalue_nets=2)

    def make(collector: BaseCollector) -> Trainer:
        return SACTrainer(
            loss_module=loss,
            optimizer=torch.optim.Adam(loss.parameters(), lr=0.01),
            replay_buffer=_buffer(RandomSampler(), 8 * FRAMES),
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
            replay_buffer=_buffer(RandomSampler(), 8 * FRAMES),
            target_net_updater=SoftUpdate(loss, eps=0.9),
            exploration_module=noise,
            **_common(collector),
        )

    policy = TensorDictSequential(actor, noise)
    return Setup(make, policy, "action", MultiAsyncCollector, workers=2)


SETUPS = {"ppo": _ppo, "sac": _sac, "td3": _td3}


def _weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in module.state_dict().items()}


def _same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def _zero(policy: nn.Module) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()


class Run:
    """Trains to the end, shuts down, and keeps what was seen on the way.

    In the first phase the trainer's own update publishes, in the second `PublishWeights`
    in its place: one run for both, as workers take seconds to start.

    Args:
        setup: What to train.
        every: Batches between publishes in the second phase.

    Attributes:
        versions: The newest version after each batch.
        learned: The learner's weights by the version under which they were published.
        acted: For each batch, the versions its frames name.
        strays: For each batch, how far any frame was from what those weights do.
        lags: For each batch, how many versions its frames were behind.
        logged: What the trainer logged.
        restored: What a checkpoint at the end brought back.
        left_over: Child processes that outlived the shutdown.
    """

    def __init__(self, setup: Setup, every: int) -> None:
        self.setup = setup
        self.every = every
        self.versions: list[int] = []
        self.learned = {0: _weights(setup.policy)}
        self.acted: list[set[int]] = []
        self.strays: list[float] = []
        self.lags: list[float] = []
        self.restored: dict[str, Any] = {}
        self._acting = copy.deepcopy(setup.policy)
        trainer = setup.trainer
        try:
            LogPolicyLag(setup.scheme).register(trainer, name="lag_of_the_policy")
            trainer.register_op("batch_process", self._look_at_frames)
            trainer.register_op("post_steps_log", self._look_at_workers)
            trainer.register_op("shutdown", self._look_at_the_end)
            trainer.train()
            self.logged = dict(trainer._log_dict)
        finally:
            setup.collector.shutdown()
            self.left_over = live_children()

    def _replace_own_update(self) -> None:
        PublishWeights(self.setup.collector, every=self.every).register(self.setup.trainer)

    def _look_at_frames(self, batch: TensorDictBase) -> None:
        versions = batch["next", "policy_version"].reshape(-1)
        frames = batch.select("observation", self.setup.out).reshape(-1)
        self.lags.append(self.setup.scheme.version - float(versions.float().mean()))
        self.acted.append({int(version) for version in versions.unique()})
        self.strays.append(0.0)
        for version in self.acted[-1]:
            self._acting.load_state_dict(self.learned[version])
            own = frames[versions == version]
            with torch.no_grad():
                expected = self._acting(own.select("observation"))[self.setup.out]
            stray = float((own[self.setup.out] - expected).abs().max())
            self.strays[-1] = max(stray, self.strays[-1])

    def _look_at_workers(self, batch: TensorDictBase) -> None:
        version = self.setup.scheme.version
        self.versions.append(version)
        if version not in self.learned:
            self.learned[version] = _weights(self.setup.policy)
        # TorchRL's asynchronous workers drop the rollout under way, and wait for ever,
        # when they are asked for their state: those are looked at in the end.
        if isinstance(self.setup.collector, MultiSyncCollector):
            self._look_at_weights()
        if len(self.versions) == PHASE:
            self._replace_own_update()

    def _look_at_weights(self) -> None:
        # The workers hold the newest weights, and say that they do.
        scheme = self.setup.scheme
        for held in self._held():
            assert _same(held, self.learned[scheme.version])
        scheme.wait_applied(timeout=DEADLINE)
        assert set(scheme.applied_versions.values()) == {scheme.version}

    def _held(self) -> list[dict[str, torch.Tensor]]:
        state = self.setup.collector.state_dict()
        workers = range(self.setup.collector.num_workers)
        return [state[f"worker{worker}"]["policy_state_dict"] for worker in workers]

    def _look_at_the_end(self) -> None:
        self._look_at_weights()
        trainer, collector = self.setup.trainer, self.setup.collector
        saved = copy.deepcopy(trainer.state_dict())
        learner = _weights(self.setup.policy)
        _zero(self.setup.policy)
        trainer._post_steps_hook()
        collector.update_policy_weights_()
        workers_changed = all(not _same(held, learner) for held in self._held())
        changed = self._hooks()
        trainer.load_state_dict(saved)
        self.restored = {
            "saved": {name: saved[name] for name in changed},
            "changed": changed,
            "loaded": self._hooks(),
            "learner": _same(_weights(self.setup.policy), learner),
            "workers_changed": workers_changed,
            "workers": all(_same(held, learner) for held in self._held()),
        }
        _zero(self.setup.policy)
        collector.update_policy_weights_()
        trainer.load_state_dict(saved)
        self.restored["workers_behind"] = all(_same(held, learner) for held in self._held())

    def _hooks(self) -> dict[str, Any]:
        return {name: hook.state_dict() for name, hook in self.setup.trainer._modules.items()}


EVERY = {"ppo": 1, "sac": 1, "td3": 2}


@pytest.fixture(scope="module", params=["ppo", pytest.param("sac", marks=pytest.mark.slow), "td3"])
def run(request: pytest.FixtureRequest) -> Run:
    """A whole run of a stock trainer."""
    torch.manual_seed(0)
    return Run(SETUPS[request.param](), EVERY[request.param])


def test_a_stock_trainers_own_update_publishes_once_a_batch(run):
    assert run.versions[:PHASE] == [1, 2, 3, 4, 5, 6]
    assert max(set().union(*run.acted[:PHASE])) >= 1


def test_publish_weights_publishes_every_nth_batch_in_place_of_the_own_update(run):
    published = [batch // run.every for batch in range(1, PHASE + 1)]
    assert run.versions[PHASE:] == [PHASE + count for count in published]
    assert max(set().union(*run.acted[PHASE:])) > PHASE


def test_each_frame_is_acted_with_the_learners_weights_of_the_version_it_names(run):
    assert len(run.strays) == BATCHES
    assert max(run.strays) < 1e-4
    newest = run.versions[-1]
    assert not any(_same(run.learned[v], run.learned[v + 1]) for v in range(newest))


@pytest.mark.parametrize("run", ["ppo"], indirect=True)
def test_workers_that_wait_for_the_learner_are_never_behind(run):
    assert run.lags == [0.0] * BATCHES


def test_the_lag_of_each_batch_is_logged(run):
    assert run.logged["policy_lag"] == run.lags
    assert min(run.lags) >= 0


def test_a_checkpoint_brings_back_the_hooks_the_learner_and_the_workers(run):
    restored = run.restored
    assert restored["saved"]["publish_weights"] == {"counted": PHASE}
    assert restored["changed"]["publish_weights"] == {"counted": PHASE + 1}
    assert restored["loaded"]["publish_weights"] == {"counted": PHASE}
    lag = restored["loaded"]["lag_of_the_policy"]
    assert lag == restored["saved"]["lag_of_the_policy"]
    assert sum(lag["histogram"].values()) >= BATCHES
    assert restored["learner"]
    assert restored["workers_changed"]
    assert restored["workers"]


def test_a_checkpoint_wins_over_a_publish_that_workers_have_yet_to_pull(run):
    assert run.restored["workers_behind"]


def test_the_lag_is_logged_without_a_batch_as_in_asynchronous_collection():
    scheme = UniLabShmScheme()
    scheme.init_on_sender(model_id="policy", model=_stochastic(), devices=[torch.device("cpu")])
    try:
        assert LogPolicyLag(scheme)(None)["policy_lag"] == 0
    finally:
        scheme.shutdown()


def test_a_name_serves_one_hook_only(run):
    with pytest.raises(RuntimeError, match="publish_weights is already registered"):
        PublishWeights(run.setup.collector).register(run.setup.trainer)


def test_no_worker_outlives_the_training(run):
    assert run.left_over == []
