from __future__ import annotations

import mmap

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torchrl_unilab.runtime.budget import (
    MemoryBudget,
    MemoryItem,
    MemoryLimit,
    plan_threads,
    readable,
)

MIB = 1 << 20
PAGE = mmap.PAGESIZE
MEMORY = MemoryLimit("memory", 10 * MIB, ("shared", "private"))
MOUNT = MemoryLimit("shared-memory mount /dev/shm", 2 * MIB, ("shared",))


def test_physics_shares_the_cores_out_and_the_learner_has_one_thread():
    plan = plan_threads(8, collectors=3)
    assert (plan.learner_threads, plan.physics_threads) == (1, 2)
    assert plan_threads(2).physics_threads == 2
    assert plan_threads(16, learner_threads=4).physics_threads == 12
    assert plan_threads(16, learner_threads=16).physics_threads == 2
    assert plan_threads(1, collectors=4).physics_threads == 1
    assert plan_threads(8, physics_threads=5, learner_threads=2).physics_threads == 5


# Items and limits


def test_each_limit_counts_the_items_of_its_places():
    items = (
        MemoryItem("ring", "shared", MIB),
        MemoryItem("pool", "private", 3 * MIB),
        MemoryItem("batches", "device", 50 * MIB),
    )
    device = MemoryLimit("cuda:0", 49 * MIB, ("device",))
    budget = MemoryBudget(items, (MOUNT, MEMORY, device))
    needed = [budget.needed(limit) for limit in budget.limits]
    assert needed == [MIB, 4 * MIB, 50 * MIB]
    assert budget.exceeded == (device,)
    told = budget.as_dict()
    assert ([limit["needed"] for limit in told["limits"]], told["fits"]) == (needed, False)
    assert [item.name for item in budget.under(MEMORY)] == ["pool", "ring"]


def test_a_run_fits_up_to_the_last_byte():
    limits = (MEMORY,)
    exact = MemoryBudget((MemoryItem("pool", "private", 10 * MIB),), limits)
    over = MemoryBudget((MemoryItem("pool", "private", 10 * MIB + 1),), limits)
    assert not exact.exceeded
    assert over.exceeded == limits


def test_shared_segments_take_whole_pages_each():
    for nbytes in (100, PAGE):
        assert MemoryItem("metrics", "shared", 3 * nbytes, segments=3).taken == 3 * PAGE
    assert MemoryItem("ring", "shared", PAGE + 1).taken == 2 * PAGE
    assert MemoryItem("pool", "private", PAGE + 1).taken == PAGE + 1


def test_the_table_names_items_estimates_and_what_is_too_much():
    items = (
        MemoryItem("packed replay", "shared", 3 * MIB),
        MemoryItem("process", "private", 4 * MIB, estimate=True),
    )
    assert MemoryBudget(items, (MOUNT, MEMORY)).table().splitlines() == [
        "  shared          packed replay   3.0 MiB",
        "  private         process        ~4.0 MiB",
        "  shared          in all          3.0 MiB"
        "  of 2.0 MiB free: shared-memory mount /dev/shm, TOO MUCH",
        "  shared+private  in all          7.0 MiB  of 10.0 MiB free: memory",
        "  ~ estimated; all else is computed to the byte",
    ]


def test_what_no_setting_makes_smaller_a_run_is_to_do_without():
    items = (MemoryItem("videos", "private", 11 * MIB), MemoryItem("pool", "private", MIB, ("n",)))
    refusal = MemoryBudget(items, (MEMORY,)).refusal()
    assert refusal.endswith(
        "videos, takes 11.0 MiB, 1.22 times what the others leave: do without it."
    )


def test_a_run_that_fits_is_not_refused():
    assert MemoryBudget((MemoryItem("pool", "private", MIB),), (MEMORY,)).refusal() is None


def test_a_refusal_names_the_largest_item_and_its_factor_beside_the_others():
    items = (
        MemoryItem("ring", "shared", MIB // 2, ("slots",)),
        MemoryItem("replay", "shared", 3 * MIB, ("rows", "envs")),
    )
    assert MemoryBudget(items, (MEMORY, MOUNT)).refusal() == (
        "memory of the run: 3.5 MiB do not fit shared-memory mount /dev/shm (expected at most "
        "2.0 MiB, which is free). The largest item, replay, takes 3.0 MiB, 2.00 times what the "
        "others leave: lower rows or envs."
    )


@pytest.mark.parametrize("nbytes", [2 * MIB, 3 * MIB])
def test_a_refusal_says_where_lowering_the_largest_item_is_not_enough(nbytes):
    items = [MemoryItem(name, "shared", nbytes, ("rows",)) for name in ("replay", "ring")]
    less = MemoryLimit("memory", MIB, ("shared", "private"))
    refusal = str(MemoryBudget(tuple(items), (MOUNT, less)).refusal())
    assert "do not fit shared-memory mount" in refusal  # the first of two
    assert "and the others alone do not fit either: lower rows." in refusal


@given(st.integers(0, 1 << 50))
@example((1 << 20) - 1)
def test_readable_sizes_are_short_and_right_to_a_tenth(nbytes):
    number, unit = readable(nbytes).split()
    scale = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}[unit]
    assert abs(float(number) * scale - nbytes) <= 0.0501 * scale
    assert float(number) < 1024 or unit == "TiB"
