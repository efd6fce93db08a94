from __future__ import annotations

import numpy as np
import pytest
import torch

from torchrl_unilab.shm import BlockLayout
from torchrl_unilab.weight_update.packing import DevicePacker

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _tensors(device: str) -> dict[str, torch.Tensor]:
    return {
        "w": torch.randn(5, 3, device=device),
        "half": torch.randn(4, device=device).bfloat16(),
        "count": torch.tensor(2**53 + 1, device=device),
        "strided": torch.randn(4, 6, device=device).t()[::2],
        "empty": torch.zeros(0, device=device),
    }


@pytest.mark.parametrize("device", DEVICES)
def test_gathering_writes_the_bytes_that_copying_in_place_writes(device):
    tensors = _tensors(device)
    layout = BlockLayout.of(tensors)
    gathered = np.zeros(layout.nbytes, np.uint8)
    packer = DevicePacker(layout, torch.device(device))
    packer._flat.zero_()  # the gaps between fields
    packer.gather(list(tensors.values()), gathered)
    expected = torch.zeros(layout.nbytes, dtype=torch.uint8)
    torch._foreach_copy_(layout.views(expected), list(tensors.values()))
    assert np.array_equal(gathered, expected.numpy())


@pytest.mark.parametrize("device", DEVICES)
def test_scattering_brings_chosen_fields_back(device):
    tensors = _tensors(device)
    layout = BlockLayout.of(tensors)
    block = np.zeros(layout.nbytes, np.uint8)
    packer = DevicePacker(layout, torch.device(device))
    packer.gather(list(tensors.values()), block)
    for fields in ([0, 1, 2, 3, 4], [2, 0]):
        originals = [list(tensors.values())[i] for i in fields]
        targets = [torch.zeros_like(t) for t in originals]
        packer.scatter(block, targets, fields)
        assert all(torch.equal(a, b) for a, b in zip(targets, originals, strict=True))


@pytest.mark.gpu
def test_gathering_does_not_synchronise_the_device():
    tensors = _tensors("cuda")
    layout = BlockLayout.of(tensors)
    packer = DevicePacker(layout, torch.device("cuda"))
    out = np.zeros(layout.nbytes, np.uint8)
    packer.gather(list(tensors.values()), out)
    other = torch.cuda.Stream()
    busy = torch.cuda.Event()
    with torch.cuda.stream(other):
        torch.cuda._sleep(2_000_000_000)
        busy.record()
    packer.gather(list(tensors.values()), out)
    assert not busy.query()
