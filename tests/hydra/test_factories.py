from __future__ import annotations

import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
import torchrl.trainers.algorithms.configs  # noqa: F401  (registers TorchRL's groups)
from hydra import compose, initialize_config_module
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.types import RunMode
from hydra.utils import instantiate
from torchrl.checkpoint import Checkpoint
from torchrl.collectors import BaseCollector
from torchrl.envs import GymEnv, SerialEnv
from torchrl.trainers import Trainer
from torchrl.trainers.algorithms import PPOTrainer, SACTrainer

from tests.support.processes import live_children, wait_for
from torchrl_unilab.data import PackedPrioritizedSampler, PackedReplayStorage, PackedSliceSampler
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.hydra.factories import (
    make_appo_collector,
    make_appo_trainer,
    make_off_policy_trainer,
    make_replay_collector,
    make_settings,
)
from torchrl_unilab.hydra.train import main
from torchrl_unilab.trainers import APPOConfig, APPOTrainer, OffPolicyConfig, OffPolicyTrainer
from torchrl_unilab.weight_update import UniLabShmScheme

SMALL = ["env.task=InvertedPendulum-v5", "settings.num_envs=4", "settings.hidden=[8]"]
QUIET = ["trainer.progress_bar=false", "trainer.log_interval=1"]
APPO = [*SMALL, *QUIET, "settings.num_steps=16", "settings.minibatches=2", "total_frames=256"]
OFF_POLICY = [
    *(*SMALL, *QUIET, "settings.batch_size=16", "settings.learning_starts=4"),
    *("settings.replay_buffer_n=64", "total_frames=64"),
]
INLINE = ["collector.inline=true"]
RECIPES = [
    pytest.param("appo", APPO, APPOTrainer, id="appo"),
    pytest.param("sac", OFF_POLICY, OffPolicyTrainer, id="sac"),
    pytest.param("td3", OFF_POLICY, OffPolicyTrainer, id="td3"),
]
# What TorchRL says of its own trainers.
stock = pytest.mark.filterwarnings(
    "ignore:.*is an experimental/prototype feature:UserWarning",
    "ignore:The '.*' hook stage will be replaced by OptimizationStepper:FutureWarning",
)


def _trainer(recipe: str, overrides: list[str]) -> Trainer:
    with initialize_config_module("torchrl_unilab.hydra.recipes", version_base="1.3"):
        config = compose(recipe, overrides=overrides)
    return instantiate(config.trainer)


@pytest.fixture(autouse=True)
def _torchrls_nodes_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra copies all nodes that there are, TorchRL's too, each time it composes."""
    monkeypatch.setattr(ConfigStore, "__deepcopy__", lambda store, _: store, raising=False)


@pytest.fixture(autouse=True)
def _logs_lie_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _trained(recipe: str, overrides: list[str]) -> Any:
    trainer = _trainer(recipe, overrides)
    try:
        trainer.train()
    finally:
        trainer.collector.shutdown()
        if isinstance(trainer, OffPolicyTrainer):
            trainer.close()
    return trainer


@pytest.mark.parametrize(("recipe", "overrides", "kind"), RECIPES)
def test_a_recipe_composes_and_trains(recipe, overrides, kind):
    trainer = _trained(recipe, [*overrides, *INLINE])
    assert type(trainer) is kind
    assert trainer.collected_frames == (256 if recipe == "appo" else 64)
    assert trainer.config.algorithm == recipe
    assert trainer.logger.exp_name == "InvertedPendulum-v5"
    assert trainer._optim_count > 0
    assert list(Path("csv_logs").rglob("fps.csv")) != []


