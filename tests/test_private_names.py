"""The private names of other libraries that the package rests on.

`PRIVATE` is the one list of them. When a release takes one away, its test fails and says where it
is used; a use of one that is not listed fails, too.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

import torchrl_unilab

ROOT = Path(torchrl_unilab.__file__).parent
PRIVATE = {
    "torchrl.collectors._base": "_iter _set_received_policy_version _weight_sync_schemes",
    "torchrl.collectors._single": "_wrapped_policy",
    "torchrl.data.replay_buffers.samplers.base": "_rng",
    "torchrl.data.replay_buffers.samplers.prioritized": "_alpha _device _eps _init "
    "_max_capacity _max_priority _max_priority_within_buffer _maybe_erase_max_priority _min_tree "
    "_recompute_max_priority_from_tree _sum_tree",
    "torchrl.data.replay_buffers.samplers.random": "_remaining_batches",
    "torchrl.data.replay_buffers.storages.base": "_attached_entities "
    "_attached_entities_list _bump_mutation_revision _checkpointer "
    "_default_checkpointer _empty _last_cursor _last_cursor_index _last_cursor_index_value "
    "_mutation_revision _mutation_revision_value _rand_given_ndim _rng",
    "torchrl.data.replay_buffers.storages.tensor": "_is_full _len _storage _total_shape",
    "torchrl.data.replay_buffers.replay_buffers.base": "_transform _write_lock",
    "torchrl.data.replay_buffers.samplers.slice": "_cache _fetch_traj _finalize_index "
    "_get_stop_and_length _gpu_device _resolve_traj_key _traj_key_auto _used_traj_key",
    "torchrl.data.replay_buffers.writers.max_value": "_current_top_values",
    "torchrl.data.replay_buffers.writers.round_robin": "_cursor _write_count",
    "torchrl.envs.common": "_assert_tensordict_shape _post_step_mdp_hooks _reset _set_seed _step "
    "_step_and_maybe_reset _step_mdp _step_proc_data",
    "torchrl.envs.transforms._base": "_apply_transform _call _inv_call",
    "torchrl.objectives.common": "_erase_cache _forward_value_estimator_keys "
    "_has_update_associated",
    "torchrl.record.loggers.common": "_create_experiment",
    "torchrl.trainers.trainers": "_checkpoint_manifest_metadata _log _log_dict _modules "
    "_optim_count _pbar _post_epoch_hook _post_epoch_log_hook _post_optim_complete_log_hook "
    "_post_optim_complete_log_ops _post_optim_hook _post_optim_log _post_optim_log_ops "
    "_post_steps_log_hook _post_steps_ops _pre_epoch_hook _pre_epoch_log_hook _pre_epoch_ops "
    "_pre_optim_hook _pre_steps_log_hook _process_batch_hook _process_optim_batch_hook "
    "_process_optim_batch_ops _stop_training _update_with_map",
    "torchrl.weight_update.utils": "_resolve_model",
    "torchrl.weight_update.weight_sync_schemes": "_context_ref _init_on_receiver_impl "
    "_init_on_sender_impl "
    "_setup_connection_and_weights_on_receiver_impl _setup_connection_and_weights_on_sender_impl "
    "_shared_transport _worker_idx",
    "tensordict.base": "_new_unsafe",
    "tensordict.nn.params": "_param_td",
    "torch": "_foreach_copy_ _foreach_lerp_ _fused_adam_",
    "torch.ops.mkldnn": "_linear_pointwise",
    "torch.nn.modules.module": "_apply _backward_hooks _backward_pre_hooks _forward_hooks "
    "_forward_pre_hooks _non_persistent_buffers_set _parameters",
    "torch._tensor": "_backward_hooks _post_accumulate_grad_hooks",
    "mujoco": "_callbacks",
    "argparse": "_actions",
    "atexit": "_run_exitfuncs",
}
"""Module that has the names, to the names."""

OTHERS = {"_setconst_inputs", "_setconst_outputs", "_asdict", "_exit"}
"""Our own attribute on MuJoCo's class; what Python documents, of named tuples and of `os`."""

PAIRS = [(module, name) for module, names in PRIVATE.items() for name in names.split()]


@pytest.mark.parametrize(("module", "name"), PAIRS)
def test_it_is_still_there(module, name):
    found = pkgutil.resolve_name(module)
    there = hasattr(found, name) or re.search(rf"\b{name}\b", inspect.getsource(found))
    command = ["grep", "--recursive", "--files-with-matches", "--word-regexp", name, str(ROOT)]
    users = "" if there else subprocess.run(command, capture_output=True, text=True).stdout
    assert there, f"{module} has no {name} any more; used in:\n{users}"


def test_no_other_is_used():
    listed = {name for _, name in PAIRS} | OTHERS
    assert (_taken() | _overridden()) - listed == set()
    # Of these there are names or attributes of our own, too.
    hidden = {"_resolve_model", "_log_dict", "_cursor", "_write_count", "_iter"}
    assert listed - (_taken() | _overridden() | hidden) == set()


@cache
def _taken() -> set[str]:
    """Private attributes that are used and that nothing of the package defines."""
    used, own = set(), set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                (own if isinstance(node.ctx, ast.Store) else used).add(node.attr)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
    return {name for name in used - own if re.match(r"_[a-zA-Z]", name)}


@cache
def _overridden() -> set[str]:
    """Private names that a class of the package shares with a foreign base."""
    shared = set()
    for found in pkgutil.walk_packages(torchrl_unilab.__path__, "torchrl_unilab."):
        if ".plugins" in found.name or found.name.endswith("__main__"):
            continue
        module = importlib.import_module(found.name)
        own = set(re.findall(r"\b_[a-z]\w+", inspect.getsource(module)))
        for kind in vars(module).values():
            if inspect.isclass(kind) and kind.__module__ == found.name:
                shared |= own & set().union(*map(_private_of, kind.__mro__))
    return shared


@cache
def _private_of(kind: type) -> set[str]:
    """Private names of a foreign class, with the attributes that its methods use."""
    if kind.__module__.partition(".")[0] not in ("torch", "torchrl", "tensordict"):
        return set()
    code = [f.__code__ for f in vars(kind).values() if inspect.isfunction(f)]
    names = {*vars(kind)}.union(*(c.co_names for c in code))
    return {name for name in names if re.match(r"_[a-z]", name)}
