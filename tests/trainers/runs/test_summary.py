from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from torchrl_unilab.trainers.evaluation import Evaluation
from torchrl_unilab.trainers.runs.summary import plot_returns


def test_evaluations_are_drawn_beside_the_curve(tmp_path):
    curve = [(1.0, 100, 5.0), (2.0, 200, 6.0)]
    pictures = []
    for evaluations in ([], [], [Evaluation(150, 3, 7.0, 9.0)]):
        plot_returns(tmp_path / "returns.png", "title", curve, evaluations)
        pictures.append((tmp_path / "returns.png").read_bytes())
    assert pictures[0] == pictures[1] != pictures[2]
    plot_returns(tmp_path / "returns.png", "nothing learnt", [])
    assert (tmp_path / "returns.png").read_bytes().startswith(b"\x89PNG")


def test_the_return_is_drawn_over_seconds_and_frames_and_evaluations_over_frames(
    tmp_path, monkeypatch: pytest.MonkeyPatch
):
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    curve = [(1.0, 100, 5.0), (2.0, 200, 6.0)]
    plot_returns(tmp_path / "returns.png", "title", curve, [Evaluation(150, 3, 7.0, 9.0)])
    (figure,) = drawn
    lines = [[line.get_xydata().tolist() for line in axis.lines] for axis in figure.axes]
    assert lines == [[[[1, 5], [2, 6]]], [[[100, 5], [200, 6]], [[150, 7]]]]
    assert [axis.get_xlabel() for axis in figure.axes] == ["seconds", "frames"]
    assert figure.get_suptitle() == "title"
