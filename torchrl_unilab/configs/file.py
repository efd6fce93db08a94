"""``config.yaml``: algorithm, task, frames and all settings of a run, which repeat it.

Each run directory has one. ``torchrl-unilab train ALGORITHM --config FILE`` reads it, and so do
`resume_run` and the commands ``eval`` and ``play``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from torchrl_unilab.errors import ConfigError

StrPath = str | os.PathLike[str]
"""Where a file or a directory is."""
CONFIG_FILE = "config.yaml"
_KINDS = {"algo": str, "env": str, "frames": int, "seed": int}
"""What is checked before the settings are made."""


class _Loader(yaml.SafeLoader):
    """Takes 1e-3 for a number, too, as YAML 1.2 does, and 1e6 for an integer, as flags do.

    A name that comes twice is refused, as YAML has it.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return settings by name."""
        names = [key.value for key, _ in node.value]
        if twice := [name for name in names if names.count(name) > 1]:
            raise yaml.YAMLError(f"{twice[0]!r} is there twice")
        return super().construct_mapping(node, deep)

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        """Return a number, an integer where there is no point."""
        value: float = super().construct_yaml_float(node)
        return value if "." in node.value or not value.is_integer() else int(value)


_FLOAT = "tag:yaml.org,2002:float"
_Loader.add_constructor(_FLOAT, _Loader.construct_yaml_float)
_Loader.add_implicit_resolver(
    _FLOAT, re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), [*"-+0123456789"]
)


def as_yaml(values: Mapping[str, Any]) -> str:
    """Return settings as the text of a ``config.yaml``.

    Examples:
        >>> print(as_yaml({"algo": "appo", "hidden": (64, 64)}), end="")
        algo: appo
        hidden: [64, 64]
    """
    plain = json.loads(json.dumps(values))  # lists for tuples
    return yaml.safe_dump(plain, sort_keys=False, default_flow_style=None)


def read_config(path: Path) -> dict[str, Any]:
    """Return the settings of a ``config.yaml``, whose widths are tuples again.

    Raises:
        ConfigError: The file cannot be read, or has no settings by name.
    """
    try:
        values = yaml.load(path.read_text(), _Loader)
    except OSError as error:
        reason = error.strerror or str(error)
    except (ValueError, yaml.YAMLError, AttributeError, RecursionError) as error:  # its content
        reason = " ".join(str(error).split())
    else:
        reason = f"it holds {type(values).__name__}"
        if isinstance(values, dict):
            other = [k for k, t in _KINDS.items() if not isinstance(values.get(k, t()), t)]
            if not other:
                return {str(k): tuple(v) if isinstance(v, list) else v for k, v in values.items()}
            raise ConfigError(
                f"{path}: {other[0]} is {values[other[0]]!r} (expected "
                f"{_KINDS[other[0]].__name__}). Correct that line of the file."
            )
    raise ConfigError(
        f"{path}: cannot be read, {reason} (expected the settings of a run by name). Correct the "
        "path, or restore the file."
    )


def file_settings_of(run_dir: Path) -> dict[str, Any]:
    """Return what a run's file says; nothing without one: its checkpoint has what is needed.

    Raises:
        ConfigError: As `read_config`.
    """
    file = run_dir / CONFIG_FILE
    return read_config(file) if file.is_file() else {}
