from __future__ import annotations

import json
import os
import pickle
import signal
import tempfile
import threading
import time
from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.processes import DEADLINE, receive, spawned
from tests.support.traces import assert_nested, load_events, names, spans
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


def _record(path: Path) -> Tracer:
    tracer = Tracer()
    tracer.start(path)
    return tracer


def test_spans_and_counters_are_written_in_the_trace_event_format(tmp_path, parts):
    path = tmp_path / "new" / "trace.json"
    tracer = _record(path)
    begin = time.monotonic_ns()
    with tracer.span("update"):
        with tracer.span("sample"):
            tracer.counter("policy_lag", 3)
        with tracer.span("publish"):
            time.sleep(0.002)
    took = (time.monotonic_ns() - begin) / 1e3
    assert not path.exists()
    assert tracer.stop() == path
    whole = json.loads(path.read_text())
    assert whole["displayTimeUnit"] == "ms"
    events = load_events(path)
    assert [(event["ph"], event["name"]) for event in events] == [
        ("M", "process_name"),
        ("M", "thread_name"),
        ("X", "update"),
        ("X", "sample"),
        ("C", "policy_lag"),
        ("X", "publish"),
    ]
    assert {event["pid"] for event in events} == {os.getpid()}
    assert {event["tid"] for event in events} == {0, threading.get_native_id()}
    assert names(events) == {(os.getpid(), 0): "learner", (os.getpid(), events[1]["tid"]): "main"}
    assert events[4]["args"] == {"value": 3.0}
    publish = events[5]
    assert 2000 <= publish["dur"] <= events[2]["dur"] <= took
    assert_nested(events)
    assert list(parts.iterdir()) == []


def test_off_nothing_is_recorded_and_no_file_is_made(tmp_path, parts):
    tracer = Tracer()
    assert tracer.span("update") is tracer.span("sample")
    with tracer.span("update"):
        tracer.counter("policy_lag", 1)
    assert tracer.settings() is None
    tracer.join(tracer.settings(), "collector 0")
    assert tracer.stop() is None
    assert list(parts.iterdir()) == []
    tracer.start(tmp_path / "trace.json")
    tracer.stop()
    with tracer.span("too late"):
        pass
    assert [event["ph"] for event in load_events(tmp_path / "trace.json")] == ["M"]


def test_what_fails_in_a_span_is_recorded_and_raised(tmp_path):
    tracer = _record(tmp_path / "trace.json")
    with pytest.raises(LookupError), tracer.span("update"):
        raise LookupError
    tracer.stop()
    assert [event["name"] for event in spans(load_events(tmp_path / "trace.json"))] == ["update"]


def test_a_trace_that_is_not_kept_leaves_nothing(tmp_path, parts):
    tracer = _record(tmp_path / "run" / "trace.json")
    assert tracer.stop(keep=False) is None
    assert list(parts.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["parts"]
    assert tracer.stop() is None


def test_a_trace_replaces_the_one_before_and_starts_anew(tmp_path):
    path = tmp_path / "trace.json"
    for name in ("first", "second"):
        tracer = _record(path)
        with tracer.span(name):
            pass
        tracer.stop()
    assert [event["name"] for event in spans(load_events(path))] == ["second"]


def test_what_cannot_work_is_refused_before_anything_is_made(tmp_path, parts):
    tracer = Tracer()
    with pytest.raises(ConfigError, match="expected a file"):
        tracer.start(tmp_path)
    assert list(parts.iterdir()) == []
    tracer.start(tmp_path / "trace.json")
    with pytest.raises(RuntimeError, match="Stop it first"):
        tracer.start(tmp_path / "other.json")
    assert len(list(parts.iterdir())) == 1
    tracer.stop(keep=False)


@given(st.lists(st.tuples(st.text(), st.floats())))
def test_any_name_and_any_number_leave_valid_json(given_counters):
    with tempfile.TemporaryDirectory() as directory:
        tracer = _record(Path(directory) / "trace.json")
        for name, value in given_counters:
            tracer.counter(name, value)
        path = tracer.stop()
        assert path is not None
        written = [(e["name"], e["args"]["value"]) for e in load_events(path) if e["ph"] == "C"]
    finite = [(name, value) for name, value in given_counters if abs(value) < float("inf")]
    assert written == finite


def _tree(tracer: Tracer, children: Any) -> None:
    for child in children:
        with tracer.span("node"):
            _tree(tracer, child)


def _size(children: Any) -> int:
    return sum(1 + _size(child) for child in children)


@given(st.recursive(st.just([]), st.lists, max_leaves=20))
def test_spans_of_a_thread_are_nested_as_the_code_is(tree):
    with tempfile.TemporaryDirectory() as directory:
        tracer = _record(Path(directory) / "trace.json")
        _tree(tracer, tree)
        path = tracer.stop()
        assert path is not None
        events = load_events(path)
    assert len(spans(events)) == _size(tree)
    assert_nested(events)


def test_threads_record_at_the_same_time_and_lose_nothing(tmp_path):
    threads, count = 4, 500
    tracer = _record(tmp_path / "trace.json")
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
    tracer.stop()
    events = load_events(tmp_path / "trace.json")
    assert_nested(events)
    by_thread = defaultdict(list)
    for event in spans(events):
        by_thread[names(events)[event["pid"], event["tid"]]].append(event["name"])
    assert set(by_thread) == {f"t{i}" for i in range(threads)}
    for i in range(threads):
        assert sorted(by_thread[f"t{i}"]) == ["inner"] * count + [f"work {i}"] * count


def test_a_process_that_has_too_much_to_tell_is_cut_off_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "MAX_EVENTS", 3)
    tracer = _record(tmp_path / "trace.json")
    for i in range(10):
        tracer.counter("size", i)
    tracer.stop()
    events = load_events(tmp_path / "trace.json")
    assert [event["args"]["value"] for event in events if event["ph"] == "C"] == [0, 1, 2]
    (label,) = [event["args"]["labels"] for event in events if event["name"] == "process_labels"]
    assert "cut off" in label


