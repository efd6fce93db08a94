"""Steps recorded as CUDA graphs: one launch, where each operation would be one of its own.

The networks are so small that a GPU computes in less time than Python takes to launch. The fused
updates take their steps by `StepGraphs`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from torchrl_unilab.runtime.ranks import Ranks

_MOST = 16
"""Graphs that are kept: of sizes one row apart, with and without the policy, and some more."""


def recorder_of(device: torch.device) -> Any:
    """Return what records a device's work, ``torch.cuda``; None for other devices."""
    return torch.cuda if device.type == "cuda" else None


class DeviceNumber:
    """A number that may change, in memory of a device, where recorded steps read it again.

    Args:
        device: The device.

    Examples:
        >>> import torch
        >>> from torchrl_unilab.objectives.fused.graphs import DeviceNumber
        >>> rate = DeviceNumber(torch.device("cpu"))
        >>> rate.of(0.5) is rate.of(0.25), rate.of(0.25)
        (True, tensor(0.2500))
    """

    def __init__(self, device: torch.device) -> None:
        self._memory, self._value = torch.zeros((), device=device), 0.0

    def of(self, value: float) -> torch.Tensor:
        """Return the memory, which has the value once the device comes to it."""
        if value != self._value:
            self._memory.fill_(value)
            self._value = value
        return self._memory


class _Graph(NamedTuple):
    input: torch.Tensor
    graph: Any
    output: torch.Tensor


class StepGraphs:
    """Takes steps of a GPU as graphs.

    The first step of a kind is taken as it is written, which lets the libraries set themselves up;
    the second is recorded, which waits for the GPU; others repeat the record. Random numbers of
    the device's global generator go on.

    Args:
        cuda: ``torch.cuda``, or what has its ``CUDAGraph`` and ``graph``.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._graphs: dict[Hashable, _Graph | None] = {}

    def __call__(
        self,
        step: Callable[[torch.Tensor], torch.Tensor],
        rows: torch.Tensor,
        *constants: Hashable,
    ) -> torch.Tensor:
        """Take a step; return what it returns, which the next one may overwrite.

        Args:
            step: Reads and writes memory that stays where it is, and `rows`, and looks at no value
                of a tensor.
            rows: What changes from step to step.
            constants: All else that it depends on: flags, numbers, addresses of memory.
        """
        kind = (rows.shape, *constants)
        if kind not in self._graphs:
            if len(self._graphs) == _MOST:
                del self._graphs[next(iter(self._graphs))]  # the oldest
            self._graphs[kind] = None
            return step(rows)
        recorded = self._graphs[kind]
        if recorded is None:
            recorded = self._graphs[kind] = self._record(step, rows)
        recorded.input.copy_(rows)
        recorded.graph.replay()
        return recorded.output

    def _record(self, step: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> _Graph:
        own, graph = rows.clone(), self._cuda.CUDAGraph()
        # Other threads, as the one that packs samples, use the GPU meanwhile.
        with self._cuda.graph(graph, capture_error_mode="thread_local"):
            output = step(own)
        return _Graph(own, graph, output)


def graphs_of(device: torch.device, ranks: Ranks) -> StepGraphs | None:
    """Return what takes steps of a device; None where they are taken as they are written.

    So they are where ranks exchange gradients in the middle of a step.
    """
    recorder = recorder_of(device)
    return None if recorder is None or ranks.size > 1 else StepGraphs(recorder)
