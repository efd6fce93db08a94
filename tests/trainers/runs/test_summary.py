from __future__ import annotations

import json
import math
from pathlib import Path
from unittest.mock import Mock

import pytest
from matplotlib.figure import Figure

from torchrl_unilab.trainers.evaluation import Evaluation
from torchrl_unilab.trainers.runs.summary import plot_returns, summarised_frames, write_summary


def test_figures_that_json_does_not_know_are_null(tmp_path):
    run = {"env": "Hopper-v5", "algo": "sac", "seed": 0, "curve": [(1.0, 9, 2.0)]}
    run["evaluations"] = []
    write_summary(tmp_path, run | {"eval_return": -math.inf, "busy": [math.nan, 0.5]})
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written == run | {"curve": [[1.0, 9, 2.0]], "eval_return": None, "busy": [None, 0.5]}


def test_a_summary_that_cannot_be_written_whole_leaves_the_one_before(tmp_path, monkeypatch):
    run = {"env": "Hopper-v5", "algo": "sac", "seed": 0, "curve": [], "evaluations": []}
    write_summary(tmp_path, run)
    monkeypatch.setattr(Path, "replace", Mock(side_effect=OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_summary(tmp_path, run | {"seed": 1})
    assert json.loads((tmp_path / "summary.json").read_text()) == run


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"interrupted": false, "frames": null}',
        '{"interrupted": false, "frames": 1e999}',
        '{"interrupted": true, "frames": 96}',
    ],
)
def test_a_damaged_summary_or_one_of_an_interrupted_run_states_no_frames(text, tmp_path):
    assert summarised_frames(tmp_path) == 0
    (tmp_path / "summary.json").write_text(text)
    assert summarised_frames(tmp_path) == 0


def test_evaluations_are_drawn_beside_the_curve(tmp_path):
    curve = [(1.0, 100, 5.0), (2.0, 200, 6.0)]
    pictures = []
    for evaluations in ([], [], [Evaluation(150, 3, 7.0, 9.0)]):
        plot_returns(tmp_path / "returns.png", "title", curve, evaluations)
        pictures.append((tmp_path / "returns.png").read_bytes())
    assert pictures[0] == pictures[1] != pictures[2]


def test_a_run_that_learnt_nothing_has_a_picture(tmp_path):
    plot_returns(tmp_path / "returns.png", "nothing learnt", [])
    assert (tmp_path / "returns.png").read_bytes().startswith(b"\x89PNG")


def test_the_return_is_drawn_over_seconds_and_frames_and_evaluations_over_frames(
    tmp_path, monkeypatch: pytest.MonkeyPatch
):
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    curve = [(1.0, 100, 5.0), (2.0, 200, 6.0)]
    for evaluations, points in (([], []), ([Evaluation(150, 3, 7.0, 9.0)], [[[150, 7]]])):
        plot_returns(tmp_path / "returns.png", "title", curve, evaluations)
        figure = drawn[-1]
        lines = [[line.get_xydata().tolist() for line in axis.lines] for axis in figure.axes]
        assert lines == [[[[1, 5], [2, 6]]], [[[100, 5], [200, 6]], *points]]
    assert [axis.get_xlabel() for axis in figure.axes] == ["seconds", "frames"]
    assert figure.get_suptitle() == "title"
