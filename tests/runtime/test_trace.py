from __future__ import annotations

import contextlib
import json
import os
import pickle
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.processes import DEADLINE, receive, spawned
from tests.support.traces import Event, assert_nested, load_events, names, spans
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.runtime import trace
from torchrl_unilab.runtime.trace import Tracer, TraceSettings


@pytest.fixture
def parts(tmp_path, monkeypatch) -> Path:
    """Where processes keep their events until they are merged."""
    directory = tmp_path / "parts"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


@pytest.fixture
def tracer(tmp_path) -> Iterator[Tracer]:
    """A tracer that records to `tmp_path / "trace.json"`."""
    tracer = Tracer()
    tracer.start(tmp_path / "trace.json")
    yield tracer
    tracer.stop(keep=False)


def _stopped(tracer: Tracer) -> list[Event]:
    """Stop, and return all events."""
    path = tracer.stop()
    assert path is not None
    return load_events(path)


def _span_names(tracer: Tracer) -> list[str]:
    return [event["name"] for event in spans(_stopped(tracer))]


def _record(tracer: Tracer, *names: str) -> None:
    for name in names:
        with tracer.span(name):
            pass


def _append(tracer: Tracer, *lines: str) -> None:
    """Append lines to what this process has recorded."""
    settings = tracer.settings()
    assert settings is not None
    with (Path(settings.directory) / f"{os.getpid()}.jsonl").open("a") as part:
        part.writelines(lines)


def test_spans_and_counters_are_written_in_the_trace_event_format(tmp_path, parts):
    path = tmp_path / "new" / "trace.json"
    tracer = Tracer()
    tracer.start(path)
    begin = time.monotonic_ns()
    with tracer.span("update"):
        with tracer.span("sample"):
            tracer.counter("policy_lag", 3)
        _record(tracer, "publish")
    took = (time.monotonic_ns() - begin) / 1e3
    assert not path.exists()

    assert tracer.stop() == path

    assert json.loads(path.read_text())["displayTimeUnit"] == "ms"
    events = load_events(path)
    assert [(event["ph"], event["name"]) for event in events] == [
        ("M", "process_name"),
        ("M", "thread_name"),
        ("X", "update"),
        ("X", "sample"),
        ("C", "policy_lag"),
        ("X", "publish"),
    ]
    pid, tid = os.getpid(), threading.get_native_id()
    assert {(event["pid"], event["tid"]) for event in events} == {(pid, 0), (pid, tid)}
    assert names(events) == {(pid, 0): "learner", (pid, tid): "main"}
    assert events[4]["args"] == {"value": 3.0}
    assert 0 < events[5]["dur"] <= events[2]["dur"] <= took
    assert 0 < events[5]["tdur"] <= events[2]["tdur"] <= took
    assert_nested(events)
    assert list(parts.iterdir()) == []


def test_off_nothing_is_recorded_and_no_file_is_made(parts):
    tracer = Tracer()
    assert tracer.span("update") is tracer.span("sample")
    _record(tracer, "update")
    tracer.counter("policy_lag", 1)
    tracer.join(tracer.settings(), "collector 0")
    assert (tracer.settings(), tracer.stop()) == (None, None)
    assert list(parts.iterdir()) == []


def test_after_the_stop_nothing_is_recorded(tmp_path, tracer):
    tracer.stop()
    _record(tracer, "too late")
    assert [event["ph"] for event in load_events(tmp_path / "trace.json")] == ["M"]


def test_what_fails_in_a_span_is_recorded_and_raised(tracer):
    with pytest.raises(LookupError), tracer.span("update"):
        raise LookupError
    assert _span_names(tracer) == ["update"]


