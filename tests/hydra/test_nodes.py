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
from torchrl_unilab.data.stock import STORAGE_ARGUMENTS, check_stock_arguments
from torchrl_unilab.hydra.nodes import NODES, TAKEN, NodeSource

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


CLASSES = [name for name, node in NODES.items() if "factories" not in node()._target_]


@pytest.mark.parametrize("name", CLASSES)
def test_a_node_has_the_arguments_of_its_target_with_the_same_defaults(name):
    fields = _fields(NODES[name]())
    parameters = _parameters(get_class(NODES[name]()._target_))
    of_stock = set(STORAGE_ARGUMENTS) if name == "storage/packed_replay" else set()
    assert fields.keys() - of_stock == parameters.keys()
    for key, parameter in parameters.items():
        default = fields[key].default
        if default is dataclasses.MISSING:
            assert fields[key].default_factory()["path"] == str(parameter.default)
        else:
            required = parameter.default is inspect.Parameter.empty
            assert default == ("???" if required else parameter.default), key


def test_the_replay_s_node_has_each_argument_of_stock_storages_that_is_honoured():
    node = NODES["storage/packed_replay"]()
    assert set(STORAGE_ARGUMENTS) <= _fields(node).keys()
    values = {name: getattr(node, name) for name in STORAGE_ARGUMENTS}
    check_stock_arguments("PackedReplayStorage", values, STORAGE_ARGUMENTS)


@pytest.mark.parametrize("name", COLLECTORS)
def test_a_collector_s_node_has_its_arguments_and_torchrl_s_name_for_workers(name):
    arguments = {*_parameters(COLLECTORS[name]), *WorkerSettings.__annotations__}
    expected = arguments - {"num_collectors"} | {"num_workers"}
    fields = _fields(NODES[f"collector/{name}"]())
    assert fields.keys() == expected
    assert {field.default for field in fields.values()} == {None}


@pytest.mark.parametrize(
    ("name", "stock"), [("appo", OnPolicyTrainerConfig), ("off_policy", SACTrainerConfig)]
)
def test_a_trainer_s_node_has_each_field_that_stock_yaml_may_set(name, stock):
    ours = _fields(NODES[f"trainer/{name}"]()).keys()
    assert _fields(stock).keys() <= ours
    assert ours - _fields(SACTrainerConfig).keys() - _fields(OnPolicyTrainerConfig).keys() == {
        "config"
    }


def test_a_trainer_s_node_has_the_defaults_of_the_stock_one_where_ours_take_the_argument():
    stock = {name: field.default for name, field in _fields(SACTrainerConfig).items()}
    ours = {name: field.default for name, field in _fields(NODES["trainer/off_policy"]()).items()}
    own = {"config", "total_frames", "collector", "logger", "save_trainer_file", "seed"}
    assert own - {"config"} < TAKEN
    assert {name: ours[name] for name in TAKEN - own} == {name: stock[name] for name in TAKEN - own}
    assert {ours[name] for name in ours.keys() - TAKEN - own} == {None}
    assert [ours[name] for name in sorted(own)] == [None, "???", None, None, 0, "???"]


def test_configurations_of_the_user_come_before_our_recipes():
    name = "hydra_plugins.torchrl_unilab"  # as installed
    path = ConfigSearchPathImpl()
    path.append("user", "pkg://mine")
    importlib.import_module(name).RecipesPlugin().manipulate_search_path(path)
    assert [entry.provider for entry in path.get_path()] == ["user", *["torchrl-unilab"] * 2]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_node_of_settings_has_each_that_its_algorithm_uses_and_leaves_all_to_the_task(name):
    fields = _fields(NODES[f"settings/{name}"]())
    known = dataclasses.fields(SETTINGS[name].for_task(""))
    settings = {field.name for field in known if field.metadata["of"] in (None, name)}
    assert fields.keys() - {"task", "algorithm"} == settings - {"algorithm"}
    assert {fields[key].default for key in settings - {"algorithm"}} == {None}


def test_hydra_finds_nodes_and_recipes_without_an_import_and_lists_them_without_torch():
    asked = (
        "import sys\n"
        "from hydra import compose, initialize\n"
        "from hydra.core.global_hydra import GlobalHydra\n"
        "with initialize(version_base='1.3'):\n"
        "    loader = GlobalHydra.instance().config_loader()\n"
        "    recipes, groups = (loader.get_group_options('', kind) for kind in KINDS)\n"
        "    assert loader.get_group_options('sampler') == SAMPLERS\n"
        "    assert 'torch' not in sys.modules\n"
        "    config = compose(overrides=['+env@env=mujoco_batch', 'env.task=Hopper-v5'])\n"
        "assert config.env.num_envs == 64\n"
        "assert {'appo', 'sac', 'td3', 'stock_ppo', 'stock_sac'} <= set(recipes), recipes\n"
        "assert {'env', 'settings', 'trainer'} <= set(groups), groups\n"
    )
    known = (
        "from hydra.core.object_type import ObjectType\n"
        "KINDS = ObjectType.CONFIG, ObjectType.GROUP\n"
        "SAMPLERS = ['packed_prioritized', 'packed_slice', 'rollout_ring']\n"
    )
    done = subprocess.run([sys.executable, "-c", known + asked], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("path", "found"), [("env", True), ("en", False), ("environment", False)])
def test_a_group_is_known_by_its_whole_name(path, found):
    source = NodeSource("torchrl-unilab", "torchrl-unilab://")
    assert source.is_group(path) is found
    assert source.list(path, None) == (["mujoco_batch"] if found else [])
