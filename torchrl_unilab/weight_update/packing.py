"""Transfers between a model on an accelerator and one flat run of host bytes.

Tensors are gathered into one flat buffer on the device, which leaves in one transfer, on a separate
stream where there are streams; and the other way round. Models on the host need none of this. The
transport keeps one packer per cell and device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from torchrl_unilab.shm import BlockLayout
from torchrl_unilab.shm.seqlock import Snapshot


class DevicePacker:
    """Flat buffers for one layout on one device, and the transfers between them and the host.

    Args:
        layout: What the flat run of bytes holds.
        device: Where the model is. With CUDA the host buffer is pinned and transfers run
            on a separate stream, which waits for the current one by an event; the
            device as a whole is never synchronised.
    """

    def __init__(self, layout: BlockLayout, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._flat = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        self._on_device = layout.named_views(self._flat)
        self._host = torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=on_cuda, device="cpu")
        self._on_host = layout.views(self._host)
        self._stream = torch.cuda.Stream(device) if on_cuda else None

    def to_host(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return host copies of tensors in the layout's order; the next transfer reuses them."""
        with torch.no_grad():
            torch._foreach_copy_(list(self._on_device.values()), list(tensors))
        self._transfer(self._flat, self._host)
        return self._on_host

    def to_device(self, snapshot: Snapshot) -> Mapping[str, torch.Tensor]:
        """Return device copies of a snapshot's tensors; the next transfer reuses them."""
        self._host.copy_(torch.from_numpy(snapshot.bytes))
        self._transfer(self._host, self._flat)
        return self._on_device

    def _transfer(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy one of the flat buffers to the other, and wait for that copy alone."""
        if self._stream is None:
            target.copy_(source)
            return
        # Copies into or out of the flat buffer may still be queued on the current stream.
        self._stream.wait_stream(torch.cuda.current_stream(self._flat.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        self._stream.synchronize()
