"""A checkpoint of the ring brings back unread rollouts and counters, or changes nothing."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from typing import BinaryIO

import pytest
import torch

from tests.support.processes import receive, spawned
from tests.support.rollouts import make_rollout, misfit, stack, values
from torchrl_unilab.data import RolloutRingStorage
from torchrl_unilab.errors import (
    CheckpointError,
    ConfigError,
    LayoutError,
    LayoutKeyError,
    LayoutShapeError,
)


def test_a_checkpoint_counts_on_from_all_counters(tmp_path):
    with RolloutRingStorage(2, example=make_rollout(), writers=2) as storage:
        for writer, value in ((1, 1), (0, 2), (0, 3), (0, 4), (1, 5)):
            storage.use_writer(writer)
            storage.write(make_rollout(value))
        storage.release(storage.acquire())
        storage.dumps(tmp_path)
        before = storage.state_dict()
    with RolloutRingStorage(2, writers=2) as restored:
        restored.loads(tmp_path)
        assert (restored.written, restored.dropped, restored.read_count) == ((3, 2), (1, 0), 1)
        assert values(restored[:]) == [3, 4, 5]
        after = restored.state_dict()
        assert (after["counts"], after["of"]) == (before["counts"], [0, 0, 1])
        restored.use_writer(1)
        assert restored.claim(0.0) is not None
        assert restored.commit() == 3


@pytest.mark.parametrize("writer", [None, 0])
def test_who_loads_a_checkpoint_stays_the_writer_that_it_was(storage, writer):
    storage.write(make_rollout(1))
    with RolloutRingStorage(2, example=make_rollout(), writers=1) as target:
        if writer is not None:
            target.use_writer(writer)
        target.load_state_dict(storage.state_dict())
        assert target.ring.writer == writer


def test_a_checkpoint_of_nothing_is_loaded():
    with RolloutRingStorage(2) as storage, RolloutRingStorage(2) as other:
        other.load_state_dict(storage.state_dict())
        assert not other.initialized
    with RolloutRingStorage(2, example=make_rollout()) as storage, RolloutRingStorage(2) as other:
        other.load_state_dict(storage.state_dict())
        assert (other.initialized, len(other)) == (True, 0)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"example": make_rollout(batch=(2, 4))}, LayoutShapeError, "shape of"),
        ({"example": misfit("unknown")}, LayoutKeyError, "next.value"),
        ({"example": make_rollout().auto_batch_size_(1)}, LayoutShapeError, "batch size"),
        ({"slots": 2}, ConfigError, "cannot load 3 rollouts of one writer"),
        ({"writers": 2}, ConfigError, "1 writers"),
    ],
    ids=["shape", "keys", "batch size", "slots", "writers"],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(storage, settings, error, message):
    storage.write_all(stack(1, 2, 3))
    with RolloutRingStorage(**settings) as target:
        with pytest.raises(error, match=message):
            target.load_state_dict(storage.state_dict())
        assert (len(target), target.write_count) == (0, 0)


def _be_writer(pipe: Connection, storage: RolloutRingStorage, writer: int) -> None:
    storage.use_writer(writer)
    pipe.send(os.getpid())
    pipe.recv()
    storage.close()
    pipe.send("closed")
    pipe.recv()


def test_a_checkpoint_of_a_writer_that_another_process_is_changes_nothing():
    with (
        RolloutRingStorage(2, example=make_rollout(), writers=2) as storage,
        RolloutRingStorage(2, example=make_rollout(), writers=2) as target,
    ):
        for writer in (0, 1):
            storage.use_writer(writer)
            storage.write(make_rollout(writer))
        state = storage.state_dict()
        with spawned(_be_writer, target, 1) as (_, pipe):
            pid = receive(pipe)
            with pytest.raises(ConfigError, match=rf"taken, by processes {{1: {pid}}}"):
                target.load_state_dict(state)
            assert (len(target), target.written) == (0, (0, 0))
            pipe.send("close")
            receive(pipe)
        target.load_state_dict(state)
        assert values(target[:]) == [0, 1]


def test_a_checkpoint_is_not_loaded_over_unread_rollouts(storage):
    storage.write(make_rollout(1))
    state = storage.state_dict()
    with pytest.raises(RuntimeError, match="1 are unread and 0 leased"):
        storage.load_state_dict(state)
    lease = storage.acquire()
    with pytest.raises(RuntimeError, match="0 are unread and 1 leased"):
        storage.load_state_dict(state)
    storage.release(lease)
    storage.load_state_dict(state)
    assert values(storage[:]) == [1]


def test_a_folder_within_one_that_is_not_there_yet_is_made(storage, tmp_path):
    storage.write(make_rollout(1))
    storage.dumps(tmp_path / "run" / "rollouts")
    with RolloutRingStorage(4) as other:
        other.loads(tmp_path / "run" / "rollouts")
        assert values(other[:]) == [1]


def test_a_save_that_fails_leaves_the_checkpoint_of_before(storage, tmp_path, monkeypatch):
    def fail(_: object, file: BinaryIO) -> None:
        file.write(b"half")
        raise OSError("No space left on device")

    storage.write(make_rollout(1))
    storage.dumps(tmp_path)
    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="No space left"):
        storage.dumps(tmp_path)
    with RolloutRingStorage(4) as other:
        other.loads(tmp_path)
        assert values(other[:]) == [1]


@pytest.mark.parametrize("left", [0, -100])
def test_a_file_that_was_cut_off_is_refused(tmp_path, left):
    with RolloutRingStorage(2, example=make_rollout()) as storage:
        storage.dumps(tmp_path)
        file = tmp_path / "rollouts.pt"
        file.write_bytes(file.read_bytes()[:left])
        with pytest.raises(CheckpointError, match=r"rollouts.pt: .*expected a whole file"):
            storage.loads(tmp_path)


@pytest.mark.parametrize(
    "spoil", [torch.Tensor.double, lambda tensor: tensor[:, :1]], ids=["dtype", "shape"]
)
def test_rollouts_of_a_state_that_are_not_of_its_schema_are_refused(storage, spoil):
    storage.write(make_rollout(1))
    state = storage.state_dict()
    state["rollouts"]["observation"] = spoil(state["rollouts"]["observation"])
    with RolloutRingStorage(2) as target:
        with pytest.raises(LayoutError, match="'observation'"):
            target.load_state_dict(state)
        assert len(target) == 0
