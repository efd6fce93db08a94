from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Unpack, get_args, get_origin, get_type_hints

import pytest

import torchrl_unilab
from torchrl_unilab.collectors import APPOCollector, ReplayCollector
from torchrl_unilab.collectors.arguments import STOCK_ARGUMENTS, ReplaySettings, RolloutSettings

PACKAGES = [
    module.name
    for module in pkgutil.walk_packages(torchrl_unilab.__path__, "torchrl_unilab.")
    if module.ispkg
]


@pytest.mark.parametrize("package", PACKAGES)
def test_all_is_exactly_what_a_package_exports(package):
    module = importlib.import_module(package)
    declared = getattr(module, "__all__", [])
    found = vars(module) | {name: getattr(module, name) for name in declared}  # or when asked for
    exported = [
        name
        for name, value in found.items()
        if not name.startswith("_") and not inspect.ismodule(value)
    ]
    assert sorted(declared) == sorted(exported)
    assert {*declared} <= {*dir(module)}


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_and_what_it_exports_is_documented(package):
    module = importlib.import_module(package)
    documented = [getattr(module, name) for name in getattr(module, "__all__", [])]
    assert module.__doc__
    assert [value for value in documented if callable(value) and not value.__doc__] == []


@pytest.mark.parametrize("package", ["torchrl_unilab", *PACKAGES])
def test_type_checkers_see_the_types_of_names_that_are_imported_when_asked_for(package):
    module = importlib.import_module(package)
    tree = ast.parse(inspect.getsource(module))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {*getattr(module, "__all__", [])} <= {a.name for node in imports for a in node.names}


def test_no_decorator_of_torchrl_hides_the_type_of_a_public_class():
    # TorchRL's are typed as if they returned the base class.
    trees = [
        ast.parse(path.read_text()) for path in Path(torchrl_unilab.__file__).parent.rglob("*.py")
    ]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    decorators = {ast.unparse(found) for node in classes for found in node.decorator_list}
    assert {name.split("(")[0] for name in decorators} == {"dataclass", "runtime_checkable"}


def test_importing_the_package_starts_and_prints_nothing():
    code = (
        "import threading, os, torchrl_unilab, torchrl_unilab.shm\n"
        "assert threading.active_count() == 1\n"
        "import sys; assert 'torchrl' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""


@pytest.mark.parametrize("name", torchrl_unilab.__all__)
def test_the_root_gives_the_names_of_daily_use(name):
    value = getattr(torchrl_unilab, name)
    assert value.__name__ == name


def test_the_root_lists_its_names():
    assert set(torchrl_unilab.__all__) <= set(dir(torchrl_unilab))


def test_a_name_that_the_root_has_not_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'train_ppo'"):
        _ = torchrl_unilab.train_ppo


@pytest.mark.parametrize(
    ("collector", "settings"), [(APPOCollector, RolloutSettings), (ReplayCollector, ReplaySettings)]
)
def test_type_checkers_accept_what_is_accepted_of_stock_arguments(collector, settings):
    own = get_type_hints(collector.__init__)
    hints = get_type_hints(settings)
    assert own["workers"] == Unpack[settings]
    assert own.keys() & hints.keys() == set()  # else type checkers refuse the call
    for name in STOCK_ARGUMENTS.keys() - own.keys():
        kinds = get_args(hints[name]) or (hints[name],)
        for value in STOCK_ARGUMENTS[name][0]:
            assert isinstance(value, tuple(get_origin(kind) or kind for kind in kinds)), name
