from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from torchrl_unilab.objectives.compiler import compiled
from torchrl_unilab.objectives.fused import products
from torchrl_unilab.objectives.fused.networks import ReluNetwork, ReluNetworks, relu_networks
from torchrl_unilab.objectives.fused.products import BatchedProducts, OneDNNProducts, products_for

ONEDNN = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN"
)


def _twins(norm: bool, width: int = 8) -> tuple[nn.Sequential, TensorDict]:
    """A network's structure, and the parameters of two such networks, with gradients."""
    middle = [nn.LayerNorm(width)] if norm else []
    net = nn.Sequential(nn.Linear(5, width), *middle, nn.ReLU(), nn.Linear(width, 6), nn.ReLU())
    net.append(nn.Linear(6, 1))
    generator = torch.Generator().manual_seed(0)
    parameters = TensorDict.from_module(net).apply(
        lambda p: nn.Parameter(torch.randn(2, *p.shape, generator=generator)), batch_size=[2]
    )
    for leaf in parameters.values(include_nested=True, leaves_only=True):
        leaf.grad = torch.full_like(leaf, float("nan"))
    return net, parameters


def _by_autograd(net: nn.Sequential, parameters: TensorDict, x: torch.Tensor) -> list:
    """Outputs of both networks, and the gradients of inputs and parameters by their sum."""
    x = x.clone().requires_grad_()
    leaves = {
        key: leaf.detach().clone().requires_grad_()
        for key, leaf in parameters.flatten_keys(".").items()
    }
    outputs = torch.stack(
        [
            torch.func.functional_call(net, {key: leaf[j] for key, leaf in leaves.items()}, x)
            for j in range(2)
        ]
    )
    outputs.sum().backward()
    return [outputs.detach(), x.grad, {key: leaf.grad for key, leaf in leaves.items()}]


@ONEDNN
@pytest.mark.parametrize("width", [8, 40], ids=["narrow", "wide"])
@pytest.mark.parametrize("norm", [False, True], ids=["relu", "layer norm"])
@pytest.mark.parametrize("form", [BatchedProducts, OneDNNProducts, "on a GPU"])
def test_products_give_the_outputs_and_gradients_of_autograd(form, norm, width, monkeypatch):
    net, parameters = _twins(norm, width)
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    if form == "on a GPU":
        networks = ReluNetwork(net, parameters.detach(), parameters.grad, BatchedProducts())
    else:
        choose = "torchrl_unilab.objectives.fused.networks.products_for"
        monkeypatch.setattr(choose, lambda *_: form())
        networks = relu_networks(net, parameters)
        assert type(networks) is ReluNetworks

    with torch.inference_mode():
        outputs, passes = networks.forward(x)
        networks.backward(torch.ones(2, 7, 1), passes)
        by_input = networks.backward_to_input(torch.ones(2, 7, 1), passes, 2)

    expected, x_grad, gradients = _by_autograd(net, parameters, x)
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(by_input, x_grad[:, 2:])
    for key, leaf in parameters.flatten_keys(".").items():
        torch.testing.assert_close(leaf.grad, gradients[key], msg=key)


def test_networks_on_a_gpu_multiply_at_once():
    net, parameters = _twins(norm=False)
    elsewhere = parameters.apply(lambda p: nn.Parameter(p.detach().to("meta")))
    assert type(relu_networks(net, elsewhere)) is ReluNetwork


@ONEDNN
def test_a_network_that_has_diverged_says_so():
    x, weight, bias = torch.ones(1, 2, 3), torch.full((1, 4, 3), float("nan")), torch.zeros(1, 1, 4)
    for form in (BatchedProducts(), OneDNNProducts()):
        assert form.affine(x, weight, bias, relu=True).isnan().all()


def test_layers_may_have_names():
    net = nn.Sequential(OrderedDict(first=nn.Linear(5, 8), relu=nn.ReLU(), last=nn.Linear(8, 1)))
    parameters = TensorDict.from_module(net)
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(relu_networks(net, parameters).forward(x)[0][0], net(x))


@ONEDNN
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_products_of_onednn_are_the_same(monkeypatch):
    monkeypatch.setattr(
        "torchrl_unilab.objectives.fused.networks.products_for", lambda *_: OneDNNProducts()
    )
    net, parameters = _twins(norm=False)
    networks = relu_networks(net, parameters)
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))

    def differentiate() -> torch.Tensor:
        outputs, passes = networks.forward(x)
        networks.backward(torch.ones(2, 7, 1), passes)
        return outputs

    results = []
    for take in (differentiate, compiled(differentiate, fullgraph=True)):
        with torch.inference_mode():
            results.append(
                [take(), *(leaf.grad.clone() for leaf in parameters.flatten_keys().values())]
            )
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("vendor", "family", "capability", "slow"),
    [
        ("AuthenticAMD", 26, "AVX512", True),
        ("AuthenticAMD", 26, "AVX2", False),
        ("AuthenticAMD", 25, "AVX512", False),
        ("GenuineIntel", 26, "AVX512", False),
    ],
)
def test_mkl_is_slow_from_zen_5_on(vendor, family, capability, slow, monkeypatch, tmp_path):
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        slow = False
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    text = f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\n"
    (tmp_path / "cpuinfo").write_text(text)
    assert products._mkl_is_slow.__wrapped__(tmp_path / "cpuinfo") == slow


def test_where_proc_is_missing_mkl_is_not_taken_for_slow(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert not products._mkl_is_slow.__wrapped__(tmp_path / "none")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_products_of_other_dtypes_are_batched(dtype, monkeypatch):
    monkeypatch.setattr(products, "_mkl_is_slow", lambda: True)
    weight = torch.zeros(2, 3, 4)
    assert type(products_for(weight)) is OneDNNProducts
    assert type(products_for(weight, dtype)) is BatchedProducts
    assert type(products_for(weight.to(dtype))) is BatchedProducts


@ONEDNN
def test_products_are_the_same_bit_for_bit_while_another_thread_compiles(monkeypatch):
    x, weight, bias = torch.randn(1, 9, 256), torch.randn(1, 256, 256), torch.randn(1, 1, 256)

    def multiplied() -> list[torch.Tensor]:
        ours = [kind().affine(x, weight, bias) for kind in (BatchedProducts, OneDNNProducts)]
        return [*ours, products._opaque_times(x[0], weight[0])]

    alone = multiplied()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # of all threads
    assert all(map(torch.equal, alone, multiplied()))
