"""Makes a TorchRL collector pull published weights in the thread that acts.

TorchRL creates the collector of a worker itself, so the behaviour is added to the object
after the fact: its class becomes a subclass of its own class. Hooks the user sets on the
collector are not used for it, so setting or replacing them never disconnects the pull.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

from tensordict import TensorDictBase
from torchrl.collectors import Collector

__all__ = ["Puller", "pull_in_rollouts"]


class Puller(Protocol):
    """What applies published weights: a receiving scheme."""

    pull_at: str

    def pull(self) -> bool:
        """Apply the newest version if it is not applied yet."""
        ...

    def disown(self) -> None:
        """Record that the model has weights from elsewhere, until the next publish."""
        ...


class _PullsWeights(Collector):
    """Collector whose weights are those published when its rollout (or step) starts."""

    _pullers: list[Puller]
    _in_rollout: bool

    def _pull(self, *moments: str) -> None:
        for puller in self._pullers:
            if puller.pull_at in moments:
                puller.pull()

    def rollout(self) -> TensorDictBase | None:
        """Pull, then collect one rollout."""
        self._pull("rollout", "step")
        self._in_rollout = True
        try:
            return super().rollout()
        finally:
            self._in_rollout = False

    # A worker that is asked for its state answers with what was published. During a
    # rollout the weights stand still, whoever looks.

    @property
    def policy(self) -> Any:
        """The acting policy, with the published weights if no rollout is under way."""
        if not self._in_rollout:
            self._pull("rollout", "step")
        try:
            return self.__dict__["policy"]
        except KeyError:
            raise AttributeError("policy") from None

    @policy.setter
    def policy(self, policy: Any) -> None:
        self.__dict__["policy"] = policy

    @property
    def _wrapped_policy(self) -> Any:
        if self._in_rollout:
            self._pull("step")
        return Collector._wrapped_policy.fget(self)

    @_wrapped_policy.setter
    def _wrapped_policy(self, policy: Any) -> None:
        Collector._wrapped_policy.fset(self, policy)

    def state_dict(self) -> Any:
        """Pull, then return the collector's state."""
        self._pull("rollout", "step")
        return super().state_dict()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load a state; its weights act until the next publish."""
        self._pull("rollout", "step")  # what was published before comes before
        super().load_state_dict(*args, **kwargs)
        for puller in self._pullers:
            puller.disown()

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Pull, then call a nested method."""
        self._pull("rollout", "step")
        return super().cascade_execute(attr_path, *args, **kwargs)

    def get_distant_attr(self, attr: str) -> Any:
        """Pull, then return a nested attribute."""
        self._pull("rollout", "step")
        return super().get_distant_attr(attr)


@functools.cache
def _pulling_class(cls: Any) -> type[_PullsWeights]:
    name = f"Pulling{cls.__name__}"
    return type(name, (_PullsWeights, cls), {"__doc__": cls.__doc__})


def pull_in_rollouts(collector: Collector, puller: Puller) -> None:
    """Make `collector` pull through `puller` at the start of each rollout."""
    if not isinstance(collector, _PullsWeights):
        cls: Any = type(collector)
        collector.__class__ = _pulling_class(cls)
        collector._pullers = []
        collector._in_rollout = False
    if puller not in collector._pullers:
        collector._pullers.append(puller)
