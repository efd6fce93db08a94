from __future__ import annotations

import dataclasses
import json
import math
import shlex
from typing import Any

import numpy as np
import pytest

from tests.benchmarks import learning_page as page
from tests.benchmarks.learn import RESULTS, parse_settings
from tests.benchmarks.published import levels
from torchrl_unilab.configs import SETTINGS as SETTINGS_OF

SETTINGS = {"lr": 0.001, "hidden": [64, 64], "fused": True}
MACHINE = {"cores": 2, "cpu": "a processor"}


def _run(seed: int, returns: list[float], task: str = "Hopper-v5", **changes: Any) -> dict:
    """A record whose curve has a point every 10 seconds and 1,000 frames."""
    curve = [[10.0 * n, 1000 * n, mean] for n, mean in enumerate(returns, 1)]
    record = {"task": task, "algorithm": "appo", "seed": seed, "frames_asked": 1_000_000}
    record |= {"frames": curve[-1][1], "seconds": curve[-1][0], "curve": curve}
    record |= {"training_return": returns[-1], "gymnasium_returns": [returns[-1] + 1.0] * 10}
    record |= {"eval_return": 0.0, "settings": SETTINGS, "machine": MACHINE, "versions": {"a": "1"}}
    return record | changes


def _group(*runs: dict) -> page.Group:
    first = runs[0]
    return page.Group(first["task"], first["algorithm"], first["frames_asked"], runs)


