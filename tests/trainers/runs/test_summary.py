from __future__ import annotations

import contextlib
import importlib.util
import json
import os

import pytest
import torch
from torchrl.record.loggers import CSVLogger, Logger

from torchrl_unilab.errors import ConfigError
from torchrl_unilab.trainers.evaluation import Evaluation
from torchrl_unilab.trainers.runs import summary
from torchrl_unilab.trainers.runs.summary import (
    RunLogger,
    check_loggers,
    cut_logs,
    package_versions,
    plot_returns,
    run_logger,
)


def test_logs_are_cut_after_the_frames_of_a_checkpoint_and_where_a_line_is_torn(tmp_path):
    scalars = tmp_path / "scalars"
    scalars.mkdir()
    (scalars / "return.csv").write_text("10,1.0\n20,2.0\n30,3.0\n40")
    (scalars / "lr.csv").write_text("10,0.1\n")

    cut_logs(tmp_path, 20)

    assert sorted(os.listdir(scalars)) == ["lr.csv", "return.csv"]
    assert (scalars / "return.csv").read_text() == "10,1.0\n20,2.0\n"
    assert (scalars / "lr.csv").read_text() == "10,0.1\n"


def test_without_logs_there_is_nothing_to_cut(tmp_path):
    cut_logs(tmp_path / "none", 20)
    assert not list(tmp_path.iterdir())


def test_the_picture_of_an_empty_curve_is_a_picture(tmp_path):
    plot_returns(tmp_path / "returns.png", "nothing learnt", [])
    assert (tmp_path / "returns.png").read_bytes().startswith(b"\x89PNG")


def test_evaluations_are_drawn_beside_the_curve(tmp_path):
    curve = [(1.0, 100, 5.0), (2.0, 200, 6.0)]
    pictures = []
    for evaluations in ([], [], [Evaluation(150, 3, 7.0, 9.0)]):
        plot_returns(tmp_path / "returns.png", "title", curve, evaluations)
        pictures.append((tmp_path / "returns.png").read_bytes())
    assert pictures[0] == pictures[1] != pictures[2]


def test_versions_name_what_figures_depend_on():
    assert set(json.loads(json.dumps(package_versions()))) == {
        "torchrl-unilab",
        "torchrl",
        "tensordict",
        "torch",
        "mujoco",
        "gymnasium",
    }


class _Kept(Logger):
    """A logger that keeps what it is given."""

    def __init__(self, exp_name: str, log_dir: str) -> None:
        self.kept: list[tuple[object, ...]] = []
        super().__init__(exp_name, log_dir)

    def _create_experiment(self) -> None: ...

    def log_scalar(self, name: str, value: float, step: int | None = None) -> None:
        self.kept.append((name, value, step))

    def log_video(self, name: str, video: torch.Tensor, step: int | None = None) -> None:
        self.kept.append((name, step))

    def log_hparams(self, cfg: dict) -> None:
        self.kept.append(tuple(cfg.items()))

    def log_histogram(self, name: str, data: list, **options: object) -> None:
        self.kept.append((name, *data))

    def close(self, timeout: float | None = None) -> None:
        self.kept.append(("closed",))

    def __repr__(self) -> str:
        return "kept"


def test_each_logger_of_a_run_gets_all_that_is_logged(tmp_path):
    both = [_Kept("a", "b"), _Kept("c", "d")]
    logger = RunLogger(tmp_path, both)
    logger.log_scalar("return", 1.5, step=7)
    logger.log_hparams({"lr": 0.1, "hidden": (8, 4), "env": "Hopper-v5", "slots": None})
    logger.log_video("video", torch.zeros(1), step=8)
    logger.log_histogram("histogram", [1, 2])
    logger.close()
    settings = (("lr", 0.1), ("hidden", "(8, 4)"), ("env", "Hopper-v5"), ("slots", "None"))
    expected = [("return", 1.5, 7), settings, ("video", 8), ("histogram", 1, 2), ("closed",)]
    assert [one.kept for one in both] == [expected, expected]


def test_a_histogram_is_not_written_where_there_is_no_place_for_it(tmp_path):
    RunLogger(tmp_path, [CSVLogger("logs", log_dir=str(tmp_path))]).log_histogram("h", [1.0])


def test_other_loggers_are_made_by_torchrl_of_the_run_s_name(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(summary, "get_logger", lambda *asked: made.append(asked) or _Kept("", ""))
    with contextlib.ExitStack() as closing:
        logger = run_logger(tmp_path, ["wandb", "mlflow"], closing, None)
    assert made == [(name, str(tmp_path), tmp_path.name) for name in ("wandb", "mlflow")]
    assert [one.kept for one in logger.loggers] == [[("closed",)]] * 2


def test_a_logger_whose_package_is_not_installed_is_refused_with_the_pip_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else 1)
    with pytest.raises(ConfigError, match=r"logger: no package wandb .* pip install wandb\."):
        check_loggers(["csv", "tensorboard", "wandb"])
