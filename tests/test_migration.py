"""The migration table against the public names of UniLab's reference pages."""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torchrl_unilab.configs import APPOConfig, OffPolicyConfig, RunConfig

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

ARGUMENTS = {
    "SharedWeightSync": "param_shapes create shm_name lock",
    "RolloutRingBuffer": "num_envs num_steps obs_dim action_dim critic_dim num_slots create "
    "shm_name_prefix",
    "AsyncRunner": "env_name env_cfg_overrides rl_cfg device collector_device sim_backend num_envs "
    "max_iterations save_interval log_dir",
    "SharedObsNormStats": "ctx",
    "ReplayBuffer": "capacity batch_size obs_dim action_dim device defer_gpu critic_dim "
    "packed_cpu_storage obs actions rewards next_obs dones truncated terminal_mask "
    "terminal_next_obs critic "
    "next_critic terminal_next_critic",
    "CPUPinnedDoubleBufferReplayPipeline": "replay_buffer device sample_count base_seed "
    "trace_recorder "
    "trace_cuda_events verbose verbose_output_dir collector_pack_request_queue "
    "collector_pack_ready_queue collector_pack_shared_slots",
    "OffPolicyRunner": "learner env_name algo_type num_envs replay_buffer_n batch_size "
    "learning_starts updates_per_step policy_frequency sync_collection env_steps_per_sync device "
    "actor_hidden_dim use_layer_norm obs_normalization sim_backend env_cfg_override actor_kwargs "
    "seed trace_enabled trace_output_dir trace_thread_time trace_cuda_events logger_type",
    "compute_train_start_threshold": "batch_size learning_starts num_envs",
    "replay_buffer_ready_for_learning": "replay_buffer_size batch_size learning_starts num_envs",
    "build_reward_comparison_metrics": "reward_history smoothed_reward",
    "compute_timeout_bootstrap_correction": "critic collector_device gamma timeout_mask final_obs "
    "final_critic",
    "put_latest_metrics": "msg metrics_queue worker_name",
}
"""Arguments on the reference pages that differ in name or that a caller would look for."""


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


def _parameters(counterpart: Any) -> set[str]:
    """What a class, with its `add`, `create` and `attach`, or a function takes."""
    calls = [getattr(counterpart, name, None) for name in ("add", "create", "attach")]
    found = [inspect.signature(call).parameters for call in (counterpart, *calls) if callable(call)]
    return {name for parameters in found for name in parameters}


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


@pytest.mark.parametrize(
    ("name", "argument"),
    [(name, argument) for name, found in ARGUMENTS.items() for argument in found.split()],
)
def test_each_argument_is_kept_or_its_counterpart_is_named(name, argument):
    table = PAGE.read_text().partition("| There | Argument | Here |")[2].partition("\n\n")[0]
    named = {each for line in table.splitlines() for each in re.findall(r"`(\w+)`", line)}
    kept = set().union(*(_parameters(pkgutil.resolve_name(each)) for each in ROWS[name][0]))
    settings = OffPolicyConfig.kinds() if name.endswith("Runner") else {}
    assert argument in {*named, *kept, *settings}


def test_the_defaults_that_the_page_names_are_those_of_the_settings():
    page, ours, ant = PAGE.read_text(), OffPolicyConfig(), OffPolicyConfig.for_task("Ant-v5")
    names = "num_envs replay_buffer_n batch_size learning_starts updates_per_step policy_frequency"
    numbers = ", ".join(f"{getattr(ours, name):,}" for name in names.split())
    assert f"`OffPolicyConfig()` has {numbers}, and" in page
    assert f"`APPOConfig()` `num_envs={APPOConfig().num_envs}`" in page
    assert f"SAC has `batch_size={ant.batch_size}` and `layer_norm={ant.layer_norm}`" in page
    assert f"`{ours.hidden}` for 512, and {ours.layer_norm} for True" in page
    assert f'`logger`, `"{RunConfig("Ant-v5", 1).logger}"` by default' in page
