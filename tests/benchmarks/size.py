"""Sizes of the source: code lines, modules, public names, import circles.

A code line holds at least one token that is neither a comment nor a docstring; blank lines do not
count. Run it as ``python -m tests.benchmarks.size [DIRECTORY]``, where the directory holds the
package and its tests, as the root of a checkout does.
"""

from __future__ import annotations

import argparse
import ast
import tokenize
from collections import Counter
from pathlib import Path

import networkx  # which torch depends on

PACKAGE = "torchrl_unilab"
NO_CODE = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER"}


def code_lines(path: Path) -> int:
    """Return how many lines of a file hold code."""
    with tokenize.open(path) as file:
        source = file.read()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(iter(source.splitlines(True)).__next__):
        if tokenize.tok_name[token.type] not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - _docstring_lines(ast.parse(source)))


def _docstring_lines(tree: ast.Module) -> set[int]:
    """Lines of docstrings, of attributes too: bare strings are no code."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def modules(root: Path) -> dict[str, Path]:
    """Return the modules of the package by their dotted names."""
    names = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def public_names(root: Path) -> set[str]:
    """Return what the package and its sub-packages list in `__all__`."""
    found = set()
    for path in sorted((root / PACKAGE).rglob("__init__.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and "__all__" in map(ast.unparse, node.targets):
                found.update(ast.literal_eval(node.value))
    return found


def imports(tree: ast.Module, known: dict[str, Path]) -> set[str]:
    """Return the modules of the package that a module names in any import, deferred ones too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update({name if name in known else node.module for name in names})
    return found & known.keys()


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected groups of two or more modules."""
    groups = networkx.strongly_connected_components(networkx.DiGraph(graph))
    return sorted(sorted(group) for group in groups if len(group) > 1)


def main() -> None:
    """Print the sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[2])
    parser.add_argument("--rooms", action="store_true", help="code lines of each sub-package")
    options = parser.parse_args()
    root = options.root
    known = modules(root)
    sizes = {name: code_lines(path) for name, path in known.items()}
    tests = sum(code_lines(path) for path in (root / "tests").rglob("*.py"))
    raw_tests = sum(len(path.read_text().splitlines()) for path in (root / "tests").rglob("*.py"))
    graph = {
        name: imports(ast.parse(path.read_text()), known) - {name} for name, path in known.items()
    }
    largest = sorted(known.values(), key=lambda path: len(path.read_text().splitlines()))[-5:]
    print(f"code lines of the package   {sum(sizes.values()):,}")
    print(f"modules                     {len(known)}")
    print(f"code lines of the tests     {tests:,} ({raw_tests:,} lines in all)")
    print(f"public names                {len(public_names(root))}")
    print(f"import circles              {len(circles(graph))}")
    for group in circles(graph):
        print("    " + " ".join(group))
    print("largest modules, lines in all (code)")
    for path in reversed(largest):
        lines = len(path.read_text().splitlines())
        print(f"    {lines:5} ({code_lines(path)}) {path.relative_to(root)}")
    if options.rooms:
        rooms: Counter[str] = Counter()
        for name, size in sizes.items():
            rooms[".".join(name.split(".")[:2])] += size
        for room, size in sorted(rooms.items()):
            print(f"{size:8,} {room}")


if __name__ == "__main__":
    main()
