"""The first words of a segment that unrelated processes attach by its name, and their check."""

from __future__ import annotations

from collections.abc import Callable

from torchrl_unilab.errors import LayoutError
from torchrl_unilab.shm.segment import SharedSegment
from torchrl_unilab.shm.words import SharedWords

__all__ = ["DIGEST", "MAGIC", "READY", "attach_complete"]

MAGIC, DIGEST, READY = 0, 1, 5
"""Words: what the segment is, the digest of its layout, and whether it is complete."""


def attach_complete(
    name: str,
    what: str,
    magic: int,
    digest: int,
    words: int,
    size: Callable[[SharedWords], int],
) -> SharedSegment:
    """Attach a named segment that is complete and has the layout expected.

    Args:
        name: Its name.
        what: What it is, for the error.
        magic: Its first word.
        digest: The layout's.
        words: Words of its header.
        size: Bytes of the whole, by its header.

    Raises:
        SegmentError: There is no segment of that name.
        LayoutError: It is something else, or not complete, or has another layout or
            another size.
    """
    segment = SharedSegment.attach(name)
    large_enough = segment.nbytes >= SharedWords.nbytes(words)
    header = SharedWords(segment.buffer, 0, words) if large_enough else None
    if header is None or header[MAGIC] != magic or not header[READY]:
        segment.close()
        raise LayoutError(
            f"cannot attach {name!r}: not a complete {what} (expected one). "
            "Check the name, and that its creator has started."
        )
    found = header[DIGEST]
    if found != digest:
        segment.close()
        raise LayoutError(
            f"cannot attach {name!r}: layout digest {found:#x} (expected {digest:#x}). "
            "Both sides must name the same keys, shapes and dtypes."
        )
    if segment.nbytes != (expected := size(header)):
        found = segment.nbytes
        segment.close()
        raise LayoutError(
            f"cannot attach {name!r}: {found} bytes (expected {expected}, of its {what}). "
            "It was cut or written by something else: start its creator again."
        )
    return segment
