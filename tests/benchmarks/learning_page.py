"""Draws the page of all recorded runs: curves of every seed, and tables beside published numbers.

``python -m tests.benchmarks.learning_page [--results DIRECTORY]``, or ``make learning-page``. It
reads what `tests.benchmarks.learn` recorded, writes the page as ``README.md`` with ``learning.png``
beside the records, and prints the entries for `torchrl_unilab.configs.benchmark_results`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tests.benchmarks.bootstrap import Scores, bootstrap_interval, interquartile_mean
from tests.benchmarks.learn import RESULTS
from tests.benchmarks.published import FAMILY, PUBLISHED, SOURCES, best_published, levels
from torchrl_unilab.configs import SETTINGS

NOT_REACHED = "not reached"
COLORS = {"appo": "tab:blue", "sac": "tab:orange", "td3": "tab:green"}
LINES = {"training": "solid", "without noise": "dotted"}
MILLION = 1_000_000
FEWEST = 5  # seeds of an interval: of three it would cover 74 % in place of 95
Point = Sequence[float]

_ON_CPU = {"device": "cpu", "collector_device": "cpu"}
BEFORE: dict[str, dict[str, Any]] = {
    "appo": {"noise_correlation": 0.0, "final_log_std": None, "final_gamma": None} | _ON_CPU,
    "sac": {"matmul_dtype": "float32", "anneal": 0.0} | _ON_CPU,
    "td3": {"matmul_dtype": "float32", "anneal": 0.0} | _ON_CPU,
}
"""What runs did before a setting came, for records that do not have it."""


@dataclass(frozen=True)
class Group:
    """The runs of one algorithm on one task, of one length, with the same settings.

    Attributes:
        runs: Their records, by seed.
    """

    task: str
    algorithm: str
    frames: int
    runs: Sequence[dict[str, Any]]

    @property
    def published(self) -> float | None:
        return best_published(self.task, FAMILY[self.algorithm])

    @property
    def processor(self) -> str:
        """Whose processors the runs had."""
        return ", ".join(sorted({run["machine"]["cpu"].split()[0] for run in self.runs}))

    @cached_property
    def training(self) -> Scores:
        """Each run's mean return of its last 64 episodes, with noise."""
        return np.array([run["training_return"] for run in self.runs], dtype=np.float64)

    @cached_property
    def without_noise(self) -> Scores:
        """Each run's mean of ten episodes in Gymnasium's own environment, if it has the task."""
        return np.array(
            [np.mean(run["gymnasium_returns"] or run["eval_return"]) for run in self.runs]
        )

    @property
    def best(self) -> Scores:
        """Each run's highest evaluation in training, without noise; empty if a run has none."""
        points = self.curves.get("without noise", [])
        return np.array([max(mean for *_, mean in run) for run in points], dtype=np.float64)

    @property
    def curves(self) -> dict[str, list[list[Point]]]:
        """Each run's points (seconds, frames, mean return), by how the return was measured."""
        curves = {
            "training": [run["curve"] for run in self.runs],
            "without noise": [run.get("evaluations", []) for run in self.runs],
        }
        return {kind: points for kind, points in curves.items() if all(points)}

    def reached(self, level: float, kind: str = "training") -> list[tuple[float, float]]:
        """Return seconds and frames of each run to a return; infinite where not reached."""
        return [first_reached(curve, level) for curve in self.curves[kind]]


def first_reached(curve: Sequence[Point], level: float) -> tuple[float, float]:
    """Return seconds and frames at the first point of a curve at `level` or above."""
    found = ((seconds, frames) for seconds, frames, mean in curve if mean >= level)
    return next(found, (math.inf, math.inf))


