from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchrl_unilab.errors import ConfigError, LayoutShapeError
from torchrl_unilab.modules import ObservationNormalizer


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(0, 100))
def test_moments_do_not_depend_on_how_the_data_was_cut(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(sum(sizes) + 1, 2, generator=generator, dtype=torch.float64) * 3 + 100
    normalizer = ObservationNormalizer(2)
    for part in data.split([*sizes, 1]):
        normalizer.update(part)
    assert normalizer.count.item() == len(data)
    torch.testing.assert_close(normalizer.mean, data.mean(0))
    torch.testing.assert_close(normalizer.variance, data.var(0, correction=0))


def test_it_scales_to_zero_mean_and_unit_variance_and_clips():
    normalizer = ObservationNormalizer(1, clip=2.0)
    normalizer.update(torch.tensor([[1.0], [3.0]]))
    observation = torch.tensor([[-100.0], [1.0], [2.0], [3.0], [100.0]])
    assert normalizer(observation).flatten().tolist() == pytest.approx([-2.0, -1.0, 0.0, 1.0, 2.0])
    assert ObservationNormalizer(1)(observation).abs().max() == 10.0


def test_it_clips_nothing_at_infinity():
    observation = torch.tensor([[1e30], [-1e30]])
    assert torch.equal(ObservationNormalizer(1, clip=math.inf)(observation), observation)


def test_statistics_are_buffers_and_nothing_learns():
    normalizer = ObservationNormalizer(2)
    assert set(normalizer.state_dict()) == {"mean", "variance", "count"}
    assert list(normalizer.parameters()) == []


def test_an_observation_that_never_changes_is_nought():
    normalizer = ObservationNormalizer(1)
    normalizer.update(torch.full((4, 1), 7.0))
    assert normalizer(torch.tensor([[7.0]])).item() == 0.0


@pytest.mark.parametrize("shape", [(), (5, 1), (5, 4)])
def test_an_observation_of_another_size_is_refused(shape):
    with pytest.raises(LayoutShapeError, match=r"expected \[\.\.\., 3\]"):
        ObservationNormalizer(3)(torch.zeros(shape))


@pytest.mark.parametrize("take", ["update", "moments"])
def test_statistics_of_observations_of_another_size_are_refused(take):
    with pytest.raises(LayoutShapeError, match=r"\(2, 6\) \(expected"):
        getattr(ObservationNormalizer(3), take)(torch.zeros(2, 6))


def test_statistics_take_no_gradient_of_what_they_are_of():
    normalizer = ObservationNormalizer(2)
    assert not normalizer.moments(torch.ones(4, 2, requires_grad=True)).requires_grad
    normalizer.merge(torch.ones(5, dtype=torch.float64, requires_grad=True))
    assert not any(buffer.requires_grad for buffer in normalizer.buffers())


@pytest.mark.parametrize("size", [0, -1, 2.0, True])
def test_a_size_that_is_no_positive_integer_is_refused(size):
    with pytest.raises(ConfigError, match=r"size of observations: .* an integer of at least 1"):
        ObservationNormalizer(size)


@pytest.mark.parametrize(
    "numbers", [{"epsilon": 0.0}, {"epsilon": -1.0}, {"epsilon": math.inf}, {"clip": -1.0}]
)
def test_numbers_that_make_nonsense_of_observations_are_refused(numbers):
    with pytest.raises(ConfigError, match=r"(epsilon|clip): .* \(expected a number in \(0, inf"):
        ObservationNormalizer(3, **numbers)


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_integers_are_normalised_as_numbers_of_the_default_dtype(dtype, default, monkeypatch):
    monkeypatch.setattr(torch, "get_default_dtype", lambda: default)
    normalizer = ObservationNormalizer(2)
    observation = torch.tensor([[0, 10], [200, 30]], dtype=dtype)
    normalizer.update(observation)
    expected = torch.tensor([[-1.0, -1.0], [1.0, 1.0]], dtype=default)
    torch.testing.assert_close(normalizer(observation), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_statistics_of_a_network_of_another_dtype_continue(dtype):
    network = nn.Sequential(ObservationNormalizer(1), nn.Linear(1, 1)).to(dtype)
    normalizer, exact = network[0], ObservationNormalizer(1)
    for _ in range(300):
        batch = 3.0 + torch.randn(256, 1)
        normalizer.update(batch)
        exact.update(batch)
    assert normalizer.count == 300 * 256
    assert torch.equal(normalizer.to(dtype).mean, exact.mean)
    assert network(batch.to(dtype)).dtype == dtype


def test_a_normalizer_of_the_meta_device_gets_memory_elsewhere():
    normalizer = nn.Sequential(ObservationNormalizer(1)).to("meta").to_empty(device="cpu")[0]
    assert {buffer.device.type for buffer in normalizer.buffers()} == {"cpu"}


def test_half_precision_normalises_by_a_variance_beyond_its_range():
    normalizer = ObservationNormalizer(1)
    normalizer.update(torch.tensor([[-1000.0], [1000.0]]))
    observation = torch.tensor([[1000.0]], dtype=torch.float16)
    assert normalizer(observation).item() == pytest.approx(1.0, abs=1e-3)
