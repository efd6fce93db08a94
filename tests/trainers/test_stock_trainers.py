"""The hooks on TorchRL's own trainers, whose collectors use the shared-memory scheme."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.data import (
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from torchrl.trainers.algorithms import PPOTrainer

from tests.support.bounds import DEADLINE
from tests.support.collecting import single_env
from tests.support.processes import live_children
from tests.support.stock import WARNINGS, Stock, stock_ppo, stock_sac, stock_td3
from torchrl_unilab.collectors import APPOCollector
from torchrl_unilab.modules import make_actor, make_critic
from torchrl_unilab.trainers import LogPolicyLag, PublishWeights
from torchrl_unilab.weight_update import UniLabShmScheme

FRAMES = 16
# Of five batches from two workers, one worker made three: it began the third one after a
# publish, as it is told to go on when its last batch is taken.
PHASE = 6
BATCHES = 2 * PHASE

pytestmark = WARNINGS


def _buffer(sampler: Any, frames: int = 8 * FRAMES) -> ReplayBuffer:
    return TensorDictReplayBuffer(storage=LazyTensorStorage(frames), sampler=sampler, batch_size=8)


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
        stock: What to train.
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

    def __init__(self, stock: Stock, every: int) -> None:
        self.stock = stock
        self.every = every
        self.scheme = UniLabShmScheme()
        # PPO takes as many steps as the buffer has minibatches.
        on_policy = stock.make.func is PPOTrainer
        self.collector = (MultiSyncCollector if on_policy else MultiAsyncCollector)(
            [single_env] * 2,
            stock.policy,
            frames_per_batch=FRAMES,
            total_frames=-1,
            track_policy_version=True,
            weight_sync_schemes={"policy": self.scheme},
        )
        self.trainer = stock.make(
            collector=self.collector,
            replay_buffer=_buffer(SamplerWithoutReplacement(), FRAMES)
            if on_policy
            else _buffer(RandomSampler()),
            total_frames=BATCHES * FRAMES,
            optim_steps_per_batch=None if on_policy else 2,
        )
        self.versions: list[int] = []
        self.learned = {0: _weights(stock.policy)}
        self.acted: list[set[int]] = []
        self.strays: list[float] = []
        self.lags: list[float] = []
        self.restored: dict[str, Any] = {}
        self._acting = copy.deepcopy(stock.policy)
        trainer = self.trainer
        try:
            LogPolicyLag(self.scheme).register(trainer, name="lag_of_the_policy")
            trainer.register_op("batch_process", self._look_at_frames)
            trainer.register_op("post_steps_log", self._look_at_workers)
            trainer.register_op("shutdown", self._look_at_the_end)
            trainer.train()
            self.logged = dict(trainer._log_dict)
        finally:
            self.collector.shutdown()
            self.left_over = live_children()

    def _replace_own_update(self) -> None:
        PublishWeights(self.collector, every=self.every).register(self.trainer)

    def _look_at_frames(self, batch: TensorDictBase) -> None:
        versions = batch["next", "policy_version"].reshape(-1)
        frames = batch.select("observation", self.stock.out).reshape(-1)
        self.lags.append(self.scheme.version - float(versions.float().mean()))
        self.acted.append({int(version) for version in versions.unique()})
        self.strays.append(0.0)
        for version in self.acted[-1]:
            self._acting.load_state_dict(self.learned[version])
            own = frames[versions == version]
            with torch.no_grad():
                expected = self._acting(own.select("observation"))[self.stock.out]
            stray = float((own[self.stock.out] - expected).abs().max())
            self.strays[-1] = max(stray, self.strays[-1])

    def _look_at_workers(self, batch: TensorDictBase) -> None:
        version = self.scheme.version
        self.versions.append(version)
        if version not in self.learned:
            self.learned[version] = _weights(self.stock.policy)
        # TorchRL's asynchronous workers drop the rollout under way, and wait for ever,
        # when they are asked for their state: those are looked at in the end.
        if isinstance(self.collector, MultiSyncCollector):
            self._look_at_weights()
        if len(self.versions) == PHASE:
            self._replace_own_update()

    def _look_at_weights(self) -> None:
        # The workers hold the newest weights, and say that they do.
        scheme = self.scheme
        for held in self._held():
            assert _same(held, self.learned[scheme.version])
        scheme.wait_applied(timeout=DEADLINE)
        assert set(scheme.applied_versions.values()) == {scheme.version}

    def _held(self) -> list[dict[str, torch.Tensor]]:
        state = self.collector.state_dict()
        workers = range(self.collector.num_workers)
        return [state[f"worker{worker}"]["policy_state_dict"] for worker in workers]

    def _look_at_the_end(self) -> None:
        self._look_at_weights()
        trainer, collector = self.trainer, self.collector
        saved = copy.deepcopy(trainer.state_dict())
        learner = _weights(self.stock.policy)
        _zero(self.stock.policy)
        trainer._post_steps_hook()
        collector.update_policy_weights_()
        workers_changed = all(not _same(held, learner) for held in self._held())
        changed = self._hooks()
        trainer.load_state_dict(saved)
        self.restored = {
            "saved": {name: saved[name] for name in changed},
            "changed": changed,
            "loaded": self._hooks(),
            "learner": _same(_weights(self.stock.policy), learner),
            "workers_changed": workers_changed,
            "workers": all(_same(held, learner) for held in self._held()),
        }
        _zero(self.stock.policy)
        collector.update_policy_weights_()
        trainer.load_state_dict(saved)
        self.restored["workers_behind"] = all(_same(held, learner) for held in self._held())

    def _hooks(self) -> dict[str, Any]:
        return {name: hook.state_dict() for name, hook in self.trainer._modules.items()}


SETUPS = {"ppo": (stock_ppo, 1), "sac": (stock_sac, 1), "td3": (stock_td3, 2)}


@pytest.fixture(scope="module", params=["ppo", pytest.param("sac", marks=pytest.mark.slow), "td3"])
def run(request: pytest.FixtureRequest) -> Run:
    """A whole run of a stock trainer."""
    torch.manual_seed(0)
    make, every = SETUPS[request.param]
    return Run(make(), every)


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
    assert restored["saved"]["publish_weights"]["counter"] == PHASE
    assert restored["changed"]["publish_weights"]["counter"] == PHASE + 1
    assert restored["loaded"]["publish_weights"]["counter"] == PHASE
    lag = restored["loaded"]["lag_of_the_policy"]
    assert lag == restored["saved"]["lag_of_the_policy"]
    assert sum(lag["histogram"].values()) >= BATCHES
    assert restored["learner"]
    assert restored["workers_changed"]
    assert restored["workers"]


def test_a_checkpoint_wins_over_a_publish_that_workers_have_yet_to_pull(run):
    assert run.restored["workers_behind"]


def test_no_worker_outlives_the_training(run):
    assert run.left_over == []


def test_the_page_trains_by_torchrls_ppo_over_our_collector():
    text = (Path(__file__).parents[2] / "tutorials/how-to/own-loss.md").read_text()
    (code,) = [each for each in re.findall(r"```python\n(.*?)```", text, re.S) if "PPOTr" in each]
    actor, scheme = make_actor(3, 1, hidden=(8,)), UniLabShmScheme()
    collector = APPOCollector(
        single_env,
        actor,
        frames_per_batch=FRAMES,
        weight_sync_schemes={"policy": scheme},
        inline=True,
    )
    names = {"actor": actor, "critic": make_critic(3, hidden=(8,)), "collector": collector}
    exec(code.replace("100_000", str(3 * FRAMES)), names)
    names["trainer"].train()
    assert scheme.version == 3
