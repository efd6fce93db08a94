"""Settings as dataclass fields: each is one line with type, default and help text.

The type says which values a setting takes: `Count` is an integer of at least 1. `Settings` has
pydantic check every field on construction, so an instance holds values that can work. The command
line, Hydra's nodes and the site's reference read the same fields.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, Strict, TypeAdapter, ValidationError

from torchrl_unilab.errors import ConfigError

REQUIRED: Any = dataclasses.MISSING
"""The default of a setting that has none."""

LoggerName = Literal["csv", "tensorboard", "wandb", "mlflow", "trackio"]


def _logger_names(value: str) -> str:
    """Refuse anything but names of loggers, each at most once."""
    given = value.split(",")
    if len(set(given)) < len(given) or not set(given) <= set(typing.get_args(LoggerName)):
        raise ValueError(value)
    return value


# The description of a type says in words which values it takes.
Count = Annotated[int, Field(ge=1, description="an integer of at least 1")]
Natural = Annotated[int, Field(ge=0, description="an integer of at least 0")]
Threads = Annotated[int, Field(ge=1, le=1024, description="an integer within [1, 1024]")]
Positive = Annotated[float, Field(gt=0, description="a finite number above 0")]
NonNegative = Annotated[float, Field(ge=0, description="a finite number of at least 0")]
Fraction = Annotated[float, Field(ge=0, le=1, description="a finite number within [0, 1]")]
Text = Annotated[str, Field(min_length=1, description="a text")]
Widths = Annotated[
    tuple[Count, ...], Strict(False), Field(description="a tuple of integers of at least 1")
]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N")]
LoggerNames = Annotated[
    str,
    AfterValidator(_logger_names),
    Field(description=f"some of {', '.join(typing.get_args(LoggerName))}, with commas between"),
]

_PLAIN = {bool: "True or False", int: "an integer", float: "a finite number"}


_SHOWN = 100
"""Characters of a refused value that are shown."""
_OMIT = "Leave it out for the default."


class Kind:
    """The values that a setting takes, by its type.

    Args:
        hint: The type: one of the above, bool, int, float, a `Literal`; or one of them or None.

    Examples:
        >>> print(Kind(Count | None))
        None or an integer of at least 1
        >>> Kind(Count).check("epochs", 0)
        Traceback (most recent call last):
        ...
        torchrl_unilab.errors.ConfigError: epochs: 0 (expected an integer of at least 1). ...
    """

    def __init__(self, hint: Any) -> None:
        self.hint = hint

    def __str__(self) -> str:
        """Return them in words: "an integer of at least 1"."""
        parts = typing.get_args(self.hint)
        if typing.get_origin(self.hint) in (types.UnionType, typing.Union):
            return f"None or {Kind(parts[0])}"
        if typing.get_origin(self.hint) is Literal:
            return " or ".join(map(repr, parts))
        return _PLAIN[self.hint] if self.hint in _PLAIN else str(parts[-1].description)

    @functools.cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        # Strict: True is no integer, and "1" no number.
        return TypeAdapter(self.hint, config=ConfigDict(strict=True, allow_inf_nan=False))

    def check(self, name: str, value: Any, remedy: str = _OMIT) -> Any:
        """Return a value of this kind; a number of NumPy's as Python's.

        Raises:
            ConfigError: Names the setting, the value, and what is expected.
        """
        try:
            return self._adapter.validate_python(_as_python(value))
        except ValidationError:
            given = repr(value)
            given = given if len(given) <= _SHOWN else f"{given[:_SHOWN]}..."
            raise ConfigError(f"{name}: {given} (expected {self}). {remedy}") from None


def _as_python(value: Any) -> Any:
    """Return a number, or a list or tuple of them, as Python's, if it is of another library."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_as_python, value))
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def setting(default: Any, description: str, *, of: str | None = None) -> Any:
    """Return a dataclass field that carries its description.

    Args:
        default: Its default, or `REQUIRED`.
        description: What it means, with its unit.
        of: The algorithm that uses it, if only one of the class's algorithms does.
    """
    return dataclasses.field(default=default, metadata={"help": description, "of": of})


@dataclass(frozen=True)
class Settings:
    """Base of settings classes: every field comes from `setting` and is checked.

    Raises:
        ConfigError: A value is not of its field's type.

    Examples:
        >>> @dataclass(frozen=True)
        ... class Example(Settings):
        ...     epochs: Count = setting(5, "passes over the data")
        >>> Example(epochs=0)
        Traceback (most recent call last):
        ...
        torchrl_unilab.errors.ConfigError: epochs: 0 (expected an integer of at least 1). ...
    """

    def __post_init__(self) -> None:
        kinds = self.kinds()
        for field in dataclasses.fields(self):
            required = field.default is REQUIRED  # a task may have another default than the class
            remedy = f"Set the {field.metadata['help']}." if required else _OMIT
            value = kinds[field.name].check(field.name, getattr(self, field.name), remedy)
            object.__setattr__(self, field.name, value)

    def check_exclusive(self, name: str, other: str, reason: str) -> None:
        """Refuse two settings that are both on; a ConfigError."""
        if getattr(self, name) and getattr(self, other):
            raise ConfigError(
                f"{name}: {getattr(self, name)} with {other} (expected one of them: {reason}). "
                "Leave one out."
            )

    def replace(self, **changes: Any) -> Self:
        """Return these settings with some changed.

        Raises:
            TypeError: There is no such setting; names the nearest.
        """
        for name in changes:
            if name not in self.kinds():
                raise TypeError(
                    f"unexpected setting {name!r} (expected a field of {type(self).__name__})."
                    f"{nearest(name, self.kinds())} Correct the name."
                )
        return dataclasses.replace(self, **changes)

    @classmethod
    @functools.cache
    def kinds(cls) -> Mapping[str, Kind]:
        """Return the values that each setting takes."""
        hints = typing.get_type_hints(cls, include_extras=True)
        return {field.name: Kind(hints[field.name]) for field in dataclasses.fields(cls)}


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(Settings):
    """Settings that every algorithm has."""

    device: Device = setting("cpu", "device that learns")
    collector_device: Device = setting(
        "cpu", "device on which collectors act; physics is on the CPU"
    )
    num_envs: Count = setting(16, "environments per collector")
    num_collectors: Count = setting(1, "collector processes")
    physics_threads: Threads | None = setting(
        None, "physics threads per collector; None shares the cores"
    )
    restart_workers: Natural = setting(
        0, "lost collectors to replace before the loss of one ends the run"
    )
    observation: Text = setting("observation", "key that the actor reads")
    critic_observation: Text = setting(
        "observation", "key that critics read; may hold data that the actor cannot observe"
    )
    gamma: Fraction = setting(0.99, "discount per step")


def nearest(name: str, known: Collection[str]) -> str:
    """Return "Did you mean ...?" with known names that begin with `name`, or the most similar one.

    Empty if no name is similar.

    Examples:
        >>> nearest("epoch", ["epochs", "lr"])
        ' Did you mean epochs?'
        >>> nearest("lr", ["logger", "lr_actor", "lr_critic"])
        ' Did you mean lr_actor or lr_critic?'
    """
    names = [each for each in known if each.startswith(name)][:3]
    names = names or difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {' or '.join(names)}?" if names else ""
