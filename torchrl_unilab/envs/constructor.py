"""How environments are constructed: as TorchRL does it, without what would break ours."""

from __future__ import annotations

from typing import Any, TypeVar

from torchrl.envs.common import _EnvPostInit

from torchrl_unilab.errors import ConfigError

Env = TypeVar("Env")


class Constructor(_EnvPostInit):
    """The metaclass of environments that reset by no setting, and keep their arguments."""

    def __call__(self: type[Env], *args: Any, auto_reset: bool = False, **kwargs: Any) -> Env:
        """Construct an environment; by the hints, editors see its class and arguments.

        Raises:
            ConfigError: It is to reset itself, which TorchRL would take as done.
        """
        if auto_reset:
            raise ConfigError(
                f"{self.__name__}: auto_reset is {auto_reset} (expected False: a step returns the "
                "true next observation). Leave it out; step_and_maybe_reset starts episodes."
            )
        env: Any = _EnvPostInit.__call__(self, *args, **kwargs)
        env._arguments = args, kwargs  # from which a copy is built, of a derived class, too
        made: Env = env
        return made
