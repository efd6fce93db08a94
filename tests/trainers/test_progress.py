from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest

from torchrl_unilab.trainers.progress import can_draw, log_progress, stop_when


def _trainer() -> SimpleNamespace:
    """As much of a trainer as the hooks see; `look` is what they registered."""
    trainer = SimpleNamespace(
        collected_frames=0,
        total_frames=4000,
        returns=SimpleNamespace(seconds=0.0, mean=math.nan),
        stopped=[],
    )
    trainer.request_stop = trainer.stopped.append
    trainer.register_op = lambda stage, hook: setattr(trainer, "look", hook)
    return trainer


@pytest.mark.parametrize(
    ("stream", "terminal"),
    [
        (None, False),
        (SimpleNamespace(write=print), False),
        (SimpleNamespace(isatty=lambda: False), False),
        (SimpleNamespace(isatty=lambda: True), True),
    ],
)
def test_what_a_script_puts_in_place_of_standard_error_is_a_terminal_if_it_says_so(
    stream, terminal, monkeypatch
):
    monkeypatch.setattr(sys, "stderr", stream)
    assert can_draw() is terminal


@pytest.mark.parametrize(("shell", "drawn"), [(object(), True), (None, False)])
def test_a_bar_is_drawn_in_a_notebook_and_not_where_ipython_is_only_imported(
    shell, drawn, monkeypatch
):
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert can_draw() is drawn


def test_a_line_is_logged_every_ten_seconds():
    trainer, told = _trainer(), []
    log_progress(trainer, told.append)
    for seconds, frames, mean in [
        (5, 500, math.nan),
        (11, 1000, math.nan),
        (15, 1500, 2.5),
        (21, 2000, 2.5),  # faster than in the first eleven seconds
        (31, 2000, 2.5),
        (41, 4100, 2.5),  # the last rollout may bring more frames than asked for
    ]:
        trainer.returns = SimpleNamespace(seconds=float(seconds), mean=mean)
        trainer.collected_frames = frames
        trainer.look(None)
    assert told == [
        "1,000 of 4,000 frames, 91 frames/s, no episode has ended, 33 s left",
        "2,000 of 4,000 frames, 100 frames/s, return 2.5, 20 s left",
        "2,000 of 4,000 frames, 0 frames/s, return 2.5, inf s left",
        "4,100 of 4,000 frames, 210 frames/s, return 2.5, 0 s left",
    ]


@pytest.mark.parametrize(
    ("limits", "before", "after", "reason"),
    [
        ((2.0, None), (1.0, math.nan), (1.0, 2.0), "return 2 reached"),
        ((2.0, 60.0), (1.0, 1.9), (1.0, 2.0), "return 2 reached"),
        ((None, 60.0), (59.0, 1e9), (60.0, 1e9), "60 seconds are over"),
    ],
)
def test_training_stops_at_a_limit_and_not_before(limits, before, after, reason):
    trainer = _trainer()
    stop_when(trainer, *limits)
    for (seconds, mean), stopped in [(before, []), (after, [reason])]:
        trainer.returns = SimpleNamespace(seconds=seconds, mean=mean)
        trainer.look(None)
        assert trainer.stopped == stopped
