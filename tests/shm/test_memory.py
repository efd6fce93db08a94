from __future__ import annotations

import pytest

from torchrl_unilab.shm.memory import available_memory, cgroup_headroom


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


@pytest.mark.parametrize(("line", "group"), [("0::/", _v2), ("3:memory:/", _v1)])
def test_unused_pages_of_files_do_not_count_as_taken(tmp_path, line, group):
    _write(tmp_path, {"proc/self/cgroup": line, **group("", 1000, 950, inactive=400)})
    assert cgroup_headroom(tmp_path) == 450


@pytest.mark.parametrize(("line", "group"), [("0::/", _v2), ("3:memory:/", _v1)])
def test_a_group_that_is_over_its_limit_leaves_nothing(tmp_path, line, group):
    _write(tmp_path, {"proc/self/cgroup": line, **group("", 1000, 1200)})
    assert cgroup_headroom(tmp_path) == 0


def test_in_a_container_the_mount_is_the_group_itself(tmp_path):
    _write(tmp_path, {"proc/self/cgroup": "0::/docker/0a1b\n", **_v2("", 1000, 600)})
    assert cgroup_headroom(tmp_path) == 400


def test_without_control_groups_there_is_no_such_limit(tmp_path):
    assert cgroup_headroom(tmp_path) is None
    _write(tmp_path, {"proc/self/cgroup": "0::/\n", **_v2("", "max", 600)})
    assert cgroup_headroom(tmp_path) is None


def test_this_machine_has_memory_left():
    assert available_memory() > 0
