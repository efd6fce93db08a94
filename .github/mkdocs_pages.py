"""Pages of the site that are made from code and records, so that they cannot fall behind."""

from __future__ import annotations

import dataclasses
import json
import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import torchrl_unilab
from torchrl_unilab.configs import SETTINGS, RunConfig
from torchrl_unilab.configs.settings import Settings

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tests" / "benchmarks" / "results"
CSS = ".md-typeset td code { white-space: nowrap; word-break: normal; }"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not written by hand."""
    pages = {
        "index.md": _of_the_site((ROOT / "README.md").read_text()),
        "learning.md": (RESULTS / "README.md").read_text().replace("(TRIED.md)", "(tried.md)"),
        "tried.md": (RESULTS / "TRIED.md").read_text(),
        "shm.md": (ROOT / "torchrl_unilab" / "shm" / "README.md").read_text(),
        "compatibility.md": _compatibility(),
        "reference/settings.md": "\n".join(_settings()),
        "extra.css": CSS,
    }
    for package in pkgutil.iter_modules(torchrl_unilab.__path__):
        if package.name == "errors" or (package.ispkg and package.name != "hydra"):
            module = import_module(f"torchrl_unilab.{package.name}")
            pages[f"reference/{package.name}.md"] = "\n".join(_api(module))
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    picture = "learning.png"
    files.append(File.generated(config, picture, abs_src_path=str(RESULTS / picture)))
    return files


def _of_the_site(readme: str) -> str:
    """The README, with its links to files of the repository as links to pages."""
    pages = {
        "tests/benchmarks/results/README.md": "learning.md",
        "torchrl_unilab/shm/README.md": "shm.md",
    }
    for path, page in pages.items():
        readme = readme.replace(f"]({path})", f"]({page})")
    readme = re.sub(r"\[[^]]+\]\((\.github/\w+\.md)\)", r"`\1`", readme)
    return readme.replace("](tutorials/", "](")


def _settings() -> Iterator[str]:
    yield "# Settings\n\nFlags of the command line have hyphens in place of underscores. A task"
    yield "may have other defaults: `torchrl-unilab train appo --env TASK --help` shows them."
    yield from _table("Every run", RunConfig, {})
    for name, algorithm in SETTINGS.items():
        defaults = algorithm.for_task("")
        yield from _table(f"{name}: {algorithm.title}", type(defaults), vars(defaults))
        yield f"\nTasks with settings of their own: {', '.join(sorted(algorithm.tasks)) or 'none'}."


def _table(title: str, kind: type[Settings], defaults: dict[str, object]) -> Iterator[str]:
    yield f"\n## {title}\n\n| setting | default | what | range |\n|---|---|---|---|"
    kinds = kind.kinds()
    for field in dataclasses.fields(kind):
        if field.name != "algorithm":
            default = defaults.get(field.name, field.default)
            shown = "" if default is dataclasses.MISSING else f"`{default}`"
            meaning = field.metadata["help"]
            yield f"| `{field.name}` | {shown} | {meaning} | {kinds[field.name]} |"


def _api(module: ModuleType) -> Iterator[str]:
    summary = str(module.__doc__).partition("\n")[0]
    yield f"# {module.__name__}\n\n{summary}\n"
    for name in module.__all__:
        yield f"::: {module.__name__}.{name}\n"


def _compatibility() -> str:
    lines = [COMPATIBILITY]
    record = json.loads((ROOT / "tests" / "compatibility" / "results.json").read_text())
    for title, rows in record.items():
        lines.append(f"\n## {title}\n\n| part of TorchRL | with ours |\n|---|---|")
        lines += [f"| `{name}` | {outcome} |" for name, outcome in rows.items()]
    return "\n".join(lines)


COMPATIBILITY = """# What works with TorchRL

Every sampler, writer, checkpointer and transform of TorchRL, over the stock part and over ours with
one seed: samplers, writers, buffers, checkpointers and transforms of samples over
`PackedReplayStorage` beside `LazyTensorStorage`, transforms of steps around `MujocoBatchEnv` beside
`GymEnv`, on Hopper-v5. *Same* means the same values. `tests/compatibility/` runs all of it and
compares it with these tables, and fails when TorchRL has a part that is not in them.

Two groups have tests of their own. `UniLabShmScheme` under `Collector`, `MultiSyncCollector`,
`MultiAsyncCollector` and `AsyncCollector`, beside the stock schemes:
`tests/weight_update/test_contract.py`, where tests named `unlike_stock` are the differences.
`PPOTrainer`, `SACTrainer` and `TD3Trainer` with our scheme and hooks:
`tests/trainers/test_stock_trainers.py`; with our replay and environment, too: `tests/hydra/`.

## Versions

`make test-matrix` runs all tests under each set; Python 3.11 on Linux, 2026-11-30. TorchRL 0.14.1
takes no tensordict 0.15. Under the newest PyTorch its C++ extension loads, and prioritised samplers
work.

| set | torch | torchrl | tensordict | mujoco | gymnasium | numpy | tests |
|---|---|---|---|---|---|---|---|
| pinned | 2.13.0 | 0.14.1 | 0.14.3 | 4.0.0 | 1.4.0 | 2.4.6 | 5,937 pass |
| oldest | 2.8.0 | 0.14.1 | 0.14.3 | 4.0.0 | 1.1.1 | 2.0.2 | 5,934 pass |
| newest | 2.14.1 | 0.14.1 | 0.14.3 | 4.0.0 | 1.4.0 | 2.4.6 | 5,933 pass |
"""