def test_a_trace_that_is_not_kept_leaves_nothing(tmp_path, parts):
    tracer = Tracer()
    tracer.start(tmp_path / "run" / "trace.json")
    assert (tracer.stop(keep=False), tracer.stop()) == (None, None)
    assert list(parts.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["parts"]


def test_a_trace_replaces_the_one_before_and_starts_anew(tmp_path, tracer):
    _record(tracer, "first")
    tracer.stop()
    tracer.start(tmp_path / "trace.json")
    _record(tracer, "second")
    assert _span_names(tracer) == ["second"]


def test_what_cannot_work_is_refused_before_anything_is_made(tmp_path, parts):
    tracer = Tracer()
    with pytest.raises(ConfigError, match="expected a file"):
        tracer.start(tmp_path)
    assert list(parts.iterdir()) == []
    tracer.start(tmp_path / "trace.json")
    with pytest.raises(RuntimeError, match="Stop it first"):
        tracer.start(tmp_path / "other.json")
    with pytest.raises(RuntimeError, match="Stop it first"):
        tracer.join(tracer.settings(), "collector 0")
    assert len(list(parts.iterdir())) == 1
    tracer.stop(keep=False)


def test_a_trace_that_cannot_be_written_leaves_no_part_of_it(tmp_path, tracer):
    path = tmp_path / "trace.json"
    path.mkdir()  # meanwhile
    with pytest.raises(IsADirectoryError):
        tracer.stop()
    assert [*tmp_path.iterdir()] == [path]


def test_a_trace_goes_where_its_path_led_when_it_began(tmp_path, parts, monkeypatch):
    tracer = Tracer()
    monkeypatch.chdir(tmp_path)
    tracer.start("trace.json")
    monkeypatch.chdir(parts)
    assert tracer.stop() == tmp_path / "trace.json"


def test_who_joined_a_trace_ends_its_own_part_and_no_other(tracer):
    _record(tracer, "before")
    joined = Tracer()
    joined.join(tracer.settings(), "collector 0")
    assert joined.stop() is None
    assert _span_names(tracer) == ["before"]


@contextlib.contextmanager
def _tracing() -> Iterator[Tracer]:
    with tempfile.TemporaryDirectory() as directory:
        tracer = Tracer()
        tracer.start(Path(directory) / "trace.json")
        yield tracer


@settings(max_examples=25)
@given(st.lists(st.tuples(st.text(), st.floats())))
def test_any_name_and_any_number_leave_valid_json(given_counters):
    with _tracing() as tracer:
        for name, value in given_counters:
            tracer.counter(name, value)
        written = [(e["name"], e["args"]["value"]) for e in _stopped(tracer) if e["ph"] == "C"]
    finite = [(name, value) for name, value in given_counters if abs(value) < float("inf")]
    assert written == finite


def test_threads_record_at_the_same_time_and_lose_nothing(tracer):
    threads, count = 4, 100
    together = threading.Barrier(threads)

    def work(number: int) -> None:
        together.wait(DEADLINE)
        for _ in range(count):
            with tracer.span(f"work {number}"), tracer.span("inner"):
                pass

    workers = [threading.Thread(target=work, args=(i,), name=f"t{i}") for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(DEADLINE)
    events = _stopped(tracer)
    assert_nested(events)
    found = Counter(
        (names(events)[event["pid"], event["tid"]], event["name"]) for event in spans(events)
    )
    assert found == {
        (f"t{i}", name): count for i in range(threads) for name in ("inner", f"work {i}")
    }


def test_a_process_that_has_too_much_to_tell_is_cut_off_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "MAX_EVENTS", 3)
    tracer = Tracer()
    tracer.start(tmp_path / "trace.json")
    for i in range(10):
        tracer.counter("size", i)
    events = _stopped(tracer)
    assert [event["args"]["value"] for event in events if event["ph"] == "C"] == [0, 1, 2]
    (label,) = [event["args"]["labels"] for event in events if event["name"] == "process_labels"]
    assert "cut off" in label


def test_a_line_that_was_cut_off_is_left_out_and_the_rest_kept(tracer):
    _record(tracer, "whole")
    _append(tracer, '{"ph":"X","na')
    assert _span_names(tracer) == ["whole"]


def test_of_spans_that_begin_together_the_outer_one_comes_first(tracer):
    tracer.counter("known", 1)  # names process and thread
    span = {"ph": "X", "pid": os.getpid(), "tid": threading.get_native_id(), "ts": 9.0}
    for name, dur in [("inner", 1.5), ("outer", 2.5)]:
        _append(tracer, json.dumps({**span, "name": name, "dur": dur, "tdur": dur}) + "\n")
    assert _span_names(tracer) == ["outer", "inner"]


def test_a_full_disk_costs_the_trace_and_not_the_work(tracer):
    _record(tracer, "before")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, tracer._part._file)  # type: ignore[union-attr,arg-type]
    os.close(full)
    with pytest.warns(UserWarning, match="No space left"):
        _record(tracer, "lost")
    _record(tracer, "lost too")
    assert _span_names(tracer) == ["before"]


# Processes


def _collect(pipe: Connection, settings: TraceSettings | None) -> None:
    """A worker: a span when asked to, and then one that does not end."""
    trace.join(settings, "collector 0")
    pipe.send("ready")
    pipe.recv()
    with trace.span("rollout"):
        pass
    trace.counter("size", 7)
    with trace.span("unfinished"):
        pipe.send("within")
        pipe.recv()


def test_all_processes_are_on_one_clock_and_a_killed_one_keeps_its_events(tracer):
    with spawned(_collect, pickle.loads(pickle.dumps(tracer.settings()))) as (process, pipe):
        assert receive(pipe) == "ready"
        with tracer.span("around"):
            pipe.send("go")
            assert receive(pipe) == "within"
        process.kill()
        process.join(DEADLINE)
        child = process.pid
    _record(tracer, "after")
    events = _stopped(tracer)
    assert names(events)[child, 0] == "collector 0"
    found = {event["name"]: event for event in events if event["ph"] != "M"}
    assert set(found) == {"around", "rollout", "size", "after"}
    around, rollout, size = found["around"], found["rollout"], found["size"]
    assert (around["pid"], rollout["pid"], size["pid"]) == (os.getpid(), child, child)
    assert size["args"] == {"value": 7.0}
    begin, end = around["ts"], around["ts"] + around["dur"]
    assert begin <= rollout["ts"] <= rollout["ts"] + rollout["dur"] <= size["ts"] <= end
    assert end <= found["after"]["ts"]


def _traced_parent(pipe: Connection, path: str) -> None:
    """Fork in the middle of a trace; the child says all it can, and stops."""
    trace.start(path)
    with trace.span("parent"):
        child = os.fork()
        if child == 0:
            with trace.span("child"):
                trace.counter("child", 1)
            kept = trace.settings() is None and trace.stop() is None
            os._exit(0 if kept else 1)
        _, status = os.waitpid(child, 0)
    trace.stop()
    pipe.send(status)


def test_a_forked_child_is_no_part_of_the_trace_and_does_not_end_it(tmp_path):
    path = tmp_path / "trace.json"
    with spawned(_traced_parent, str(path)) as (_, pipe):
        assert receive(pipe) == 0
    assert [event["name"] for event in spans(load_events(path))] == ["parent"]
