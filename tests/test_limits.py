from __future__ import annotations

from unittest.mock import Mock

import pytest

from torchrl_unilab.errors import ConfigError
from torchrl_unilab.limits import (
    available_cores,
    available_memory,
    cgroup_cores,
    cgroup_headroom,
    launcher_env,
    local_ranks,
)


def _write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def _v2(path, most, used, inactive=0):
    group = f"sys/fs/cgroup/{path}"
    return {
        f"{group}/memory.max": f"{most}\n",
        f"{group}/memory.current": f"{used}\n",
        f"{group}/memory.stat": f"anon 5\ninactive_file {inactive}\nactive_file 7\n",
    }


def _v1(path, most, used, inactive=0):
    group = f"sys/fs/cgroup/memory/{path}"
    return {
        f"{group}/memory.limit_in_bytes": f"{most}\n",
        f"{group}/memory.usage_in_bytes": f"{used}\n",
        f"{group}/memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive}\n",
    }


def test_version_2_leaves_what_its_tightest_group_leaves(tmp_path):
    _write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/jobs/mine\n",
            **_v2("jobs", 1000, 700),
            **_v2("jobs/mine", 900, 200),
        },
    )
    assert cgroup_headroom(tmp_path) == 300
    _write(tmp_path, _v2("jobs", "max", 700))
    assert cgroup_headroom(tmp_path) == 700


def test_version_1_leaves_what_its_tightest_group_leaves(tmp_path):
    _write(
        tmp_path,
        {
            "proc/self/cgroup": "9:pids:/\n4:cpu,memory:/jobs/mine\n0::/\n",
            **_v1("", 9223372036854771712, 5000),
            **_v1("jobs/mine", 900, 200),
        },
    )
    assert cgroup_headroom(tmp_path) == 700


IN_A_CONTAINER = "0::/docker/0a1b\n"  # whose mount is the group itself


@pytest.mark.parametrize(
    ("line", "group"), [("0::/", _v2), ("3:memory:/", _v1), (IN_A_CONTAINER, _v2)]
)
@pytest.mark.parametrize(
    ("used", "inactive", "left"),
    [
        pytest.param(600, 0, 400, id="some is taken"),
        pytest.param(950, 400, 450, id="unused pages of files do not count as taken"),
        pytest.param(1200, 0, 0, id="more than the limit is taken"),
        pytest.param(100, 400, 1000, id="more can be had back than is taken"),
    ],
)
def test_a_group_leaves_what_its_limit_does(tmp_path, line, group, used, inactive, left):
    _write(tmp_path, {"proc/self/cgroup": line, **group("", 1000, used, inactive)})
    assert cgroup_headroom(tmp_path) == left


def test_without_control_groups_there_is_no_such_limit(tmp_path):
    assert cgroup_headroom(tmp_path) is None
    _write(tmp_path, {"proc/self/cgroup": "0::/\n", **_v2("", "max", 600)})
    assert cgroup_headroom(tmp_path) is None


@pytest.mark.parametrize(("headroom", "left"), [(None, 100), (30, 30), (300, 100)])
def test_memory_is_what_both_machine_and_control_groups_leave(headroom, left, monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: Mock(available=100))
    monkeypatch.setattr("torchrl_unilab.limits.cgroup_headroom", lambda: headroom)
    assert available_memory() == left


def test_this_machine_has_memory_left():
    assert available_memory() > 0


# Cores


def test_version_2_shares_as_many_cores_as_its_tightest_group(tmp_path):
    _write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/jobs/mine\n",
            "sys/fs/cgroup/jobs/cpu.max": "250000 100000\n",
            "sys/fs/cgroup/jobs/mine/cpu.max": "max 100000\n",
        },
    )
    assert cgroup_cores(tmp_path) == 2.5


def test_version_1_shares_as_many_cores_as_its_tightest_group(tmp_path):
    _write(
        tmp_path,
        {
            "proc/self/cgroup": "9:pids:/\n4:cpu,cpuacct:/mine\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/mine/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/mine/cpu.cfs_period_us": "100000\n",
        },
    )
    assert cgroup_cores(tmp_path) == 0.5


def test_without_control_groups_all_cores_are_there(tmp_path):
    assert cgroup_cores(tmp_path) is None
    _write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"})
    assert cgroup_cores(tmp_path) is None


@pytest.mark.parametrize("ranks", [1, 2, 16])
@pytest.mark.parametrize(("share", "cores"), [(None, 8), (64.0, 8), (2.5, 3), (0.5, 1)])
def test_ranks_share_the_cores_of_the_affinity_that_control_groups_leave(
    share, cores, ranks, monkeypatch
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr("torchrl_unilab.limits.cgroup_cores", lambda: share)
    assert available_cores() == max(1, cores // ranks)


@pytest.mark.parametrize("ranks", ["0", "-2"])
def test_there_is_at_least_the_rank_that_asks(ranks, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert local_ranks() == 1


def test_a_number_of_ranks_that_is_none_is_refused_by_its_name(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match=r"LOCAL_WORLD_SIZE is 'two' \(expected an integer"):
        available_cores()


@pytest.mark.parametrize("value", ["", "x", "1.5"])
def test_a_launchers_variable_that_is_no_integer_is_refused_by_its_name(value, monkeypatch):
    monkeypatch.setenv("RANK", value)
    with pytest.raises(ConfigError, match=rf"RANK is {value!r} \(expected an integer, from torch"):
        launcher_env("RANK", 0)


@pytest.mark.parametrize(("count", "cores"), [(4, 4), (None, 1)])
def test_a_system_without_affinity_has_the_cores_that_it_counts(count, cores, monkeypatch):
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("psutil.cpu_count", lambda: count)
    monkeypatch.setattr("torchrl_unilab.limits.cgroup_cores", lambda: None)
    assert available_cores() == cores