def test_a_line_that_was_cut_off_is_left_out_and_the_rest_kept(tmp_path):
    tracer = _record(tmp_path / "trace.json")
    with tracer.span("whole"):
        pass
    settings = tracer.settings()
    assert settings is not None
    with (Path(settings.directory) / f"{os.getpid()}.jsonl").open("a") as part:
        part.write('{"ph":"X","na')
    tracer.stop()
    assert [event["name"] for event in spans(load_events(tmp_path / "trace.json"))] == ["whole"]


def test_of_spans_that_begin_together_the_outer_one_comes_first(tmp_path):
    tracer = _record(tmp_path / "trace.json")
    tracer.counter("known", 1)  # names process and thread
    settings, ids = tracer.settings(), (os.getpid(), threading.get_native_id())
    assert settings is not None
    with (Path(settings.directory) / f"{os.getpid()}.jsonl").open("a") as part:
        for name, dur in [("inner", 1.5), ("outer", 2.5)]:
            span = {"ph": "X", "name": name, "pid": ids[0], "tid": ids[1], "ts": 9.0, "dur": dur}
            part.write(json.dumps(span) + "\n")
    tracer.stop()
    found = [event["name"] for event in spans(load_events(tmp_path / "trace.json"))]
    assert found == ["outer", "inner"]


def test_a_full_disk_costs_the_trace_and_not_the_work(tmp_path):
    tracer = _record(tmp_path / "trace.json")
    with tracer.span("before"):
        pass
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, tracer._part._file)  # type: ignore[union-attr,arg-type]
    os.close(full)
    with pytest.warns(UserWarning, match="No space left"), tracer.span("lost"):
        pass
    with tracer.span("lost too"):
        pass
    tracer.stop()
    assert [event["name"] for event in spans(load_events(tmp_path / "trace.json"))] == ["before"]


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


def test_all_processes_are_on_one_clock_and_a_killed_one_keeps_its_events(tmp_path):
    tracer = _record(tmp_path / "trace.json")
    with spawned(_collect, pickle.loads(pickle.dumps(tracer.settings()))) as (process, pipe):
        assert receive(pipe) == "ready"
        with tracer.span("around"):
            pipe.send("go")
            assert receive(pipe) == "within"
        os.kill(process.pid, signal.SIGKILL)
        process.join(DEADLINE)
        child = process.pid
    with tracer.span("after"):
        pass
    tracer.stop()
    events = load_events(tmp_path / "trace.json")
    assert names(events)[child, 0] == "collector 0"
    found = {event["name"]: event for event in spans(events)}
    assert set(found) == {"around", "rollout", "after"}
    around, rollout = found["around"], found["rollout"]
    assert (around["pid"], rollout["pid"]) == (os.getpid(), child)
    assert around["ts"] <= rollout["ts"]
    assert rollout["ts"] + rollout["dur"] <= around["ts"] + around["dur"] <= found["after"]["ts"]
    (size,) = [event for event in events if event["ph"] == "C"]
    assert (size["pid"], size["args"]) == (child, {"value": 7.0})
    assert rollout["ts"] <= size["ts"] <= around["ts"] + around["dur"]


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
