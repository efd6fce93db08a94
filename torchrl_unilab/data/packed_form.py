"""What a transition looks like, and how it goes into rows and comes out of a batch."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from torchrl_unilab.errors import LayoutDtypeError, LayoutKeyError, LayoutShapeError
from torchrl_unilab.shm.layout import dotted
from torchrl_unilab.shm.row_layout import FieldSpec, RowLayout

__all__ = [
    "DONE",
    "REWARD",
    "SIGNALS",
    "TERMINATED",
    "TRUNCATED",
    "RowForm",
    "StagedRows",
    "as_rows",
    "key_path",
    "leaves",
]

Path = tuple[str, ...]
_SIZES = 64  # numbers of rows whose shapes are kept
REWARD = "next.reward"
DONE, TERMINATED, TRUNCATED = "next.done", "next.terminated", "next.truncated"
SIGNALS = ("done", "terminated", "truncated", "reward")


def key_path(key: str | Sequence[str]) -> Path:
    """Return a TensorDict key as a tuple."""
    return (key,) if isinstance(key, str) else tuple(key)


@dataclass(frozen=True)
class StagedRows:
    """Rows in private memory, on their way to shared memory.

    Attributes:
        words: int32 of shape [n, words]; the link words are not set.
        flags: The packed flags, bool of shape [n, flag_bits].
        following: The next observations, int32 of shape [n, linked words]; None without links.
        views: Dotted key to view of each field, of shape [n, *shape].
    """

    words: torch.Tensor
    flags: torch.Tensor
    following: torch.Tensor | None
    views: Mapping[str, torch.Tensor]

    def last(self, count: int) -> StagedRows:
        """The last rows."""
        following = None if self.following is None else self.following[-count:]
        return StagedRows(self.words[-count:], self.flags[-count:], following, {})


@dataclass(frozen=True)
class RowForm:
    """Keys, shapes and dtypes of a transition, and how its observations are kept.

    Attributes:
        batch_size: Batch dimensions of one row, usually none.
        fields: Key, shape (with `batch_size`) and dtype of each tensor.
        linked: Keys that are observed again at the next step.
        derived: Whether what they are there is kept once.
    """

    batch_size: tuple[int, ...]
    fields: tuple[tuple[Path, tuple[int, ...], torch.dtype], ...]
    linked: tuple[Path, ...] = ()
    derived: bool = False

    @classmethod
    def of(
        cls,
        row: TensorDictBase,
        *,
        links: bool = False,
        derived: bool = False,
        linked: Sequence[Path] | None = None,
    ) -> RowForm:
        """Return the form of a row.

        Args:
            row: One transition: shapes and dtypes, not the content.
            links: Whether rows are linked to their successors.
            derived: Whether next observations are derived by that.
            linked: Keys to link; if not given, those that are also under ``"next"`` with the
                same shape and dtype, without done, terminated, truncated and reward.

        Raises:
            LayoutKeyError: There is no tensor, a nested TensorDict is empty, two keys have
                one dotted name, or there is nothing to link.
            LayoutDtypeError: An entry is not a tensor.
        """
        for key, entry in as_rows(row).items(True, False):
            if isinstance(entry, TensorDictBase) and entry.is_empty():
                raise LayoutKeyError(
                    f"entry {dotted(key)!r} of a row: an empty TensorDict (expected tensors in "
                    "it). Leave it out."
                )
        fields = tuple((key, tuple(leaf.shape), leaf.dtype) for key, leaf in leaves(row).items())
        names = [dotted(key) for key, _, _ in fields]
        if not names or len(set(names)) < len(names):
            raise LayoutKeyError(
                f"keys of a row: {names} (expected at least one, each dotted name once). "
                "Rename one; nested and dotted keys share one namespace."
            )
        form = cls(tuple(row.batch_size), fields)
        if not links:
            return form
        kinds = {key: (shape, dtype) for key, shape, dtype in fields}
        again = [key for key in kinds if kinds.get(("next", *key)) == kinds[key]]
        if linked is None:
            linked = [key for key in again if key[-1] not in SIGNALS]
        if not linked or not set(linked) <= set(again):
            raise LayoutKeyError(
                f"rows with links: {[dotted(k) for k in linked]} (expected keys that are also "
                f"under 'next' with one shape and dtype: {[dotted(k) for k in again]}). Name them."
            )
        return cls(form.batch_size, fields, tuple(linked), derived)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Dotted keys of all fields, in order."""
        return tuple(dotted(key) for key, _, _ in self.fields)

    @functools.cached_property
    def following(self) -> tuple[str, ...]:
        """Dotted keys of the next observations that are linked."""
        return tuple(dotted(("next", *key)) for key in self.linked)

    def layout(self, link_codes: int) -> RowLayout:
        """Lay out a row; a link takes `link_codes` values."""
        specs: dict[str, FieldSpec] = {
            dotted(key): (dotted(key), shape, dtype) for key, shape, dtype in self.fields
        }
        linked = [specs.pop(dotted(key)) for key in self.linked]
        following = [specs.pop(name) for name in self.following]
        return RowLayout.of(
            linked,
            specs.values(),
            repeated=() if self.derived else following,
            link_codes=link_codes if self.linked else 0,
            pack_flags=self.derived,
        )

    # In

    def select(self, rows: TensorDictBase) -> list[torch.Tensor]:
        """Return the tensors of rows [n] in order, checked before anything is written.

        An entry ``"index"`` that the form does not know is left out: TorchRL's writers add it.

        Raises:
            LayoutKeyError: A key is missing or unknown.
            LayoutShapeError: A tensor has another shape.
            LayoutDtypeError: A tensor has another dtype, or an entry is none.
        """
        came = leaves(rows)
        if tuple(came) != self._keys:  # another order, or other keys
            if came.keys() - {("index",)} != {*self._keys} - {("index",)}:
                raise self._other_keys(rows)
            try:
                came = {key: came[key] for key in self._keys}
            except KeyError:
                raise self._other_keys(rows) from None
        chosen = list(came.values())
        for leaf, name, shape, dtype in zip(
            chosen, self.names, self._shapes(rows.batch_size[0]), self._dtypes, strict=True
        ):
            if leaf.shape != shape:
                raise LayoutShapeError(
                    f"shape of {name!r}: {tuple(leaf.shape)} (expected {tuple(shape)}). "
                    "Write rows like the first ones, or make a new storage."
                )
            if leaf.dtype is not dtype:
                raise LayoutDtypeError(
                    f"dtype of {name!r}: {leaf.dtype} (expected {dtype}). "
                    "Cast it, or make a new storage."
                )
        return chosen

    @functools.cached_property
    def _keys(self) -> tuple[Path, ...]:
        return tuple(key for key, _, _ in self.fields)

    @functools.cached_property
    def _dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(dtype for _, _, dtype in self.fields)

    @functools.cached_property
    def _shapes_of(self) -> dict[int, list[torch.Size]]:
        return {}

    def _shapes(self, count: int) -> list[torch.Size]:
        shapes = self._shapes_of.get(count)
        if shapes is None:
            shapes = [torch.Size((count, *shape)) for _, shape, _ in self.fields]
            if len(self._shapes_of) < _SIZES:
                self._shapes_of[count] = shapes
        return shapes

    def _other_keys(self, rows: TensorDictBase) -> LayoutKeyError:
        came = {dotted(key) for key in leaves(rows)}
        missing, unknown = sorted({*self.names} - came), sorted(came - {*self.names})
        return LayoutKeyError(
            f"keys of rows: missing {missing}, unknown {unknown} (expected {list(self.names)}). "
            "Write rows like the first ones, or make a new storage."
        )

    def stage(self, layout: RowLayout, count: int) -> StagedRows:
        """Make private memory for `count` rows."""
        with torch.inference_mode(False):
            words = torch.zeros(count, layout.words, dtype=torch.int32)
            flags = torch.zeros(count, layout.flag_bits, dtype=torch.bool)
            views = layout.views(words) | layout.flag_views(flags)
            following = None
            if self.derived:
                following = torch.zeros(count, layout.linked_words, dtype=torch.int32)
                again = layout.views(following, linked=True)
                views |= {f"next.{key}": view for key, view in again.items()}
            elif self.linked:
                following = words[:, layout.linked_words : 2 * layout.linked_words]
        return StagedRows(words, flags, following, views)

    def meta(self) -> TensorDict:
        """Return a row without memory."""
        row = TensorDict(batch_size=self.batch_size, device=torch.device("meta"))
        for key, shape, dtype in self.fields:
            row.set(key, torch.empty(shape, dtype=dtype, device="meta"))
        return row

    # Out

    def tensordict(
        self, views: Mapping[str, torch.Tensor], batch_size: Sequence[int], extra: Sequence[str]
    ) -> TensorDict:
        """Return a TensorDict of views, of batch size [*batch_size, *self.batch_size].

        Args:
            views: Dotted key to view: of each field, and of each of `extra`.
            batch_size: Batch dimensions of the batch.
            extra: Dotted keys beside the form's.
        """
        shape = torch.Size((*batch_size, *self.batch_size))
        tree: dict[str, Any] = {}
        for name, path in (*self._paths, *((name, tuple(name.split("."))) for name in extra)):
            node = tree
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = views[name]
        return _nested(tree, shape, len(batch_size))

    @functools.cached_property
    def _paths(self) -> tuple[tuple[str, Path], ...]:
        return tuple(zip(self.names, (key for key, _, _ in self.fields), strict=True))

    # Saved

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` makes it from."""
        fields = [[list(key), list(shape), str(dtype)] for key, shape, dtype in self.fields]
        return {
            "batch_size": list(self.batch_size),
            "fields": fields,
            "linked": [list(key) for key in self.linked],
            "derived": self.derived,
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> RowForm:
        """Return the form that was saved."""
        return cls(
            tuple(saved["batch_size"]),
            tuple(
                (tuple(key), tuple(shape), getattr(torch, dtype.removeprefix("torch.")))
                for key, shape, dtype in saved["fields"]
            ),
            tuple(tuple(key) for key in saved["linked"]),
            saved["derived"],
        )


_CPU = torch.device("cpu")


def _nested(tree: dict[str, Any], shape: torch.Size, outer: int) -> TensorDict:
    source = {
        key: _nested(entry, shape, outer) if isinstance(entry, dict) else entry
        for key, entry in tree.items()
    }
    # The checks of the public constructor take longer than the gather of a small batch.
    return TensorDict._new_unsafe(source=source, batch_size=shape, device=_CPU)


def leaves(rows: TensorDictBase) -> dict[Path, torch.Tensor]:
    """Return key to tensor of all entries.

    Raises:
        LayoutDtypeError: An entry is not a tensor, or `rows` is no TensorDict.
    """
    found: dict[Path, torch.Tensor] = {}
    _collect(as_rows(rows), (), found)
    return found


def as_rows(data: Any) -> TensorDictBase:
    """Return rows as a TensorDict; a list of them stacked.

    Raises:
        LayoutDtypeError: They are none.
    """
    stray = data
    if isinstance(data, list):
        stray = next((row for row in data if not isinstance(row, TensorDictBase)), None)
        if data and stray is None:
            return LazyStackedTensorDict.maybe_dense_stack(data)
    elif isinstance(data, TensorDictBase):
        return data
    raise LayoutDtypeError(
        f"cannot write rows: {type(stray).__name__} (expected a TensorDict). Convert them first."
    )


def _collect(rows: TensorDictBase, path: Path, found: dict[Path, torch.Tensor]) -> None:
    for key, entry in rows.items():
        here = (*path, key)
        if isinstance(entry, torch.Tensor):
            found[here] = entry
        elif isinstance(entry, TensorDictBase):
            _collect(entry, here, found)
        else:
            raise LayoutDtypeError(
                f"entry {dotted(here)!r} of rows: {type(entry).__name__} (expected a tensor). "
                "Leave it out."
            )
