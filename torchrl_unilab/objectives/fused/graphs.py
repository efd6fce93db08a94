"""Steps captured as CUDA graphs, and replayed: one launch, where each operation would be its own.

The networks are so small that a GPU computes in less time than Python takes to launch. The fused
updates take their steps by `StepGraphs`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from torchrl_unilab.runtime.ranks import Ranks

_MOST = 16
"""Graphs that are kept: of sizes one row apart, with and without the policy, and some more."""

_ONE_AT_A_TIME = threading.Lock()  # CUDA captures for one thread of a process


def capturer_of(device: torch.device) -> Any:
    """Return what captures a device's work, ``torch.cuda``; None for other devices."""
    return torch.cuda if device.type == "cuda" else None


class DeviceNumber:
    """A number in a device's memory, so that replayed steps read its present value.

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
        # A GPU's Adam reads rates of this dtype alone.
        self._memory, self._value = torch.zeros((), device=device, dtype=torch.float32), 0.0

    def of(self, value: float) -> torch.Tensor:
        """Return the memory, after queuing a write if the value has changed."""
        if value != self._value:
            self._memory.fill_(value)
            self._value = value
        return self._memory


class _Graph(NamedTuple):
    """A captured step, with the memory that it reads and the memory that it writes."""

    input: torch.Tensor
    graph: Any
    output: torch.Tensor


class StepGraphs:
    """Takes steps of a GPU as graphs.

    The first step of a kind is eager, which lets the libraries set themselves up; the second is
    captured, which waits for the GPU; it and all others are replayed. Each replay draws new random
    numbers from the device's global generator. Settings of the whole process, such as the precision
    of products, stay as they were at the capture.

    Args:
        cuda: ``torch.cuda``, or what has its ``CUDAGraph``, ``Stream``, ``device`` and ``graph``.
        device: The GPU.
    """

    def __init__(self, cuda: Any, device: torch.device) -> None:
        self._cuda, self._device = cuda, device
        self._stream = cuda.Stream(device)  # by itself torch would capture the current device
        self._graphs: dict[Hashable, _Graph | None] = {}  # the kind of the last step comes last

    def __call__(
        self, step: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, *constants: Hashable
    ) -> torch.Tensor:
        """Take a step; return what it returns, which the next one may overwrite.

        Args:
            step: Reads and writes memory that stays where it is, and `rows`, and looks at no value
                of a tensor.
            rows: What changes from step to step.
            constants: All else that it depends on: flags, numbers, addresses of memory.
        """
        kind = (rows.shape, rows.dtype, rows.device, *constants)
        if kind not in self._graphs:
            output = step(rows)
            if len(self._graphs) == _MOST:
                del self._graphs[next(iter(self._graphs))]
            self._graphs[kind] = None
            return output
        captured = self._graphs.pop(kind) or self._capture(step, rows)
        self._graphs[kind] = captured
        captured.input.copy_(rows)
        captured.graph.replay()
        return captured.output

    def branch(self) -> SideStream:
        """Return a stream for a part of each step."""
        return SideStream(self._cuda, self._device)

    def _capture(self, step: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> _Graph:
        static_input, graph = torch.empty_like(rows), self._cuda.CUDAGraph()
        with (
            _ONE_AT_A_TIME,
            self._cuda.device(self._device),
            torch.inference_mode(False),  # other code uses what torch keeps for all graphs, too
            # Other threads, such as the one that packs samples, use the GPU meanwhile.
            self._cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
            torch.inference_mode(),
        ):
            output = step(static_input)
        return _Graph(static_input, graph, output)


class SideStream:
    """A second stream of a GPU: work there and work here are two branches in a captured step.

    What one branch reads must outlive both.

    Args:
        cuda: ``torch.cuda``, or what has its ``Stream``, ``current_stream`` and ``stream``.
        device: The GPU.
    """

    def __init__(self, cuda: Any, device: torch.device) -> None:
        self._cuda, self._device, self._stream = cuda, device, cuda.Stream(device)

    def run_both(self, main: Callable[[], Any], side: Callable[[], Any]) -> tuple[Any, Any]:
        """Launch `side` there, after the work queued on the current stream, and `main` on this.

        The current stream then waits for the work there.
        """
        current = self._cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with self._cuda.stream(self._stream):
                beside = side()
            return main(), beside
        finally:
            current.wait_stream(self._stream)


def graphs_of(device: torch.device, ranks: Ranks) -> StepGraphs | None:
    """Return what captures steps on a device; None where steps are eager.

    They are eager on the CPU, and with several ranks, which exchange gradients within a step.
    """
    cuda = capturer_of(device)
    return None if cuda is None or ranks.size > 1 else StepGraphs(cuda, device)
