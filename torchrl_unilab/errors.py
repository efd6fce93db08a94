"""Every error this package raises, as one tree.

```text
UniLabError
├── SegmentError                 shared memory itself
│   ├── SegmentSpaceError        (MemoryError)  not enough room; refused before allocation
│   └── SegmentClosedError       (RuntimeError) used after ``close()``
├── LayoutError                  tensors do not match the shared layout; nothing was written
│   ├── LayoutKeyError           (KeyError)     a field is missing or unknown
│   ├── LayoutShapeError         (ValueError)   a field has another shape
│   ├── LayoutDtypeError         (TypeError)    a field has another dtype
│   └── LayoutDigestError        (ValueError)   a segment was made for another layout
├── SnapshotContendedError       (RuntimeError) a reader was overtaken on every bounded retry
├── WorkersBehindError           (TimeoutError) workers have not applied a version in time
├── RingTimeoutError             (TimeoutError) no rollout was ready, or no slot free, in time
├── PeerGoneError                (RuntimeError) the process at the other end has ended
│   └── WorkerError              a worker failed; carries its traceback or its signal
└── ConfigError                  (ValueError)   a setting that cannot work
```

Each class also derives from the builtin that TorchRL raises for the same misuse, so
code that catches ``KeyError`` or ``ValueError`` around the stock scheme keeps working.
Messages read ``<what failed>: <observed> (expected <x>). <remedy>``.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "LayoutDigestError",
    "LayoutDtypeError",
    "LayoutError",
    "LayoutKeyError",
    "LayoutShapeError",
    "PeerGoneError",
    "RingTimeoutError",
    "SegmentClosedError",
    "SegmentError",
    "SegmentSpaceError",
    "SnapshotContendedError",
    "UniLabError",
    "WorkerError",
    "WorkersBehindError",
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
    """Tensors do not match a layout; nothing was written."""


class LayoutKeyError(LayoutError, KeyError):
    """A field is missing from, or unknown to, the layout."""

    def __str__(self) -> str:
        """Return the message itself, where ``KeyError`` would print its ``repr``."""
        return str(self.args[0]) if self.args else ""


class LayoutShapeError(LayoutError, ValueError):
    """A field has another shape than the layout."""


class LayoutDtypeError(LayoutError, TypeError):
    """A field has another dtype than the layout."""


class LayoutDigestError(LayoutError, ValueError):
    """A segment was created for another layout."""


class SnapshotContendedError(UniLabError, RuntimeError):
    """A reader was overtaken by the writer on each of its bounded retries."""


class WorkersBehindError(UniLabError, TimeoutError):
    """Workers have not applied a published version, or not written enough rows, in time."""


class RingTimeoutError(UniLabError, TimeoutError):
    """No rollout was ready, or no slot was free, in time."""


class PeerGoneError(UniLabError, RuntimeError):
    """The process at the other end of shared memory has closed it or died."""


class WorkerError(PeerGoneError):
    """A worker process failed: its own traceback, or the signal that ended it.

    Attributes:
        worker: Number of the worker that has ended or is stopped; None if it lives on.
    """

    worker: int | None = None


class ConfigError(UniLabError, ValueError):
    """A setting cannot work; raised before anything starts."""