def read_records(directory: Path) -> list[dict[str, Any]]:
    """Read all records of a directory."""
    return [
        json.loads(line)
        for path in sorted(directory.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]


def load_groups(directory: Path) -> list[Group]:
    """Read all runs of a directory.

    Raises:
        ValueError: A group has a seed twice, or runs with different settings.
    """
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for run in sorted(read_records(directory), key=lambda run: run["seed"]):
        run["settings"] = settings = BEFORE[run["algorithm"]] | run["settings"]
        if "anneal" in settings:
            settings["anneal"] = float(settings["anneal"])  # APPO's was a flag before
        groups.setdefault((run["task"], run["algorithm"], run["frames_asked"]), []).append(run)
    for name, members in groups.items():
        check(name, members)
    return [Group(*name, members) for name, members in sorted(groups.items())]


def check(name: tuple[str, str, int], runs: Sequence[dict[str, Any]]) -> None:
    """Refuse runs that cannot stand in one row."""
    seeds = [run["seed"] for run in runs]
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"records of {name}: seeds {seeds} (expected each once). Remove a record.")
    other = [run["seed"] for run in runs if run["settings"] != runs[0]["settings"]]
    if other:
        raise ValueError(
            f"records of {name}: seeds {other} have other settings than seed {seeds[0]} "
            "(expected the same). Keep experiments in a file elsewhere, by OUT."
        )


def changed_since(group: Group) -> dict[str, Any]:
    """Return the settings of a group that are not those of the task today."""
    now = SETTINGS[group.algorithm].for_task(group.task)
    recorded = json.loads(json.dumps(dataclasses.asdict(now)))
    then = group.runs[0]["settings"]
    return {name: value for name, value in then.items() if recorded.get(name) != value}