def _write(directory, *runs: dict) -> None:
    (directory / "some.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))


# Records


def test_runs_of_one_task_algorithm_and_length_are_a_group_by_seed(tmp_path):
    other = _run(0, [5.0], task="Ant-v5")
    _write(tmp_path, _run(2, [1.0]), other, _run(1, [2.0]), _run(1, [3.0], frames_asked=300_000))
    groups = page.load_groups(tmp_path)
    assert [(group.task, group.frames) for group in groups] == [
        ("Ant-v5", 1_000_000),
        ("Hopper-v5", 300_000),
        ("Hopper-v5", 1_000_000),
    ]
    assert [run["seed"] for run in groups[-1].runs] == [1, 2]


def test_runs_with_other_settings_are_not_of_one_group(tmp_path):
    _write(tmp_path, _run(0, [1.0]), _run(1, [1.0], settings={**SETTINGS, "lr": 0.1}))
    with pytest.raises(ValueError, match=r"seeds \[1\] have other settings than seed 0"):
        page.load_groups(tmp_path)


def test_a_setting_that_a_record_does_not_know_was_at_its_default(tmp_path):
    later = {"noise_correlation": 0.0}
    _write(tmp_path, _run(0, [1.0]), _run(1, [1.0], settings=SETTINGS | later))
    [group] = page.load_groups(tmp_path)
    assert [run["settings"]["noise_correlation"] for run in group.runs] == [0.0, 0.0]
    _write(
        tmp_path, _run(0, [1.0]), _run(1, [1.0], settings={**SETTINGS, "noise_correlation": 0.5})
    )
    with pytest.raises(ValueError, match=r"seeds \[1\] have other settings"):
        page.load_groups(tmp_path)


def test_a_seed_that_was_run_twice_is_refused(tmp_path):
    _write(tmp_path, _run(0, [1.0]), _run(0, [2.0]))
    with pytest.raises(ValueError, match=r"seeds \[0, 0\] \(expected each once\)"):
        page.load_groups(tmp_path)


def test_the_returns_of_a_task_that_gymnasium_does_not_have_are_those_in_ours():
    group = _group(_run(0, [1.0], gymnasium_returns=None, eval_return=7.0))
    assert group.without_noise.tolist() == [7.0]


def test_the_records_of_this_repository_can_be_drawn():
    for group in page.load_groups(RESULTS):
        assert np.isfinite([*group.training, *group.without_noise]).all()


# Time to a return


def test_a_return_is_reached_at_the_first_point_at_or_above_it():
    curve = [[1.0, 10, 5.0], [2.0, 20, 7.0], [3.0, 30, 6.0], [4.0, 40, 9.0]]
    assert page.first_reached(curve, 7.0) == (2.0, 20)
    assert page.first_reached(curve, 9.5) == (math.inf, math.inf)


def test_each_task_is_timed_to_the_published_returns_of_ppo_and_of_sac():
    assert levels("Hopper-v5") == {
        "best published PPO": 2609,
        "median published SAC": 2326,
        "best published SAC": 3542,
    }
    assert levels("Reacher-v5") == {"best published PPO": -4.1, "best published SAC": -2.6}
    assert levels("Pusher-v5") == {}


def test_median_and_worst_are_over_all_seeds_and_say_where_a_return_is_not_reached():
    runs = [_run(0, [2609.0, 3600.0]), _run(1, [0.0, 2700.0]), _run(2, [0.0, 2.0, 2800.0])]
    ppo, _, sac = page.time_table([_group(*runs)]).splitlines()[2:]
    assert ppo.endswith("| 20.0 | 30.0 | 2,000 | 3,000 | 3 of 3 |")
    assert sac.endswith(f"| {' | '.join(['not reached'] * 4)} | 1 of 3 |")


def test_runs_that_never_reached_a_return_stand_in_the_table_only_if_none_did():
    short = _group(_run(0, [0.0, 2700.0], frames_asked=300_000))
    long = _group(_run(0, [0.0, 100.0]))
    rows = page.time_table([short, long]).splitlines()[2:]
    assert [row.split(" | ")[4] for row in rows] == ["300,000", "300,000", "-"]
    assert rows[-1].endswith("| not reached | not reached | not reached | not reached | none |")


def test_returns_without_noise_are_timed_where_every_run_has_evaluations():
    evaluated = _run(0, [0.0, 2700.0], evaluations=[[4.0, 400, 2650.0]])
    rows = page.time_table([_group(evaluated)]).splitlines()[2:4]
    assert [row.split(" | ")[2] for row in rows] == ["training", "without noise"]
    assert rows[1].endswith("| 4.0 | 4.0 | 400 | 400 | 1 of 1 |")
    assert _group(evaluated, _run(1, [0.0])).curves.keys() == {"training"}


# The page


def test_the_page_is_written_with_every_seed_and_the_published_numbers(tmp_path, capsys):
    _write(tmp_path, *(_run(seed, [1000.0 + seed, 2000.0 + seed]) for seed in range(100, 105)))
    assert page.main(["--results", str(tmp_path)]) == 0
    text = (tmp_path / "README.md").read_text()
    assert "| 2,100, 2,101, 2,102, 2,103, 2,104 | 2,102 [2,100, 2,104] |" in text
    assert "Tianshou 2,609, Zoo 2,410, CleanRL 2,383" in text
    assert (tmp_path / "learning.png").read_bytes().startswith(b"\x89PNG")


def test_a_peers_run_stands_beside_ours_of_as_many_frames():
    ours = [_group(_run(0, [7.0], frames_asked=n)) for n in (300_000, 1_000_000)]
    peer = {"peer": "SBX appo", "task": "Hopper-v5", "seed": 3, "frames": 300_000, "seconds": 50.0}
    peer |= {"curve": [[1.0, 1, 2.0], [50.0, 300_000, 4.0]], "gymnasium_returns": [5.0, 6.0]}
    [row] = page.peers_table(ours, [peer]).splitlines()[2:]
    assert row == "| Hopper-v5 | appo | 300,000 | SBX | 3 | 4.0 | 5.5 | 7.0 | 8.0 |"
    assert page.peers_table(ours, [peer | {"frames": 100_000}]) == ""
    del peer["gymnasium_returns"]  # as of one of ours
    assert page.peers_table(ours, [peer]) == ""


def test_without_records_there_is_no_page(tmp_path, capsys):
    assert page.main(["--results", str(tmp_path)]) == 2
    assert "no records in" in capsys.readouterr().err


def test_a_mean_is_bold_from_the_best_published_return_on():
    assert page.summarised(np.array([2609.0]), 2609.0) == "**2,609**"
    assert page.summarised(np.array([2608.0]), 2609.0) == "2,608"


def test_a_mean_of_more_than_a_million_frames_is_not_bold():
    groups = [_group(_run(0, [9e9], frames_asked=n)) for n in (1_000_000, 1_500_000)]
    bold, plain = page.returns_table(groups).splitlines()[2:]
    assert "| **9,000,000,000** |" in bold
    assert "**" not in plain


def test_the_highest_evaluation_of_each_run_counts_where_all_have_some():
    points = [[[1.0, 9, mean], [2.0, 99, 3.0]] for mean in (2700.0, 2.0)]
    evaluated = [_run(seed, [5.0], evaluations=run) for seed, run in enumerate(points)]
    groups = [_group(*evaluated), _group(*evaluated, _run(2, [5.0]))]
    rows = page.returns_table(groups).splitlines()[2:]
    assert [row.split(" | ")[-2] for row in rows] == ["1,352 [3.0, 2,700]", "-"]


def test_of_fewer_than_five_seeds_the_interval_is_their_range():
    assert page.summarised(np.array([1.0, 2.0, 6.0]), None) == "3.0 [1.0, 6.0]"


def test_the_share_of_the_best_published_return_is_over_runs_of_a_million_frames_alone():
    short = _run(0, [0.0], frames_asked=300_000)
    groups = [_group(short), _group(_run(0, [2608.0]))]
    assert page.overall_lines(groups) == "- appo, 1 tasks: 1.00"
    groups[1] = _group(*[_run(seed, [2608.0]) for seed in range(5)])
    assert page.overall_lines(groups) == "- appo, 1 tasks: 1.00 [1.00, 1.00]"


def test_every_recorded_command_gives_the_recorded_settings():
    for group in page.load_groups(RESULTS):
        kind = SETTINGS_OF[group.algorithm]
        words = shlex.split(page.command(group))
        (given,) = [word[4:] for word in words if word.startswith("SET=")] or [""]
        settings = kind.for_task(group.task, **parse_settings(kind.kind, given.split()))
        recorded = group.runs[0]["settings"]
        now = json.loads(json.dumps(dataclasses.asdict(settings)))
        assert {name: now[name] for name in recorded.keys() & now.keys()} == {
            name: value for name, value in recorded.items() if name in now
        }


def test_the_command_has_the_settings_that_the_task_does_not_have_today():
    group = _group(_run(0, [1.0], settings={"lr": 0.5, "hidden": [8, 4], "fused": True}))
    assert page.command(group) == (
        "make learn TASK=Hopper-v5 ALGO=appo FRAMES=1000000 SEEDS=0 SET='lr=0.5 hidden=8,4'"
    )


def test_the_command_evaluates_as_often_as_the_runs_did():
    group = _group(_run(0, [1.0], evaluate_every=500))
    assert " SEEDS=0 EVERY=500" in page.command(group)


# Entries of what is known


def test_an_entry_has_the_highest_stated_return_that_every_seed_reached():
    group = _group(_run(0, [2700.0, 3600.0]), _run(1, [0.0, 2700.0]))
    assert (
        page.result_entries([group])
        == '    BenchmarkResult("Hopper-v5", "appo", 2609, 15, 1500, 2),'
    )


def test_without_a_stated_return_an_entry_has_the_worst_seeds_last_one():
    group = _group(_run(0, [9.0, 7.5]), _run(1, [9.0, 6.5]))
    assert (
        page.result_entries([group]) == '    BenchmarkResult("Hopper-v5", "appo", 6, 20, 2000, 2),'
    )
