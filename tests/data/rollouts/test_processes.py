"""Several processes write one ring, and some of them die."""

from __future__ import annotations

import os
import signal

import pytest
from torchrl.collectors import Collector, MultiAsyncCollector

from tests.support.acting import StillEnv, make_policy
from tests.support.processes import DEADLINE, receive, spawned
from tests.support.rings import strike_at
from tests.support.rollouts import (
    claim_and_die,
    extend_buffer,
    fill_blocked,
    make_rollout,
    stamp,
    values,
)
from torchrl_unilab.data import (
    RolloutReplayBuffer,
    RolloutRingSampler,
    RolloutRingStorage,
    RolloutRingWriter,
)
from torchrl_unilab.errors import ConfigError


def shared_buffer(writers: int = 2, **settings) -> RolloutReplayBuffer:
    """A buffer that several processes use, whose writers block on two slots each."""
    settings = {"example": make_rollout(), "overflow": "block", **settings}
    storage = RolloutRingStorage(2, writers=writers, **settings)
    sampler = RolloutRingSampler(timeout=DEADLINE)
    return RolloutReplayBuffer(storage=storage, sampler=sampler, batch_size=1, shared=True)


@pytest.mark.parametrize("explicit", [False, True])
def test_rollouts_of_several_processes_arrive_whole_in_order_and_counted(explicit):
    writers, rollouts = 2, 40
    buffer = shared_buffer()
    storage = buffer.storage
    with (
        spawned(extend_buffer, buffer, 0, rollouts, explicit) as (_, first),
        spawned(extend_buffer, buffer, 1, rollouts, explicit) as (_, second),
    ):
        for pipe in (first, second):
            receive(pipe)
        for pipe in (first, second):
            pipe.send("go")
        seen = [values(buffer.sample())[0] for _ in range(writers * rollouts)]
        for writer in range(writers):
            own = [value for value in seen if stamp(writer, 0) < value <= stamp(writer, rollouts)]
            assert own == [stamp(writer, i + 1) for i in range(rollouts)]
        assert [receive(pipe) for pipe in (first, second)] == [{"torch.int64"}] * 2
        assert (storage.written, storage.dropped) == ((rollouts,) * writers, (0,) * writers)
        assert (buffer.write_count, storage.read_count, len(buffer)) == (80, 80, 0)
    storage.close()


def collector(**settings) -> Collector:
    """A collector of one rollout at a time, whose policy acts with 3."""
    settings |= {"frames_per_batch": 5, "auto_register_policy_transforms": False}
    return Collector(StillEnv(), make_policy(3.0), **settings)


def test_a_stock_collector_fills_the_ring():
    with RolloutRingStorage(2) as storage:
        buffer = RolloutReplayBuffer(storage=storage, batch_size=1)
        filling = collector(total_frames=15, replay_buffer=buffer)
        for _ in filling:
            assert (buffer.sample()["action"] == 3.0).all()
        filling.shutdown()
        assert (storage.write_count, storage.read_count) == (3, 3)


def test_free_running_collectors_fill_one_ring():
    single = collector(total_frames=5)
    example = next(iter(single)).clone()
    single.shutdown()
    buffer = shared_buffer(example=example)
    running = MultiAsyncCollector(
        [StillEnv] * 2, make_policy(3.0), frames_per_batch=5, total_frames=-1, replay_buffer=buffer
    )
    running.start()
    while not all(buffer.storage.written):
        assert (buffer.sample()["action"] == 3.0).all()
    running.shutdown()
    assert buffer.storage.dropped == (0, 0)
    buffer.storage.close()


def test_one_write_before_sharing_makes_the_schema_known():
    with RolloutRingStorage(2, writers=2) as storage:
        storage.write(make_rollout(1))
        with spawned(claim_and_die, storage) as (_, pipe):
            assert receive(pipe) == "claimed"


def test_a_killed_writer_is_recovered_and_replaced_while_leases_and_rollouts_stay():
    with RolloutRingStorage(2, example=make_rollout(), writers=2, overflow="block") as storage:
        storage.use_writer(0)
        storage.write_all([make_rollout(1), make_rollout(2)])
        lease = storage.acquire()
        with spawned(claim_and_die, storage) as (process, pipe):
            receive(pipe)
            with pytest.raises(RuntimeError, match=f"process {process.pid} is alive"):
                storage.recover(1)
            process.kill()
            process.join(DEADLINE)
            with pytest.raises(ConfigError, match="recover those of the dead"):
                storage.use_writer(1)
            assert (storage.recover(1), storage.recover(1)) == (1, 0)
        assert (storage.lost, storage.written) == ((0, 0), (2, 0))
        assert len(storage) == storage.ring.available(0) == 1
        storage.use_writer(1)
        storage.write(make_rollout(3))
        assert values(storage[:]) == [2, 3]
        assert values(lease.rollout.unsqueeze(0)) == [1]


def test_what_a_killed_writer_had_counted_and_not_handed_over_is_lost():
    with RolloutRingStorage(2, example=make_rollout()) as storage:
        with spawned(commit_and_die, storage) as (process, pipe):
            receive(pipe)
            process.join(DEADLINE)
        revision = storage._mutation_revision
        assert storage.recover(0) == 1
        assert (storage.written, storage.lost, len(storage)) == ((1,), (1,), 0)
        assert storage._mutation_revision > revision
        storage.write(make_rollout(1))
        with RolloutRingStorage(2) as other:
            other.load_state_dict(storage.state_dict())
            assert (other.written, other.lost) == ((2,), (1,))
        writer = RolloutRingWriter()
        writer.register_storage(storage)
        writer._empty()
        assert (storage.written, storage.lost) == ((0,), (0,))


def commit_and_die(pipe, storage) -> None:
    """Be killed before a rollout is handed to the reader, when it is counted."""
    storage.claim()
    pipe.send("claimed")
    strike_at(storage.ring, 3, lambda: os.kill(os.getpid(), signal.SIGKILL))
    storage.commit()


def test_a_blocked_writer_does_not_keep_the_reader_out_and_one_that_ended_is_not_dead():
    buffer = shared_buffer(writers=1)
    with spawned(fill_blocked, buffer, 8) as (process, pipe):
        receive(pipe)
        assert [values(buffer.sample())[0] for _ in range(8)] == list(range(1, 9))
        assert receive(pipe) == "done"
        process.join(DEADLINE)
        assert not buffer.storage.wait(0.0)
    buffer.storage.close()
