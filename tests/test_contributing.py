from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONTRIBUTING = (ROOT / ".github" / "CONTRIBUTING.md").read_text()
ARCHITECTURE = (ROOT / "tutorials" / "architecture.md").read_text()


def test_each_path_in_the_map_exists():
    paths = re.findall(r"`((?:torchrl_unilab|tests)/[\w./]+)`", CONTRIBUTING + ARCHITECTURE)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_each_make_target_in_it_exists():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?:^|`)make ([a-z-]+)", CONTRIBUTING, re.MULTILINE))
    assert {
        name for name in targets if not re.search(rf"^{name}:", makefile, re.MULTILINE)
    } == set()


def test_the_glossary_has_at_most_40_terms_each_once_in_order():
    rows = ARCHITECTURE.partition("## Glossary")[2]
    terms = re.findall(r"^\| ([^|]+) \|", rows, re.MULTILINE)[1:]
    assert len(terms) <= 40
    assert terms == sorted(set(terms), key=str.lower)


def test_each_package_stands_in_the_table_of_layers():
    packages = {path.parent.name for path in (ROOT / "torchrl_unilab").glob("*/__init__.py")}
    assert packages == set(re.findall(r"`torchrl_unilab/(\w+)`", ARCHITECTURE))


def test_each_name_in_the_picture_of_the_layers_is_a_module():
    picture = ARCHITECTURE.partition("```text")[2].partition("```")[0]
    names = re.findall(r"\w+", picture)
    package = ROOT / "torchrl_unilab"
    assert {"cli", "shm", "checks"} <= {*names}
    assert [n for n in names if not {package / n, package / f"{n}.py"} & {*package.iterdir()}] == []
