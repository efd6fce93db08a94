from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import pytest

import torchrl_unilab


def _public_names() -> dict[str, object]:
    """Classes and functions that a package exports, by their shortest path."""
    found: dict[object, str] = {}
    for module in pkgutil.walk_packages(torchrl_unilab.__path__, "torchrl_unilab."):
        if module.ispkg:
            package = importlib.import_module(module.name)
            for name in getattr(package, "__all__", []):
                value = getattr(package, name)
                if inspect.isclass(value) or inspect.isfunction(value):
                    found.setdefault(value, f"{module.name}.{name}")
    return {name: value for value, name in found.items()}


PUBLIC = _public_names()


def test_there_are_at_most_70_public_names():
    assert 50 < len(PUBLIC) <= 70


@pytest.mark.parametrize("name", PUBLIC)
def test_each_public_name_has_an_example_that_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (test,) = doctest.DocTestFinder(recurse=False).find(PUBLIC[name], name, globs={})
    assert test.examples
    assert not any(example.options.get(doctest.SKIP) for example in test.examples)
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test)
    assert result.failed == 0