def show(value: float) -> str:
    """Return a return, or a number of seconds or frames, as a table shows it."""
    if math.isinf(value):
        return NOT_REACHED
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def table(heads: str, rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    names = heads.split(" | ")
    lines = [f"| {heads} |", "|" + "---|" * len(names)]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def summarised(scores: Scores, at_least: float | None) -> str:
    """Return interquartile mean and interval; in bold if the mean is `at_least`."""
    mean = float(interquartile_mean(scores))
    text = show(mean) if at_least is None or mean < at_least else f"**{show(mean)}**"
    if len(scores) < 2:
        return text
    few = len(scores) < FEWEST
    low, high = (min(scores), max(scores)) if few else bootstrap_interval([scores])
    return f"{text} [{show(low)}, {show(high)}]"


def returns_table(groups: Sequence[Group]) -> str:
    """Return the table of all groups, with every seed, beside the published numbers."""
    rows = []
    for group in groups:
        sources = PUBLISHED.get(group.task, {}).get(FAMILY[group.algorithm], {})
        row = [group.task, group.algorithm, f"{group.frames:,}"]
        row.append(", ".join(str(run["seed"]) for run in group.runs))
        beside = group.published if group.frames <= MILLION else None
        for scores in (group.training, group.without_noise):
            row += [", ".join(map(show, scores)), summarised(scores, beside)]
        row.append(summarised(group.best, beside) if group.best.size else "-")
        rows.append([*row, ", ".join(f"{name} {show(mean)}" for name, mean in sources.items())])
    heads = "task | algorithm | frames | seeds | training return | interquartile mean"
    heads += " | without noise | interquartile mean | best evaluation"
    return table(f"{heads} | published, 1,000,000", rows)


def time_table(groups: Sequence[Group]) -> str:
    """Return the table of seconds and frames to each task's stated returns.

    Runs of which no seed reached a return are left out, unless no others have reached it, either.
    """
    rows = []
    for task, of_task in itertools.groupby(groups, key=lambda group: group.task):
        members = list(of_task)
        for name, level in levels(task).items():
            stated = [task, f"{name}, {show(level)}"]
            reached = [
                [*stated, *time_columns(group, level, kind)]
                for group in members
                for kind in group.curves
                if any(math.isfinite(seconds) for seconds, _ in group.reached(level, kind))
            ]
            rows += reached or [[*stated, *["-"] * 4, *[NOT_REACHED] * 4, "none"]]
    heads = "task | to a return of | measured | algorithm | frames of the runs | processor"
    return table(
        f"{heads} | seconds, median | worst | frames, median | worst | seeds that reached it", rows
    )


def time_columns(group: Group, level: float, kind: str) -> list[str]:
    """Return the columns of `time_table` for one group and one kind of curve."""
    reached = group.reached(level, kind)
    columns = [kind, group.algorithm, f"{group.frames:,}", group.processor]
    for values in zip(*reached, strict=True):
        columns += [show(float(np.median(values))), show(max(values))]
    count = sum(math.isfinite(seconds) for seconds, _ in reached)
    return [*columns, f"{count} of {len(reached)}"]


def peers_table(groups: Sequence[Group], peers: Sequence[dict[str, Any]]) -> str:
    """Return the table of peers' runs beside ours of as many frames; empty if there are none.

    Args:
        groups: Ours.
        peers: Records of `tests.benchmarks.bench_peers`, whose name ends with the algorithm.
    """
    rows = []
    for peer, group in itertools.product(peers, groups):
        kind = (peer["task"], peer["peer"].split()[-1], peer["frames"])
        if kind != (group.task, group.algorithm, group.frames) or "gymnasium_returns" not in peer:
            continue
        row = [*kind[:2], f"{group.frames:,}", peer["peer"].split()[0], str(peer["seed"])]
        row += [show(peer["curve"][-1][2]), show(float(np.mean(peer["gymnasium_returns"])))]
        rows.append([*row, *(summarised(s, None) for s in (group.training, group.without_noise))])
    if not rows:
        return ""
    heads = "task | algorithm | frames | peer | seed | training return | without noise"
    return table(f"{heads} | ours: training return | without noise", rows)


def overall_lines(groups: Sequence[Group]) -> str:
    """Return each algorithm's share of the best published return, over all its tasks."""
    lines = []
    for algorithm in SETTINGS:
        shares = [
            group.without_noise / group.published
            for group in groups
            if (group.algorithm, group.frames) == (algorithm, MILLION)
            and (group.published or 0) > 0
        ]
        if shares:
            line = f"{interquartile_mean(np.concatenate(shares)):.2f}"
            if min(map(len, shares)) >= FEWEST:
                line += " [{:.2f}, {:.2f}]".format(*bootstrap_interval(shares))
            lines.append(f"- {algorithm}, {len(shares)} tasks: {line}")
    return "\n".join(lines)


def command(group: Group) -> str:
    """Return the command that takes a group's runs again."""
    seeds = " ".join(str(run["seed"]) for run in group.runs)
    text = f"make learn TASK={group.task} ALGO={group.algorithm} FRAMES={group.frames}"
    text += f" SEEDS={shlex.quote(seeds)}"
    if every := group.runs[0].get("evaluate_every"):
        text += f" EVERY={every}"
    changed = changed_since(group)
    values = " ".join(f"{name}={as_text(value)}" for name, value in changed.items())
    return f"{text} SET={shlex.quote(values)}" if changed else text


def as_text(value: Any) -> str:
    """Return a setting's value as `learn` reads it."""
    if isinstance(value, list):
        return str(tuple(value)).replace(" ", "").strip("()") or "()"
    return str(value).lower()


def result_entries(groups: Sequence[Group]) -> str:
    """Return entries of `RESULTS`: the highest stated return that all seeds of a group reached.

    Where there is none, it is the return that the worst seed ended with.
    """
    entries = []
    for group in groups:
        stated = levels(group.task).values()
        named = [level for level in stated if np.isfinite(group.reached(level)).all()]
        if named:
            level = max(named)
            seconds, frames = np.median(group.reached(level), axis=0)
        else:
            level = math.floor(group.training.min())
            seconds, frames = np.median([(r["seconds"], r["frames"]) for r in group.runs], axis=0)
        entries.append(
            f'    BenchmarkResult("{group.task}", "{group.algorithm}", {level:g}, {seconds:.0f}, '
            f"{frames:.0f}, {len(group.runs)}),"
        )
    return "\n".join(entries)


def draw(groups: Sequence[Group], path: Path) -> None:
    """Draw the curves of all seeds, a row per task: against frames, and against seconds."""
    tasks = sorted({group.task for group in groups})
    figure = Figure(figsize=(10, 2.7 * len(tasks) + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    for row, task in zip(figure.subplots(len(tasks), 2, squeeze=False), tasks, strict=True):
        for axis, column, label in zip(row, (1, 0), ("frames", "seconds"), strict=True):
            for group in (group for group in groups if group.task == task):
                color = COLORS[group.algorithm]
                for kind, curves in group.curves.items():
                    look = {"color": color, "linestyle": LINES[kind], "linewidth": 0.9}
                    for curve in map(np.array, curves):
                        axis.plot(curve[:, column], curve[:, 2], alpha=0.6, **look)
                    axis.plot([], [], label=f"{group.algorithm}, {kind}", **look)
            for (name, level), style in zip(levels(task).items(), (":", "--", "-."), strict=False):
                axis.axhline(level, color="grey", linestyle=style, linewidth=0.8, label=name)
            axis.set(title=task, xlabel=label)
            axis.grid(alpha=0.3)
        row[0].set_ylabel("training return")
        handles, names = row[0].get_legend_handles_labels()
        unique = dict(zip(names, handles, strict=True))
        row[0].legend(unique.values(), unique.keys(), fontsize="x-small")
    figure.savefig(path, dpi=80)


def page(groups: Sequence[Group], peers: Sequence[dict[str, Any]] = ()) -> str:
    """Return the page, with runs of peers beside ours."""
    parts = [
        "# Learning, measured",
        "Written by `make learning-page` from the records beside it, which `make learn` wrote; "
        "every recorded run is shown.",
        "![Each seed's curve](learning.png)",
        "## Returns",
        "*Training return*: mean of the last 64 episodes, with noise. *Without noise*: mean of ten "
        "episodes in Gymnasium's own environment (of 16 in ours where Gymnasium has no such task). "
        "After each seed's: the interquartile mean with its 95 % interval over 20,000 bootstrap "
        "resamples ([Agarwal et al. 2021](https://arxiv.org/abs/2108.13264)), in bold where it is "
        "at least the best published return of the same kind of algorithm, after as many frames "
        "at most. Of fewer than five seeds the interval is their range. *Best evaluation*: the "
        "same of each seed's highest evaluation during its training (16 episodes without noise), "
        "as Tianshou's numbers are; the highest of several is a little too high.",
        returns_table(groups),
        f"Published numbers, as each measures: {'; '.join(map(': '.join, SOURCES.items()))}.",
        "Without noise, as a share of the best published return of the same kind of algorithm, at "
        "1,000,000 frames, over all seeds of all tasks (interquartile mean, resampled per task):",
        overall_lines(groups) or "- none yet",
        "## Beside another library on the same frames",
        "Runs of `bench_peers` with the library's defaults and one environment; ours are those "
        "above. SBX's TD3 acts without noise in training, too. `tutorials/benchmarks.md` compares "
        "both in the same seconds.",
        peers_table(groups, peers) or "- none yet",
        "## Time to a return",
        "To the first point of the recorded curve (at most 60 points a run) at that return or "
        "above; the clock starts with training. *Training*: the mean of the last 64 episodes, with "
        "noise, which lags behind the policy. *Without noise*: the mean of 16 episodes of the "
        "policy of that moment, played beside the training, as Tianshou measures. Most runs of SAC "
        "and TD3 of 300,000 frames shared their two cores with another run, and some others with "
        "tests: alone they take less.",
        time_table(groups),
        "## Commands",
        "```\n" + "\n".join(map(command, groups)) + "\n```",
        "`SET` has what differs from the task's settings of today.",
        "Measured with " + each_once(groups, "versions") + ".",
        "On " + each_once(groups, "machine") + ".",
    ]
    return "\n\n".join(parts) + "\n"


def each_once(groups: Sequence[Group], key: str) -> str:
    """Return what runs have under a key, "name value" by "name value"."""
    found = [sorted(run[key].items()) for group in groups for run in group.runs]
    return "; ".join(sorted({", ".join(f"{name} {value}" for name, value in one) for one in found}))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; return 0, or 2 if there is nothing to draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    directory = parser.parse_args(arguments).results
    groups = load_groups(directory)
    if not groups:
        print(f"no records in {directory} (expected *.jsonl). Run make learn.", file=sys.stderr)
        return 2
    draw(groups, directory / "learning.png")
    (directory / "README.md").write_text(page(groups, read_records(directory / "peers")))
    print(f"Entries for torchrl_unilab/configs/benchmark_results.py:\n{result_entries(groups)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
