"""Collectors on more than one machine: weights by one mailbox of a Ray cluster, a seqlock per node.

Needs the extra ``torchrl-unilab[ray]``; importing it starts nothing. The scheme is imported when it
is first asked for: the mailbox's process has no use for torch.
"""

import typing

if typing.TYPE_CHECKING:
    from torchrl_unilab.distributed.scheme import UniLabRayScheme

__all__ = ["UniLabRayScheme"]


def __getattr__(name: str) -> typing.Any:
    if name in __all__:
        from torchrl_unilab.distributed import scheme

        return getattr(scheme, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
