from __future__ import annotations

import pytest
import torch

from torchrl_unilab.shm import BlockLayout
from torchrl_unilab.shm.seqlock import Snapshot
from torchrl_unilab.weight_update.packing import DevicePacker

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def _tensors(device: str) -> dict[str, torch.Tensor]:
    return {
        "w": torch.randn(5, 3, device=device),
        "half": torch.randn(4, device=device).bfloat16(),
        "count": torch.tensor(2**53 + 1, device=device),
        "strided": torch.randn(4, 6, device=device).t()[::2],
        "empty": torch.zeros(0, device=device),
    }


@DEVICES
def test_tensors_of_a_device_come_to_the_host_in_one_transfer(device):
    tensors = _tensors(device)
    packer = DevicePacker(BlockLayout.of(tensors), torch.device(device))

    on_host = packer.to_host(list(tensors.values()))

    assert all(copy.device.type == "cpu" for copy in on_host)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(on_host, tensors.values(), strict=True))


@DEVICES
def test_a_snapshot_comes_to_the_device_by_key(device):
    tensors = _tensors("cpu")
    snapshot = Snapshot(BlockLayout.of(tensors))
    torch._foreach_copy_(list(snapshot.tensors.values()), list(tensors.values()))
    packer = DevicePacker(BlockLayout.of(tensors), torch.device(device))

    on_device = packer.to_device(snapshot)

    assert all(copy.device.type == device for copy in on_device.values())
    assert all(torch.equal(on_device[key].cpu(), tensors[key]) for key in tensors)


@pytest.mark.gpu
def test_a_transfer_does_not_synchronise_the_device():
    tensors = _tensors("cuda")
    packer = DevicePacker(BlockLayout.of(tensors), torch.device("cuda"))
    packer.to_host(list(tensors.values()))
    other = torch.cuda.Stream()
    busy = torch.cuda.Event()
    with torch.cuda.stream(other):
        torch.cuda._sleep(2_000_000_000)
        busy.record()

    packer.to_host(list(tensors.values()))

    assert not busy.query()


@DEVICES
def test_a_packer_keeps_no_graph_of_the_parameters_that_it_has_packed(device):
    parameter = torch.ones(3, device=device, requires_grad=True)
    layout = BlockLayout.of({"w": parameter.detach()})
    packer = DevicePacker(layout, torch.device(device))

    (on_host,) = packer.to_host([parameter])

    on_device = packer.to_device(Snapshot(layout))["w"]
    assert [tensor.requires_grad for tensor in (on_host, on_device)] == [False, False]
