"""What a pipeline does after it has dropped a batch."""

from __future__ import annotations

from tests.support.transitions import transitions
from torchrl_unilab.data import DoubleBufferReplayPipeline, PackedReplayStorage
from torchrl_unilab.data.replay.gather import ReplaySnapshot


def test_the_next_batch_may_wait_for_rows_too(monkeypatch):
    with PackedReplayStorage(16, example=transitions(1)[0]) as storage:
        storage.append(transitions(3))
        look = storage.snapshot

        def look_then_write() -> ReplaySnapshot:
            found = look()
            storage.append(transitions(1))
            return found

        with DoubleBufferReplayPipeline(storage, sample_count=4) as pipeline:
            pipeline.start_prepare(0, 4, min_snapshot_ptr=99)
            pipeline.discard()
            monkeypatch.setattr(storage, "snapshot", look_then_write)
            pipeline.start_prepare(1, 4, min_snapshot_ptr=4)
            pipeline.sample_large_batch(1, 4)
            assert pipeline.last_metadata.snapshot_ptr == 4
