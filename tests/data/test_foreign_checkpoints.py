"""Replay checkpoints that hold code are refused before any of it runs."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage

from tests.support.checkpoints import LeavesAMark, plant_code
from torchrl_unilab.data import PackedReplayStorage, RolloutRingStorage
from torchrl_unilab.errors import CheckpointError


def _rows() -> TensorDict:
    return TensorDict({"observation": torch.zeros(4, 2)}, [4])


def test_the_checkpoint_of_a_stock_storage_runs_no_code(tmp_path):
    stock = LazyMemmapStorage(8)
    stock.set(range(4), _rows())
    stock.dumps(tmp_path / "stock")
    plant_code(tmp_path / "stock", tmp_path / "mark")
    with pytest.raises(CheckpointError, match="more than tensors"):
        PackedReplayStorage(8).loads(tmp_path / "stock")
    assert not (tmp_path / "mark").exists()


def test_the_checkpoint_of_a_ring_runs_no_code(tmp_path):
    torch.save(LeavesAMark(tmp_path / "mark"), tmp_path / "rollouts.pt")
    with (
        RolloutRingStorage(2, example=_rows()) as storage,
        pytest.raises(pickle.UnpicklingError, match="Weights only"),
    ):
        storage.loads(tmp_path)
    assert not (tmp_path / "mark").exists()
