"""Copies between a model on any device and one flat run of host bytes.

On the host, tensors are copied straight from or to their places. From an accelerator they
are gathered into one flat buffer there, which leaves in one transfer, on a stream of its
own where there are streams; and the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from torchrl_unilab.shm import BlockLayout

__all__ = ["DevicePacker"]


class DevicePacker:
    """Flat buffers for one layout on one device, and the transfers between them and the host.

    Args:
        layout: What the flat run of bytes holds.
        device: Where the model is. With CUDA the host buffer is pinned and transfers run
            on a stream of their own, which waits for the current one by an event; the
            device as a whole is never synchronised.
    """

    def __init__(self, layout: BlockLayout, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self.device = device
        self._flat = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        self._views = layout.views(self._flat)
        self._host = torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=on_cuda)
        self._host_bytes: npt.NDArray[np.uint8] = self._host.numpy()
        self._stream = torch.cuda.Stream(device) if on_cuda else None

    def gather(self, tensors: Sequence[torch.Tensor], out: npt.NDArray[np.uint8]) -> None:
        """Copy tensors in the layout's order to host bytes, through one transfer."""
        with torch.no_grad():
            torch._foreach_copy_(self._views, list(tensors))
        if self._stream is None:
            self._host.copy_(self._flat)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                self._host.copy_(self._flat, non_blocking=True)
                done = torch.cuda.Event()
                done.record()
            done.synchronize()
        np.copyto(out, self._host_bytes)

    def scatter(
        self,
        block: npt.NDArray[np.uint8],
        tensors: Sequence[torch.Tensor],
        fields: Sequence[int],
    ) -> None:
        """Copy host bytes to tensors, each from its field's index, through one transfer."""
        np.copyto(self._host_bytes, block)
        if self._stream is None:
            self._flat.copy_(self._host)
        else:
            # The last copy out of the flat buffer may still be queued on the acting stream.
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                self._flat.copy_(self._host, non_blocking=True)
            # The host buffer is free again, and the copy seen by the acting stream.
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
            self._stream.synchronize()
        torch._foreach_copy_(list(tensors), [self._views[i] for i in fields])
