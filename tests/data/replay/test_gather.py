"""Batches of rows, in memory that is new or used again."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import RewardSum

from tests.support.transitions import episodes, replay_of, same, transitions
from torchrl_unilab.data import PackedReplayStorage
from torchrl_unilab.data.replay import gather
from torchrl_unilab.errors import ConfigError


def test_a_batch_to_sample_into_is_filled_in_place():
    with replay_of(transitions(50), 50) as storage:
        out = storage.empty_batch(20)
        pointer = out["next", "reward"].data_ptr()
        got = storage.sample(20, seed=1, out=out)
        assert got is out
        assert got["next", "reward"].data_ptr() == pointer
        assert same(out, storage.sample(20, seed=1))
        assert len({leaf.untyped_storage().data_ptr() for leaf in out.values(True, True)}) == 1
        with pytest.raises(ConfigError, match="20"):
            storage.sample(21, out=out)
        with pytest.raises(ConfigError, match="empty_batch"):
            storage.sample(20, out=transitions(20))


def test_a_batch_of_rows_of_another_form_is_refused_and_unchanged():
    rows = TensorDict(a=torch.ones(50, 3), b=torch.zeros(50, 2), batch_size=[50])
    turned = TensorDict(b=torch.ones(50, 3), a=torch.zeros(50, 2), batch_size=[50])
    with PackedReplayStorage(50) as storage, PackedReplayStorage(50) as other:
        storage.append(rows)
        other.append(turned)
        out = other.sample(20, out=other.empty_batch(20))
        with pytest.raises(ConfigError, match="not made for it"):
            storage.sample(20, out=out)
        assert (out["b"] == 1.0).all()
        with torch.inference_mode():
            known = storage.sample(20, out=storage.empty_batch(20))
        storage.sample(20, out=known)
        known.update(known.clone())
        with pytest.raises(ConfigError, match="not made for it"):
            storage.sample(20, out=known)
        with pytest.raises(ConfigError, match="not made for it"):
            storage.sample(20, out=known.clear())
        for known in (storage.empty_batch(20), storage.sample(20, out=storage.empty_batch(20))):
            replaced = known.set("a", torch.zeros(20, 3))
            with pytest.raises(ConfigError, match="not made for it"):
                storage.sample(20, out=replaced)


def test_a_batch_serves_all_storages_of_its_form():
    with replay_of(transitions(50), 50) as one, replay_of(transitions(30), 30) as other:
        out = one.sample(20, out=other.empty_batch(20), seed=1)
        assert same(out, one.sample(20, seed=1))


def test_a_batch_that_is_known_is_refused_once_a_nested_part_of_it_was_replaced():
    with replay_of(transitions(50), 50) as storage:
        for key in ("next", ("next", "observation")):
            out = storage.sample(20, out=storage.empty_batch(20))
            out.set(key, out[key].clone())
            with pytest.raises(ConfigError, match="not made for it"):
                storage.sample(20, out=out)


def test_batches_to_sample_into_are_known_as_long_as_there_are_any():
    before = {*gather._made}
    with replay_of(transitions(50), 50) as storage:
        for _ in range(3):
            outs = [storage.empty_batch(20).set("mine", torch.zeros(20)) for _ in range(2)]
            for seed in range(4):
                out = storage.sample(20, seed=seed, out=outs[seed % 2])
                assert same(out.exclude("mine"), storage.sample(20, seed=seed))
            assert len({*gather._made} - before) == 2
            del out, outs
            assert not {*gather._made} - before


def test_each_sample_has_memory_apart():
    with replay_of(transitions(50), 50) as storage:
        batches = [storage.sample(20) for _ in range(3)]
        assert len({batch["action"].data_ptr() for batch in batches}) == 3


@pytest.mark.parametrize("from_example", [False, True])
def test_dimensions_of_rows_keep_the_names_that_transforms_look_for(from_example):
    rows = episodes(40).reshape(4, 10).refine_names(None, "time")
    found = []
    for kind in (LazyTensorStorage, PackedReplayStorage):
        known = {"example": rows[0]} if from_example and kind is PackedReplayStorage else {}
        buffer = TensorDictReplayBuffer(storage=kind(10, **known), batch_size=3)
        buffer.append_transform(RewardSum(in_keys=[("next", "reward")], out_keys=["so far"]))
        buffer.extend(rows)
        torch.manual_seed(1)
        batch = buffer.sample()
        names = [read.names for read in (batch, batch["next"], buffer[:], copy.deepcopy(buffer)[:])]
        found.append((batch["so far"], names))
    (stock, expected), (ours, names) = found
    assert names == expected
    assert torch.equal(ours, stock)
