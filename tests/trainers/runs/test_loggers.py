from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
from unittest.mock import Mock, call

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from tests.support.descriptors import may_open
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.trainers.runs import loggers
from torchrl_unilab.trainers.runs.loggers import RunLogger, check_loggers, cut_logs, run_logger


def test_logs_are_cut_after_the_frames_of_a_checkpoint_and_where_a_line_is_torn(tmp_path):
    scalars = tmp_path / "scalars"
    scalars.mkdir()
    (scalars / "return.csv").write_text("10,1.0\n20,2.0\n30,3.0\n40")
    (scalars / "time").mkdir()
    (scalars / "time" / "lr.csv").write_text("10,0.1\n")
    (scalars / "torn.csv").write_text("10,0.")

    assert cut_logs(tmp_path, 20) == {"return": 20, "time/lr": 10}

    assert sorted(os.listdir(scalars)) == ["return.csv", "time", "torn.csv"]
    assert (scalars / "return.csv").read_text() == "10,1.0\n20,2.0\n"
    assert (scalars / "time" / "lr.csv").read_text() == "10,0.1\n"


def test_without_logs_there_is_nothing_to_cut(tmp_path):
    assert cut_logs(tmp_path / "none", 20) == {}
    assert not list(tmp_path.iterdir())


def test_a_run_that_may_open_no_more_logs_says_so(tmp_path):
    with contextlib.ExitStack() as closing:
        logger = run_logger(tmp_path, ["csv"], closing, None)
        message = r"^logs: too many open files .*`ulimit -n`, or set logger without csv"
        with may_open(0), pytest.raises(ConfigError, match=message):
            logger.log_scalar("return", 1.0, step=1)


def test_each_logger_of_a_run_gets_all_that_is_logged(tmp_path):
    both = [Mock(), Mock()]
    logger = RunLogger(tmp_path, both, {"return": 5})
    logger.log_scalar("return", 1.25, step=5)  # there is one of this step
    for _ in range(2):
        logger.log_scalar("return", 1.5, step=7)
    logger.log_hparams({"lr": 0.1, "hidden": (8, 4), "env": "Hopper-v5", "slots": None})
    logger.close()
    settings = {"lr": 0.1, "hidden": "(8, 4)", "env": "Hopper-v5", "slots": "None"}
    expected = [call.log_scalar("return", 1.5, step=7), call.log_hparams(settings), call.close()]
    assert [one.mock_calls for one in both] == [expected, expected]


def test_other_loggers_are_made_by_torchrl_of_the_run_s_name(tmp_path, monkeypatch):
    monkeypatch.setattr(loggers, "get_logger", get := Mock())
    with contextlib.ExitStack() as closing:
        logger = run_logger(tmp_path, ["wandb", "mlflow"], closing, None)
    asked = [call(name, str(tmp_path), tmp_path.name) for name in ("wandb", "mlflow")]
    assert get.call_args_list == asked
    assert logger.loggers == [get.return_value] * 2
    assert get.return_value.mock_calls == [call.close()] * 2


def test_a_logger_whose_package_is_not_installed_is_refused_with_the_pip_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "wandb" else Mock())
    with pytest.raises(ConfigError, match=r"logger: no package wandb .* pip install wandb\."):
        check_loggers(["csv", "tensorboard", "wandb"])


def test_a_directory_of_a_logger_s_name_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "no_logger").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="logger: no package no_logger"):
        check_loggers(["no_logger"])


@pytest.mark.parametrize(("error", "raised"), [(None, OSError), (ValueError, ValueError)])
def test_a_full_disk_at_the_end_is_an_error_unless_there_was_another_one(
    tmp_path, monkeypatch, error, raised
):
    logger = Mock(**{"close.side_effect": OSError(28, "No space left on device")})
    monkeypatch.setattr(loggers, "get_logger", lambda *_: logger)
    closing = contextlib.ExitStack()
    run_logger(tmp_path, ["wandb"], closing, None)
    closing.callback(Mock(side_effect=error))  # before it closes
    with pytest.raises(raised):
        closing.close()
    assert logger.close.called


def test_tensorboard_shows_what_was_logged_up_to_the_checkpoint_and_what_came_after(
    tmp_path, monkeypatch
):
    # TensorBoard reads files in the order of the seconds in their names; then 10 comes before 9.
    monkeypatch.setattr(event_file_writer, "time", Mock(time=itertools.count(10**9).__next__))
    for resumed_at, steps in ((None, (5, 7, 9)), (7, (8, 10))):
        with contextlib.ExitStack() as closing:
            logger = run_logger(tmp_path, ["tensorboard"], closing, resumed_at)
            for step in steps:
                logger.log_scalar("return", 1.0, step=step)
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in shown.Scalars("return")] == [5, 7, 8, 10]
