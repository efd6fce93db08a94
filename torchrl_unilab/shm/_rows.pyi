from typing import Any

def put(
    fields: bytes,
    block: int,
    row_bytes: int,
    capacity: int,
    at: int,
    count: int,
    sources: bytes,
    /,
) -> None: ...
def find(
    classes: tuple[type, type],
    attributes: tuple[str, ...],
    tree: tuple[tuple[str, ...], tuple[Any, ...]],
    shapes: tuple[Any, ...],
    dtypes: tuple[Any, ...],
    finite: bytes,
    rows: object,
    /,
) -> tuple[tuple[Any, ...], bytes] | None: ...
def is_run(address: int, count: int, first: int, capacity: int, /) -> bool: ...
