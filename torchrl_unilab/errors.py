"""Exceptions, grouped by what the caller can do.

```text
UniLabError
├── SegmentError                              shared memory cannot be used
│   ├── SegmentSpaceError   (MemoryError)     lower the sizes; nothing was allocated
│   └── SegmentClosedError  (RuntimeError)    use it before `close()`
├── LayoutError                               fix the tensors; nothing was written
│   ├── LayoutKeyError      (KeyError)        a field is missing or unknown
│   ├── LayoutShapeError    (ValueError)      a field has another shape
│   └── LayoutDtypeError    (TypeError)       a field has another dtype
├── ContentionError         (RuntimeError)    overtaken on every retry: publish less, add slots
├── WaitTimeoutError        (TimeoutError)    a bounded wait ended: see what it waited for
├── CheckpointError         (ValueError)      load another checkpoint
├── DivergedError           (ArithmeticError) lower the learning rates, look at rewards
├── UsageError              (RuntimeError)    call it in another order, or in another process
│   └── PositionError       (IndexError)      write first, or sample again
├── PeerGoneError           (RuntimeError)    the other process has ended
│   └── WorkerError                           read its traceback
└── ConfigError             (ValueError)      change the setting
    └── RunCompleteError                      ask for more
```

Each class also derives from the builtin that TorchRL raises for the same misuse, so
code that catches ``KeyError`` or ``ValueError`` around the stock scheme keeps working.
Messages read ``<what failed>: <observed> (expected <x>). <remedy>``.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ContentionError",
    "DivergedError",
    "LayoutDtypeError",
    "LayoutError",
    "LayoutKeyError",
    "LayoutShapeError",
    "PeerGoneError",
    "PositionError",
    "RunCompleteError",
    "SegmentClosedError",
    "SegmentError",
    "SegmentSpaceError",
    "UniLabError",
    "UsageError",
    "WaitTimeoutError",
    "WorkerError",
]


class UniLabError(Exception):
    """Base class of the package's errors."""


class SegmentError(UniLabError):
    """A shared-memory segment could not be made, attached or used."""


class SegmentSpaceError(SegmentError, MemoryError):
    """A segment does not fit the shared memory that is free."""


class SegmentClosedError(SegmentError, RuntimeError):
    """A segment, or an object over it, was used after it was closed."""


class LayoutError(UniLabError):
    """Tensors, or a segment, do not match a layout; nothing was written."""


class LayoutKeyError(LayoutError, KeyError):
    """A field is missing from, or unknown to, the layout."""

    __str__ = Exception.__str__
    """The message itself, where ``KeyError`` would print its ``repr``."""


class LayoutShapeError(LayoutError, ValueError):
    """A field has another shape than the layout."""


class LayoutDtypeError(LayoutError, TypeError):
    """A field has another dtype than the layout."""


class ContentionError(UniLabError, RuntimeError):
    """A reader was overtaken by writers on each of its bounded retries."""


class WaitTimeoutError(UniLabError, TimeoutError):
    """A bounded wait ended without what it waited for; the message names it."""


class CheckpointError(UniLabError, ValueError):
    """A checkpoint is damaged, or is one of something else; nothing was changed."""


class DivergedError(UniLabError, ArithmeticError):
    """Training diverged: a loss, gradient, parameter or observation is not finite."""


class UsageError(UniLabError, RuntimeError):
    """A call came in the wrong order, or from the wrong process; nothing was changed."""


class PositionError(UsageError, IndexError):
    """There is no item at a position: not yet, or not any more; or an index has no positions."""


class PeerGoneError(UniLabError, RuntimeError):
    """The process at the other end of shared memory has closed it or died."""


class WorkerError(PeerGoneError):
    """A worker process failed: its own traceback, or the signal that ended it.

    Attributes:
        worker: Number of the worker that is lost, to be killed if it lives; None if it is late.
    """

    worker: int | None = None


class ConfigError(UniLabError, ValueError):
    """A setting or an argument cannot work; raised before anything is changed."""


class RunCompleteError(ConfigError):
    """A run to be resumed has already reached all that was asked for."""


def has_cause(error: BaseException, kind: type[BaseException]) -> bool:
    """Return whether an error was caused, directly or not, by an error of a kind.

    Examples:
        >>> from torchrl_unilab.errors import has_cause
        >>> try:
        ...     raise OSError("no file") from KeyError("a")
        ... except OSError as error:
        ...     has_cause(error, KeyError), has_cause(error, OSError)
        (True, False)
    """
    cause = error.__cause__ or error.__context__
    return cause is not None and (isinstance(cause, kind) or has_cause(cause, kind))
