from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import torchrl_unilab
from torchrl_unilab import errors

LINE = re.compile(r"^([│├└─ ]*)(\w+Error)(?: +\((\w+)\))?", re.MULTILINE)


def _walk(error: type[errors.UniLabError], depth: int = 0) -> Iterator[tuple[str, int, str]]:
    """Each class below `error`, with its depth and the builtin that it derives from."""
    builtin = [base.__name__ for base in error.__bases__ if base.__module__ == "builtins"]
    yield error.__name__, depth, "".join(builtin) if depth else ""
    for child in error.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _walk(child, depth + 1)


def test_the_docstring_shows_the_class_hierarchy():
    assert errors.__doc__ is not None
    shown = [
        (name, len(indent) // 4, builtin) for indent, name, builtin in LINE.findall(errors.__doc__)
    ]
    assert sorted(shown) == sorted(_walk(errors.UniLabError))


def test_all_names_each_error():
    classes = [name for name, value in vars(errors).items() if inspect.isclass(value)]
    assert errors.__all__ == sorted(classes)


def test_the_package_raises_no_bare_value_or_runtime_error():
    package = Path(torchrl_unilab.__file__).parent
    bare = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if re.search(r"raise (Value|Runtime)Error\(", path.read_text())
    ]
    assert bare == ["configs/settings.py"]  # a validator, whose errors pydantic collects


def _words(message: ast.expr) -> set[str]:
    """The words of a message's literal text, and the names that it is made of."""
    nodes = [*ast.walk(message)]
    text = " ".join(str(node.value) for node in nodes if isinstance(node, ast.Constant))
    return {*text.replace("(", " ").split()} | {n.id for n in nodes if isinstance(n, ast.Name)}


def test_each_message_says_what_was_expected():
    package = Path(torchrl_unilab.__file__).parent
    trees = {path: ast.parse(path.read_text()) for path in package.rglob("*.py")}
    constants = {
        node.targets[0].id: _words(node.value)
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    elsewhere = {"_expected", "_no_room", "_over_limit", "refusal", "str", "unfit"}
    silent = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id in {*errors.__all__, "NotImplementedError"} and node.args:
                words = _words(node.args[0])
                words = words.union(*(constants.get(word, ()) for word in words))
                if not words & {"expected", *elsewhere}:
                    silent.append(f"{path.relative_to(package)}:{node.lineno}")
    assert not silent


def test_what_was_being_handled_when_an_error_came_is_a_cause_and_the_error_itself_is_none():
    late = OSError("late")
    late.__context__ = KeyError("early")
    assert errors.has_cause(late, KeyError)
    assert not errors.has_cause(late, OSError)
