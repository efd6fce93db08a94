from __future__ import annotations

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
