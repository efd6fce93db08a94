from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from torchrl_unilab.trainers.evaluation import Evaluation
from torchrl_unilab.trainers.runs.summary import plot_returns, summarised_frames


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


def test_a_run_that_learnt_nothing_has_a_picture(tmp_path):
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
