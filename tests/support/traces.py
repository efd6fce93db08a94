"""Reads what a trace says, and checks what every trace must be."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]
_KEYS = {"M": {"args"}, "X": {"dur", "tdur"}, "C": {"args"}}


def load_events(path: Path) -> list[Event]:
    """The events of a file, which are in order and have all that the format asks for."""
    events: list[Event] = json.loads(path.read_text())["traceEvents"]
    for event in events:
        assert set(event) == {"ph", "name", "pid", "tid", "ts"} | _KEYS[event["ph"]]
        assert event["ts"] >= 0.0
        assert event.get("dur", 0.0) >= 0.0
    timed = [event["ph"] != "M" for event in events]
    assert timed == sorted(timed)
    times = [event["ts"] for event in events]
    assert times == sorted(times)
    named = names(events)
    for event in spans(events):
        assert {(event["pid"], 0), (event["pid"], event["tid"])} <= named.keys()
    return events


def spans(events: list[Event]) -> list[Event]:
    """The spans, by their beginning."""
    return [event for event in events if event["ph"] == "X"]


def names(events: list[Event]) -> dict[tuple[int, int], str]:
    """Process and thread to its name; thread 0 is the process itself."""
    kinds = ("process_name", "thread_name")
    return {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in events
        if e["ph"] == "M" and e["name"] in kinds
    }


def assert_nested(events: list[Event]) -> None:
    """Of two spans of a thread, one lies within the other, or after it."""
    by_thread = itertools.groupby(
        sorted(spans(events), key=lambda e: (e["pid"], e["tid"], e["ts"], -e["dur"])),
        key=lambda e: (e["pid"], e["tid"]),
    )
    for _, of_thread in by_thread:
        ends: list[int] = []
        for event in of_thread:
            begin = round(event["ts"] * 1e3)
            end = begin + round(event["dur"] * 1e3)
            while ends and ends[-1] <= begin:
                ends.pop()
            assert not ends or end <= ends[-1], event
            ends.append(end)
