from __future__ import annotations

import math
from types import SimpleNamespace

from torchrl_unilab.trainers.progress import ProgressLines, StopWhen


def _curve(seconds: float = 0.0, mean: float = math.nan) -> SimpleNamespace:
    return SimpleNamespace(seconds=seconds, mean=mean)


def _registered(hook) -> tuple[SimpleNamespace, list[str]]:
    stopped: list[str] = []
    trainer = SimpleNamespace(
        collected_frames=0,
        total_frames=4000,
        register_op=lambda *_: None,
        register_module=lambda *_: None,
        request_stop=stopped.append,
    )
    hook.register(trainer)
    return trainer, stopped


def test_a_line_is_told_every_so_many_seconds():
    curve, told = _curve(), []
    hook = ProgressLines(curve, told.append, every=10.0)
    trainer, _ = _registered(hook)
    for seconds, frames, mean in [(5, 500, math.nan), (11, 1000, math.nan), (15, 1500, 2.5)]:
        curve.seconds, curve.mean, trainer.collected_frames = float(seconds), mean, frames
        assert hook() == {}
    curve.seconds, trainer.collected_frames = 21.0, 2000
    hook()
    assert told == [
        "1,000 of 4,000 frames, 91 frames/s, no episode has ended, 33 s left",
        "2,000 of 4,000 frames, 95 frames/s, return 2.5, 21 s left",
    ]


def test_training_stops_once_the_return_is_reached_and_not_before():
    curve = _curve()
    hook = StopWhen(curve, stop_at=2.0)
    _, stopped = _registered(hook)
    hook()  # no episode has ended
    for mean, expected in [(1.9, []), (2.0, ["return 2 reached"])]:
        curve.mean = mean
        assert hook() == {}
        assert stopped == expected


def test_training_stops_once_the_time_is_up_and_not_before():
    curve = _curve()
    hook = StopWhen(curve, max_seconds=60.0)
    _, stopped = _registered(hook)
    for seconds, expected in [(59.0, []), (60.0, ["60 seconds are over"])]:
        curve.seconds = seconds
        hook()
        assert stopped == expected
    without = StopWhen(curve)
    _, stopped = _registered(without)
    curve.mean = 1e9
    without()
    assert stopped == []
