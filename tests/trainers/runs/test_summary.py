from __future__ import annotations

import json
import os

from torchrl_unilab.trainers.runs.summary import cut_logs, package_versions, plot_returns


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


def test_versions_name_what_figures_depend_on():
    assert set(json.loads(json.dumps(package_versions()))) == {
        "torchrl-unilab",
        "torchrl",
        "tensordict",
        "torch",
        "mujoco",
        "gymnasium",
    }