def test_the_same_seed_trains_the_same_networks_and_another_one_others():
    first, same, other = (
        torch.cat(
            [p.flatten() for p in _trained("appo", [*APPO, *INLINE, seed]).loss_module.parameters()]
        )
        for seed in ("seed=1", "seed=1", "seed=2")
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_workers_act_with_the_networks_that_are_learnt():
    trainer = _trainer("appo", [*APPO, "collector.num_workers=1"])
    try:
        assert trainer.collector.policy is trainer.loss_module.actor_network
        assert trainer.collector.scheme.pull_at == "step"
        trainer.train()
        assert trainer.collector.scheme.version > 0
    finally:
        trainer.collector.shutdown()


def test_workers_take_over_weights_as_the_settings_say():
    trainer = _trainer("appo", [*APPO, *INLINE, "settings.pull=rollout"])
    trainer.collector.shutdown()
    assert trainer.collector.scheme.pull_at == "rollout"


@pytest.mark.parametrize(("recipe", "settings"), [("sac", OFF_POLICY), ("appo", APPO)])
@pytest.mark.parametrize("node", [True, False])
def test_episodes_are_staggered_where_the_environments_node_or_the_settings_say_so(
    node, recipe, settings
):
    trainer = _trainer(recipe, [*settings, *INLINE, f"env.stagger={node}"])
    env = trainer.collector._team.service.rollouts.env
    trainer.collector.shutdown()
    assert env.stagger == (node or recipe == "appo")


def test_models_differ_as_the_environment_s_node_says():
    kind = "torchrl_unilab.envs.randomization.Randomize"
    heavy = f"{{_target_: {kind}, fields: body_mass, low: 1, high: 2}}"
    trainer = _trainer("sac", [*OFF_POLICY, *INLINE, f"env.randomization=[{heavy}]"])
    env = trainer.collector._team.service.rollouts.env
    masses = env._state.physics.batch.expanded("body_mass")[:, 1].tolist()
    trainer.collector.shutdown()
    trainer.close()
    assert len({*masses}) == 4


def test_a_collector_s_node_overrides_the_settings():
    same = "collector.total_frames=64"  # as the trainer has
    trainer = _trainer("sac", [*OFF_POLICY, *INLINE, "collector.capacity=128", same])
    trainer.collector.shutdown()
    trainer.close()
    assert trainer.storage.max_size == 128


def test_hooks_are_registered():
    hooks = ["+hook@hook=count_frames_log", "trainer.hooks=[${hook}]"]
    trainer = _trainer("appo", [*APPO, *INLINE, *hooks])
    trainer.collector.shutdown()
    assert "count_frames_log" in trainer._modules


@stock
def test_torchrl_s_ppo_trains_with_our_scheme_storage_and_environment():
    trainer = _trained(
        "stock_ppo", [*QUIET, "total_frames=4096", "trainer.num_epochs=1", "loss.entropy_coeff=0.0"]
    )
    assert type(trainer) is PPOTrainer
    assert type(trainer.replay_buffer._storage) is PackedReplayStorage
    scheme = trainer.collector._weight_sync_schemes["policy"]
    assert type(scheme) is UniLabShmScheme
    assert scheme.version >= 2


@stock
def test_torchrl_s_sac_trains_with_our_scheme_storage_and_environment():
    few = [
        "total_frames=512",
        "collector.init_random_frames=256",
        "trainer.optim_steps_per_batch=2",
    ]
    # The one override that the page names for TorchRL's own recipe, which has no schemes.
    page = (Path(__file__).parents[2] / "tutorials/how-to/hydra.md").read_text()
    (scheme,) = re.findall(r"python train\.py \S+ \\\s+'(.*)'", page)
    trainer = _trained("stock_sac", [*QUIET, *few, "collector.weight_sync_schemes=null", scheme])
    assert type(trainer) is SACTrainer
    assert type(trainer.collector._weight_sync_schemes["policy"]) is UniLabShmScheme
    assert type(trainer.replay_buffer._storage) is PackedReplayStorage
    assert 256 <= len(trainer.replay_buffer) <= 512


def test_a_replay_of_stock_nodes_takes_our_samplers_by_name():
    slices = ["sampler@s=packed_slice", "s.slice_len=4", "s.traj_key=episode"]
    priorities = ["sampler@p=packed_prioritized", "p.max_capacity=8", "p.alpha=0.6", "p.beta=0.4"]
    with initialize_config_module("torchrl_unilab.hydra.recipes", version_base="1.3"):
        config = compose(overrides=[f"+{override}" for override in (*slices, *priorities)])
    assert type(instantiate(config.s)) is PackedSliceSampler
    assert type(instantiate(config.p)) is PackedPrioritizedSampler


def test_a_configuration_that_is_not_there_is_refused_without_a_traceback(monkeypatch):
    monkeypatch.setattr("sys.argv", ["hydra", "--config-name", "apo"])
    with pytest.raises(SystemExit, match=r"config 'apo'.* \(expected --config-name of appo, sac"):
        main()


@pytest.mark.parametrize("arguments", [[], ["--config-name", "unilab_trainer"]], ids=str)
def test_without_a_recipe_their_names_are_said(arguments, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["hydra", *arguments])
    with pytest.raises(SystemExit, match="of appo, sac, stock_ppo, stock_sac, td3, or one"):
        main()


@pytest.fixture
def composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra composes all but for its own settings to find its mode, and then all again."""
    monkeypatch.setattr(Hydra, "get_mode", lambda *_, **__: RunMode.RUN)


@pytest.mark.usefixtures("composed_once")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("settings.epoch=3", r"error: settings\.epoch: unknown .* Did you mean epochs\?"),
        ("+settings.epoch=3", r"error: unexpected setting 'epoch' .* Did you mean epochs\?"),
        ("nothing=3", r"error: nothing: unknown .*configuration\)\. Correct the name"),
        ("setting.epochs=3", r"error: setting: unknown .* Did you mean settings\? Correct"),
        ("settings.epochs=0", r"error: epochs: 0 \(expected an integer of at least 1\)"),
        ("settings.hidden=16", r"error: hidden: 16 \(expected a tuple of integers"),
        ("settings.gamma=high", r"error: .*'high'.* Float"),
        ("settings.fused=maybe", r"error: .*'maybe'.* bool"),
        ("seed=-1", r"error: trainer=appo seed: -1 \(expected an integer of at least 0\)"),
        ("collector.seed=1", r"error: collector.seed: 1 \(.*trainer seeds it\)\. Set the trainer"),
        ("env.seed=1", r"error: env.seed: 1 \(expected null"),
        ("settings.epochs=five", r"error: .*settings\.epochs=five: .*'five'.* Integer"),
        ("settings.epochs=${nope}", r"error: Interpolation key 'nope' not found .* Correct the"),
        ("settings.algorithm=ppo", r"error: algorithm: 'ppo' \(expected 'appo', 'sac' or 'td3'\)"),
        ("settings=apo", r"error: .*'settings/apo' \(expected one of appo, sac, td3\)"),
        ("total_frames=1e4", r"error: .*'10000\.0'.* Integer.* Correct the value\.$"),
        ("trainer.checkpoint=x", r"error: checkpoint: 'x' \(expected Checkpoint"),
        ("trainer.hooks=x", r"error: trainer=appo hooks: 'x' \(expected a list of TorchRL's hooks"),
        ("logger=null", r"error: Config group override must be .* NoneType \(expected an option"),
        ("~logger", r"error: logger: \{'exp_name': .*\} \(expected Logger"),
        ("env.device=cuda:99", r"error: MujocoBatchEnv: device is 'cuda:99' \(expected one that"),
        (
            "env.num_envs=3",
            r"error: env.num_envs: 3 with settings.num_envs 4 \(.* Set settings\.num",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(override, message, monkeypatch):
    monkeypatch.setattr("sys.argv", ["hydra", "--config-name", "appo", *APPO, override])
    with pytest.raises(SystemExit, match=message):
        main()


def test_a_setting_may_be_none_in_place_of_the_tasks():
    assert make_settings("appo", "Hopper-v5").final_gamma is not None
    given = make_settings("appo", "Hopper-v5", final_gamma="none", hidden=None)
    assert given.final_gamma is None
    assert given.hidden == make_settings("appo", "Hopper-v5").hidden


@pytest.mark.parametrize("whole_job", [False, True])
def test_an_interrupt_saves_what_was_learnt_and_ends_the_collector(
    whole_job, monkeypatch, tmp_path, capsys
):
    def train(trainer: Trainer) -> None:
        assert live_children()
        for pid in trainer.collector.pids if whole_job else ():
            os.kill(pid, signal.SIGTERM)
            wait_for(lambda pid=pid: not psutil.pid_exists(pid))
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(APPOTrainer, "train", train)
    monkeypatch.chdir(tmp_path)
    saved = f"trainer.save_trainer_file={tmp_path}/new/trained"
    monkeypatch.setattr("sys.argv", ["hydra", "--config-name", "appo", *APPO, saved])
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        main()
    signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 130
    assert "interrupted" in capsys.readouterr().err
    assert Checkpoint.is_checkpoint(tmp_path / "new" / "trained")
    assert not live_children()


@pytest.mark.usefixtures("composed_once")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("total_frames=1", r"error: total_frames: 1 \(expected an integer of at least 16\)"),
        ("collector.replay=x", r"error: replay: 'x' \(expected settings by name"),
        ("collector.total_frames=16", r"error: collector\.total_frames: 16 with total_frames 64"),
        ("settings.noise_std_max=1", r"error: settings\.noise_std_max: unknown \(expected a key"),
    ],
)
def test_what_cannot_work_with_a_replay_is_refused_in_one_line(override, message, monkeypatch):
    monkeypatch.setattr("sys.argv", ["hydra", "--config-name", "sac", *OFF_POLICY, override])
    with pytest.raises(SystemExit, match=message):
        main()


def test_an_argument_of_stock_trainers_that_has_no_meaning_names_what_to_set_instead():
    config = APPOConfig(num_envs=2)
    with pytest.raises(ConfigError, match=r"num_epochs, gae .*Leave out num_epochs \(set epochs"):
        make_appo_trainer(config=config, total_frames=1, num_epochs=3, gae=object())


def test_settings_of_another_algorithm_are_refused():
    with pytest.raises(ConfigError, match=r"config: OffPolicyConfig \(expected APPOConfig"):
        make_appo_trainer(config=OffPolicyConfig(), total_frames=1)


NONE_OF_OURS = ["appo", partial(int), partial(dict, policy=1), Mock(BaseCollector)]


@pytest.mark.parametrize("collector", [*NONE_OF_OURS, partial(make_replay_collector)])
def test_a_collector_other_than_appos_is_refused_with_appo(collector):
    with pytest.raises(ConfigError, match=r"collector: \w+ \(expected collector=appo"):
        make_appo_trainer(config=APPOConfig(), total_frames=1, collector=collector)


@pytest.mark.parametrize("collector", [*NONE_OF_OURS, partial(make_appo_collector)])
def test_a_collector_other_than_a_replays_is_refused_with_sac_and_td3(collector):
    with pytest.raises(ConfigError, match=r"collector: \w+ \(expected collector=replay"):
        make_off_policy_trainer(config=OffPolicyConfig(), total_frames=1, collector=collector)


@pytest.mark.parametrize("create_env", [None, "Hopper-v5"])
def test_what_makes_no_environment_is_refused(create_env):
    with pytest.raises(ConfigError, match=r"create_env_fn: .* \(expected what makes"):
        make_appo_trainer(config=APPOConfig(), total_frames=1, create_env_fn=create_env)


@pytest.mark.parametrize("others", [{}, {"policy": UniLabShmScheme()}])
def test_a_scheme_of_another_model_than_the_policy_is_refused(others):
    schemes = {"value": UniLabShmScheme(), **others}
    collector = partial(make_appo_collector, weight_sync_schemes=schemes)
    make_env = partial(MujocoBatchEnv, "InvertedPendulum-v5")
    with pytest.raises(ConfigError, match=r"weight_sync_schemes: .*expected \{'policy': UniLab"):
        make_appo_trainer(
            config=APPOConfig(), create_env_fn=make_env, collector=collector, total_frames=1
        )


def test_values_that_are_none_leave_a_setting_to_the_task():
    settings = make_settings("appo", "Swimmer-v5", gamma=None, epochs=3, hidden=[8, 4])
    assert (settings.gamma, settings.epochs, settings.hidden) == (0.998, 3, (8, 4))


def test_torchrls_batches_of_environments_are_trained_on():
    config = APPOConfig(num_envs=2, num_steps=8, minibatches=2, hidden=(8,))
    batch = partial(SerialEnv, 2, partial(GymEnv, "Pendulum-v1"))
    trainer = make_appo_trainer(
        config=config, create_env_fn=batch, total_frames=32, progress_bar=False
    )
    trainer.train()
    assert trainer.collected_frames == 32
