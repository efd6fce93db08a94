"""The migration table against the public names of UniLab's reference pages."""

from __future__ import annotations

import dataclasses
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[1] / "tutorials" / "how-to" / "migrate.md"

PIPELINE = (
    "start_prepare batch_ready wait_ready wait_until_ready sample_large_batch after_tick close"
)
THERE = {
    "SharedWeightSync": "name version from_state_dict write_weights read_weights_into "
    "cleanup close",
    "RolloutRingBuffer": "name slot_shapes attach_sync_primitives write_slot write_buffer "
    "signal_write_done available wait_for_data read_slot read_numpy_views "
    "copy_read_slot_to_torch read_torch advance_read cleanup close",
    "AsyncRunner": "learn close",
    "SharedObsNormStats": "put get",
    "ReplayBuffer": "add sample",
    "ReplayPipeline": PIPELINE,
    "ReplayTickMetadata": "tick_id snapshot_ptr snapshot_size sample_seed sample_count "
    "batch_host_slot batch_gpu_slot",
    "CPUPinnedDoubleBufferReplayPipeline": f"{PIPELINE} h2d_submitter transfer_manifest",
    "OffPolicyRunner": "learn close",
    "compute_train_start_threshold": "",
    "replay_buffer_ready_for_learning": "",
    "build_reward_comparison_metrics": "",
    "appo_collector_fn": "",
    "compute_timeout_bootstrap_correction": "",
    "put_latest_metrics": "",
    "collector_error": "",
    "memory_budget": "",
    "shared_buffer": "",
    "transfer": "",
    "native_h2d": "",
}
"""Public names of the reference pages, with their members.

Modules stand for themselves where the pages name nothing that is in them.
"""


def _rows() -> Iterator[tuple[str, tuple[list[str], dict[str, str]]]]:
    """Each name of the table's first column, with its counterparts and renamed members."""
    table = PAGE.read_text().partition("| There | Here |")[2].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        _, there, here, members, _ = line.split("|")
        for name in re.findall(r"`(\w+)`", there):
            yield name, (re.findall(r"`([\w.]+)`", here), dict(re.findall(ARROW, members)))


ARROW = r"`(\w+)` → `([\w.]+)`"
ROWS = dict(_rows())
MEMBERS = [(name, member) for name, members in THERE.items() for member in members.split()]


def _has(counterpart: Any, member: str) -> bool:
    fields = dataclasses.fields(counterpart) if dataclasses.is_dataclass(counterpart) else ()
    return hasattr(counterpart, member) or member in [field.name for field in fields]


def test_the_table_has_the_names_of_the_reference_pages_and_no_others():
    assert ROWS.keys() == THERE.keys()


@pytest.mark.parametrize("name", THERE)
def test_each_counterpart_can_be_imported(name):
    counterparts, _ = ROWS[name]
    assert counterparts
    for counterpart in counterparts:
        pkgutil.resolve_name(counterpart)


@pytest.mark.parametrize(("name", "member"), MEMBERS)
def test_each_member_has_a_counterpart(name, member):
    counterparts, renamed = ROWS[name]
    here = renamed.get(member, member)
    if "." in here:
        pkgutil.resolve_name(here)
    else:
        assert any(_has(pkgutil.resolve_name(each), here) for each in counterparts)


def test_no_member_is_listed_that_the_reference_does_not_have():
    listed = {(name, member) for name, (_, renamed) in ROWS.items() for member in renamed}
    assert listed <= set(MEMBERS)
