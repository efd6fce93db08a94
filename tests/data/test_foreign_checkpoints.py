"""Replay checkpoints that hold code are refused before any of it runs."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, ReplayBuffer

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


def test_the_checkpoint_of_a_full_stock_storage_of_several_dimensions_is_refused(tmp_path):
    stock = ReplayBuffer(storage=LazyMemmapStorage(20, ndim=2), batch_size=1)
    stock.extend(TensorDict({"observation": torch.ones(5, 4, 2)}, [5, 4]))
    stock.dumps(tmp_path)
    message = "the checkpoint counts 20 rows and holds 4"
    with PackedReplayStorage(20) as storage:
        with pytest.raises(CheckpointError, match=message):
            storage.load_state_dict(stock.storage.state_dict())
        with pytest.raises(CheckpointError, match=message):
            storage.loads(tmp_path / "storage")
        assert not storage.initialized


def test_the_checkpoint_of_a_ring_runs_no_code(tmp_path):
    torch.save(LeavesAMark(tmp_path / "mark"), tmp_path / "rollouts.pt")
    with (
        RolloutRingStorage(2, example=_rows()) as storage,
        pytest.raises(pickle.UnpicklingError, match="Weights only"),
    ):
        storage.loads(tmp_path)
    assert not (tmp_path / "mark").exists()
