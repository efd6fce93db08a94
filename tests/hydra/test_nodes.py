from __future__ import annotations

import dataclasses
import importlib
import inspect
import subprocess
import sys

import pytest
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.utils import get_class
from torchrl.trainers.algorithms.configs.trainers import OnPolicyTrainerConfig, SACTrainerConfig

from torchrl_unilab.collectors import APPOCollector, ReplayCollector
from torchrl_unilab.collectors.arguments import WorkerSettings
from torchrl_unilab.configs import SETTINGS
from torchrl_unilab.data.stock import STORAGE_ARGUMENTS
from torchrl_unilab.hydra.nodes import NODES, TrainerNode

OF_HYDRA = {"_target_", "_partial_", "_convert_"}
COLLECTORS = {"appo": APPOCollector, "replay": ReplayCollector}


def _fields(node: type) -> dict[str, dataclasses.Field]:
    return {field.name: field for field in dataclasses.fields(node) if field.name not in OF_HYDRA}


def _parameters(target: type) -> dict[str, inspect.Parameter]:
    found = inspect.signature(target.__init__).parameters
    return {
        name: parameter
        for name, parameter in found.items()
        if name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }


CLASSES = [name for name, node in NODES.items() if "factories" not in node._target_]


@pytest.mark.parametrize("name", CLASSES, ids="/".join)
def test_a_node_has_the_arguments_of_its_target_with_the_same_defaults(name):
    fields = _fields(NODES[name])
    parameters = _parameters(get_class(NODES[name]._target_))
    of_stock = set(STORAGE_ARGUMENTS) if name == ("storage", "packed_replay") else set()
    assert fields.keys() - of_stock == parameters.keys()
    for key, parameter in parameters.items():
        default = fields[key].default
        if default is dataclasses.MISSING:
            assert fields[key].default_factory()["path"] == str(parameter.default)
        else:
            required = parameter.default is inspect.Parameter.empty
            assert default == ("???" if required else parameter.default), key


def test_the_replay_s_node_has_each_argument_of_stock_storages_that_is_honoured():
    assert set(STORAGE_ARGUMENTS) <= _fields(NODES["storage", "packed_replay"]).keys()


@pytest.mark.parametrize("name", COLLECTORS)
def test_a_collector_s_node_has_its_arguments_and_torchrl_s_name_for_workers(name):
    arguments = {*_parameters(COLLECTORS[name]), *WorkerSettings.__annotations__}
    expected = arguments - {"num_collectors"} | {"num_workers"}
    assert _fields(NODES["collector", name]).keys() == expected


@pytest.mark.parametrize(
    ("name", "stock"), [("appo", OnPolicyTrainerConfig), ("off_policy", SACTrainerConfig)]
)
def test_a_trainer_s_node_has_each_field_that_stock_yaml_may_set(name, stock):
    ours = _fields(NODES["trainer", name]).keys()
    assert _fields(stock).keys() <= ours
    assert ours - _fields(SACTrainerConfig).keys() - _fields(OnPolicyTrainerConfig).keys() == {
        "config"
    }


def test_a_trainer_s_node_has_the_defaults_of_the_stock_one():
    stock = {name: field.default for name, field in _fields(SACTrainerConfig).items()}
    ours = {field.name: field.default for field in dataclasses.fields(TrainerNode)}
    own = {"config", "total_frames", "collector", "logger", "save_trainer_file", "seed"}
    assert own < ours.keys()
    assert {name: ours[name] for name in ours.keys() - own} == {
        name: stock[name] for name in ours.keys() - own
    }


def test_configurations_of_the_user_come_before_our_recipes():
    name = "torchrl_unilab.hydra.plugins.hydra_plugins.torchrl_unilab"
    path = ConfigSearchPathImpl()
    path.append("user", "pkg://mine")
    importlib.import_module(name).RecipesPlugin().manipulate_search_path(path)
    assert [entry.provider for entry in path.get_path()] == ["user", "torchrl-unilab"]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_node_of_settings_has_each_that_its_algorithm_uses_and_leaves_all_to_the_task(name):
    fields = _fields(NODES["settings", name])
    known = dataclasses.fields(SETTINGS[name].for_task(""))
    settings = {field.name for field in known if field.metadata["of"] in (None, name)}
    assert fields.keys() - {"task", "algorithm"} == settings - {"algorithm"}
    assert {fields[key].default for key in settings - {"algorithm"}} == {None}


def test_hydra_finds_nodes_and_recipes_without_an_import_and_without_torch():
    asked = (
        "import sys\n"
        "from hydra import compose, initialize\n"
        "from hydra.core.global_hydra import GlobalHydra\n"
        "with initialize(version_base='1.3'):\n"
        "    config = compose(overrides=['+env@env=mujoco_batch', 'env.task=Hopper-v5'])\n"
        "    loader = GlobalHydra.instance().config_loader()\n"
        "    recipes = loader.get_group_options('')\n"
        "assert config.env.num_envs == 64\n"
        "assert {'appo', 'sac', 'td3', 'stock_ppo', 'stock_sac'} <= set(recipes), recipes\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
