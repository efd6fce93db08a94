"""A Ray that ends, or is another one, under a scheme."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray
from torch import nn

from tests.support.nodes import start_alone
from torchrl_unilab.distributed import UniLabRayScheme
from torchrl_unilab.errors import UsageError


@pytest.fixture(scope="module")
def schemes() -> Iterator[Iterator[UniLabRayScheme]]:
    """Schemes whose Ray has been shut down, one for each test."""
    start_alone()
    found = [UniLabRayScheme(nn.Linear(2, 2)) for _ in range(2)]
    for scheme in found:
        scheme.init_on_sender(model_id="policy", remote_collectors=[])
    ray.shutdown()
    yield iter(found)
    ray.shutdown()


def test_a_scheme_whose_ray_has_ended_is_refused_and_starts_none(schemes):
    scheme = next(schemes)
    for use in (scheme.send, scheme.wait_applied, lambda: scheme.lag):
        with pytest.raises(UsageError, match=r"^Ray: not running .* Make .* again\.$"):
            use()
        assert not ray.is_initialized()
    assert scheme.version == 0
    scheme.shutdown()
    scheme.shutdown()


def test_a_scheme_of_a_ray_before_is_refused_and_leaves_this_one_alone(schemes):
    scheme = next(schemes)
    start_alone()
    for use in (scheme.send, scheme.wait_applied, lambda: scheme.lag):
        with pytest.raises(UsageError, match="Ray: started again"):
            use()
    scheme.shutdown()
    scheme.shutdown()
    assert ray.get(ray.put(1)) == 1
