"""What CUDA graphs do, on the CPU: operations are noted, and done again on the same memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchrl_unilab.objectives.fused import adam, graphs


def _tensors(*values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class _Notes(TorchDispatchMode):
    """Notes operations; what they wrote to is as it was before, as a GPU does not run them."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage | None]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a captured step looked"
        kwargs = kwargs or {}
        for tensor in _tensors(args, kwargs):
            storage = tensor.untyped_storage()
            self._before.setdefault(storage._cdata, (storage, storage.clone()))
        out = func(*args, **kwargs)
        for tensor in _tensors(out):  # memory of the graph's own
            storage = tensor.untyped_storage()
            self._before.setdefault(storage._cdata, (storage, None))
        self.operations.append((func, args, kwargs, out))
        return out

    def restore(self) -> None:
        for storage, before in self._before.values():
            if before is not None:
                storage.copy_(before)


class _Graph:
    stream: Any
    device: torch.device

    def __init__(self) -> None:
        self.notes = _Notes()
        self.replays = 0

    @torch.inference_mode()
    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self.notes.operations:
            for noted, new in zip(_tensors(out), _tensors(func(*args, **kwargs)), strict=True):
                if noted.data_ptr() != new.data_ptr():
                    noted.copy_(new)


class _Stream:
    def __init__(self, twin: GraphTwin, name: str, device: torch.device) -> None:
        self.twin, self.name, self.device = twin, name, device

    def wait_stream(self, other: _Stream) -> None:
        self.twin.order.append(f"{self.name} waits for {other.name}")


class GraphTwin:
    """Has what `StepGraphs` uses of ``torch.cuda``; work is done at once, in the order of launches.

    Attributes:
        made: All graphs, the oldest first.
        order: Which stream waited for which.
    """

    def __init__(self) -> None:
        self.made: list[_Graph] = []
        self.order: list[str] = []
        self._device: torch.device | None = None

    def CUDAGraph(self) -> _Graph:  # noqa: N802
        self.made.append(_Graph())
        return self.made[-1]

    def Stream(self, device: torch.device) -> _Stream:  # noqa: N802
        return _Stream(self, "side", device)

    def current_stream(self, device: torch.device) -> _Stream:
        return _Stream(self, "main", device)

    @contextlib.contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self._device = self._device, device
        yield
        self._device = before

    @contextlib.contextmanager
    def graph(self, graph: _Graph, *, stream: _Stream, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        assert not torch.is_inference_mode_enabled()  # torch would keep tensors for all graphs
        graph.stream, graph.device = stream, self._device
        random = torch.get_rng_state()
        with graph.notes:
            yield
        graph.notes.restore()
        torch.set_rng_state(random)


def capture_by(twin: GraphTwin, monkeypatch: Any) -> None:
    """Have steps on the CPU captured as those on a GPU are."""
    for module in (adam, graphs):
        monkeypatch.setattr(module, "capturer_of", lambda device: twin)
