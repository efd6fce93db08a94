"""TorchRL's prioritised samplers over our storage, where their C++ extension loads."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import PrioritizedSampler, TensorDictReplayBuffer

from torchrl_unilab.data import PackedReplayStorage

PAGE = Path(__file__).parents[2] / "tutorials" / "how-to" / "replay.md"


def _extension_loads() -> bool:
    try:
        importlib.import_module("torchrl._torchrl")
    except ImportError:
        return False
    return True


EXTENSION = _extension_loads()


@pytest.mark.skipif(EXTENSION, reason="TorchRL's extension loads")
def test_without_its_extension_torchrl_refuses_and_the_page_has_the_remedy():
    with pytest.raises(RuntimeError) as refused:
        PrioritizedSampler(8, 0.7, 0.5)
    symptom = str(refused.value).partition(". ")[0]
    page = " ".join(PAGE.read_text().split())
    assert f'"{symptom}"' in page
    assert "pip install --no-build-isolation git+https://github.com/pytorch/rl.git" in page


@pytest.mark.skipif(not EXTENSION, reason="TorchRL's extension was built for another torch")
def test_with_its_extension_rows_of_hardly_any_priority_are_not_drawn():
    rows = TensorDict(x=torch.arange(8.0), batch_size=[8])
    with PackedReplayStorage(8, example=rows[0]) as storage:
        sampler = PrioritizedSampler(8, 1.0, 1.0)
        buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=64)
        buffer.extend(rows)
        buffer.update_priority(torch.arange(8), torch.tensor([0.0] * 7 + [1.0]))
        assert buffer.sample()["x"].unique().tolist() == [7.0]
