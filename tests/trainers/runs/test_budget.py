from __future__ import annotations

import dataclasses
import json
import os
from functools import partial

import pytest
import torch

from tests.support.processes import live_children
from torchrl_unilab.cli import main
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.runtime.budget import MemoryBudget, MemoryLimit
from torchrl_unilab.shm.segment import named_directory
from torchrl_unilab.trainers import APPOConfig, OffPolicyConfig, plan_run, train_off_policy
from torchrl_unilab.trainers.runs import budget as budget_module
from torchrl_unilab.trainers.runs.budget import (
    RunBudget,
    RunSizes,
    check_frames,
    memory_limits,
    replay_items,
    run_threads,
)
from torchrl_unilab.trainers.runs.builders import ALGORITHMS, build_learner, run_budget
from torchrl_unilab.weight_update import UniLabShmScheme

MIB = 1 << 20
SMALL_MOUNT = (
    MemoryLimit("shared-memory mount /dev/shm", 64 * MIB, ("shared",)),
    MemoryLimit("memory", 1 << 40, ("shared", "private")),
)
OFF_POLICY = {"num_envs": 3, "replay_buffer_n": 700, "hidden": (8, 8)}
RUNS = {
    "appo": ("Hopper-v5", APPOConfig(num_envs=3, num_steps=7, hidden=(8,))),
    "appo-wide": (
        "HalfCheetah-v5",
        APPOConfig(num_envs=5, num_steps=3, num_collectors=2, slots=3, pool=2, hidden=(16, 16)),
    ),
    "sac": ("HalfCheetah-v5", OffPolicyConfig(**OFF_POLICY, obs_normalization=True)),
    "td3-two": ("Hopper-v5", OffPolicyConfig("td3", num_collectors=2, **OFF_POLICY)),
    "n-step": ("Hopper-v5", OffPolicyConfig(**OFF_POLICY, n_step=3, env_steps_per_sync=2)),
}


@pytest.fixture
def reserved(monkeypatch):
    """The sizes of all shared segments that are made, in order."""
    sizes = []
    reserve = os.posix_fallocate

    def spy(descriptor, offset, nbytes):
        sizes.append(nbytes)
        reserve(descriptor, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", spy)
    return sizes


@pytest.fixture(params=RUNS)
def run(request):
    return RUNS[request.param]


def _collector(task, config):
    """The collector that a run would have, which allocates all that is shared."""
    create_env = partial(MujocoBatchEnv, task, num_envs=config.num_envs, num_threads=1)
    env = create_env()
    learner = build_learner(env, config)
    env.close()
    return ALGORITHMS[config.algorithm].collector(
        create_env, learner.actor, UniLabShmScheme(), config, 0
    )


def _exact_shared(task, config):
    items = plan_run(task, config).memory.items
    return [item for item in items if item.place == "shared" and not item.estimate]


def _sac(**settings):
    return plan_run("HalfCheetah-v5", OffPolicyConfig.for_task("HalfCheetah-v5", **settings))


def test_computed_bytes_of_segments_are_those_allocated(run, reserved):
    task, config = run
    items = _exact_shared(task, config)
    assert not reserved  # computing allocates nothing
    computed = [item.nbytes // item.segments for item in items for _ in range(item.segments)]
    collector = _collector(task, config)
    collector.shutdown()
    assert sorted(computed) == sorted(reserved)


def test_named_segments_take_the_pages_of_the_mount_that_were_computed(run, monkeypatch):
    monkeypatch.setenv("TORCHRL_UNILAB_SEGMENT", "named")
    task, config = run
    before = {*named_directory().iterdir()}  # metrics of collectors that are not collected yet
    collector = _collector(task, config)
    blocks = sum(path.stat().st_blocks for path in {*named_directory().iterdir()} - before)
    collector.shutdown()
    assert blocks * 512 == sum(item.taken for item in _exact_shared(task, config))


@pytest.mark.parametrize("name", ["sac", "n-step"])
def test_batch_slots_have_the_computed_bytes(name):
    task, config = RUNS[name]
    items = {item.name: item for item in plan_run(task, config).memory.items}
    collector = _collector(task, config)
    count = config.batch_size * config.updates_per_step
    batch = collector.storage.empty_batch(count)
    collector.shutdown()
    nbytes = batch.get("index").untyped_storage().nbytes()
    assert items["batch slots"].nbytes == items["learner's working copies"].nbytes == 2 * nbytes
    assert {item.place for item in items.values()} == {"shared", "private"}


def _on_a_device(config):
    """What a run on HalfCheetah would take with its learner on a GPU."""
    env = MujocoBatchEnv("HalfCheetah-v5", num_envs=1, num_threads=1)
    learner = build_learner(env, config)
    sizes = RunSizes.of(env, learner.actor, learner.loss)
    env.close()
    return dataclasses.replace(sizes, device=torch.device("cuda", 0))


def test_a_learner_on_a_device_has_its_batches_and_networks_there(monkeypatch):
    monkeypatch.setattr(budget_module, "memory_limits", lambda device: ())
    config = OffPolicyConfig()
    sizes = _on_a_device(config)
    items = RunBudget.of(config, sizes, replay_items(config, sizes)).memory.items
    device = {item.name: item.nbytes for item in items if item.place == "device"}
    host = {item.name: item.nbytes for item in items if item.place == "private"}
    assert {"batch slots", "networks, gradients, Adam", "learner's working copies"} == set(device)
    assert device["batch slots"] == host["batch slots, page-locked"]


def test_the_size_of_a_run_does_not_depend_on_how_many_environments_were_measured():
    config = OffPolicyConfig(num_envs=6)
    env = MujocoBatchEnv("Hopper-v5", num_envs=6, num_threads=1)
    measured = run_budget(env, build_learner(env, config), config)
    env.close()
    assert measured.memory.items == plan_run("Hopper-v5", config).memory.items


def test_a_process_that_evaluates_counts():
    config = APPOConfig(num_envs=6)
    env = MujocoBatchEnv("Hopper-v5", num_envs=6, num_threads=1)
    learner = build_learner(env, config)
    alone, beside = (run_budget(env, learner, config, evaluates=yes) for yes in (False, True))
    env.close()
    more = set(beside.memory.items) - set(alone.memory.items)
    assert [(item.name, item.nbytes) for item in more] == [
        ("evaluation's process (eval_interval)", 300 * MIB)
    ]


def test_networks_count_with_their_gradients_and_what_adam_holds(run):
    task, config = run
    env = MujocoBatchEnv(task, num_envs=1, num_threads=1)
    loss = build_learner(env, config).loss
    env.close()
    trained = [p for p in loss.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    adam = torch.optim.Adam(trained)
    adam.step()
    moments = [t for state in adam.state.values() for n, t in state.items() if n != "step"]
    held = [*loss.parameters(), *loss.buffers(), *(p.grad for p in trained), *moments]
    nbytes = sum({t.data_ptr(): t.nbytes for t in held}.values())
    items = {item.name: item.nbytes for item in plan_run(task, config).memory.items}
    assert items["networks, gradients, Adam"] == nbytes


def test_what_each_collector_takes_counts_as_often_as_there_are_collectors():
    one, two = (
        {item.name: item.nbytes for item in plan_run("Hopper-v5", config).memory.items}
        for config in (APPOConfig(), APPOConfig(num_collectors=2))
    )
    for name in ("policies", "environments", "processes", "steps"):
        name = name if name == "environments" else f"collectors' {name}"
        assert two[name] == 2 * one[name] > 0, name


def test_a_pool_of_rollouts_takes_as_many_times_one():
    items = plan_run("Hopper-v5", APPOConfig(pool=3)).memory.items
    taken = {item.name: item.nbytes for item in items}
    assert taken["rollout pool"] == 3 * taken["rollout copy"] > 0
    assert taken["learner's working copies"] == 2 * taken["rollout pool"]


def test_planning_a_run_leaves_the_callers_generator_as_it_was():
    state = torch.get_rng_state()
    plan_run("Hopper-v5", APPOConfig())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("asked", "cores", "threads"), [(3, 1, 3), (None, 8, 2), (None, 1, 1)])
def test_a_learner_has_the_threads_that_were_asked_for_else_two_where_there_are_as_many(
    asked, cores, threads, monkeypatch
):
    monkeypatch.setattr(budget_module, "available_cores", lambda: cores)
    assert run_threads(OffPolicyConfig(learner_threads=asked)).learner_threads == threads


# Limits


def test_ranks_of_a_machine_share_its_memory_and_its_mount(monkeypatch):
    monkeypatch.setenv("TORCHRL_UNILAB_SEGMENT", "named")
    monkeypatch.setattr(budget_module, "available_memory", lambda: 900)
    monkeypatch.setattr(budget_module, "free_bytes", lambda named: 600)
    monkeypatch.setattr(budget_module, "local_ranks", lambda: 3)
    assert [limit.nbytes for limit in memory_limits(torch.device("cpu"))] == [200, 300]


def test_a_learner_on_a_device_has_what_is_free_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 9))
    device = torch.device("cuda", 1)
    assert memory_limits(device)[-1] == MemoryLimit("cuda:1", 5, ("device",))


def test_each_rank_needs_the_frames_of_a_first_update():
    check_frames(2, APPOConfig(), ranks=2)
    with pytest.raises(ConfigError, match=r"expected an integer of at least 2\)"):
        check_frames(1, APPOConfig(), ranks=2)


@pytest.mark.parametrize("frames", [0, -1, 1.5, "many", 10**25])
@pytest.mark.parametrize("config", [APPOConfig(), OffPolicyConfig()])
def test_what_is_no_number_of_frames_is_no_matter_of_the_first_update(config, frames):
    with pytest.raises(ConfigError, match=r"\). Set the frames to collect"):
        check_frames(frames, config)


def test_too_few_frames_name_the_settings_that_ask_for_more():
    with pytest.raises(ConfigError, match=r"at least 4000\)\. .* lower learning_starts"):
        check_frames(3_999, OffPolicyConfig())


def _limited(budget, *limits):
    return dataclasses.replace(budget, memory=MemoryBudget(budget.memory.items, limits))


def test_the_default_sac_does_not_fit_a_mount_of_64_mb():
    refusal = _limited(_sac(), *SMALL_MOUNT).refusal()
    assert refusal is not None
    assert "do not fit shared-memory mount /dev/shm (expected at most 64.0 MiB" in refusal
    assert "The largest item, packed replay, takes 167.9 MiB, 2.6" in refusal
    assert refusal.endswith("lower replay_buffer_n or num_envs.")


def test_a_replay_lowered_by_the_factor_named_fits():
    config = OffPolicyConfig.for_task("HalfCheetah-v5")
    refusal = _limited(plan_run("HalfCheetah-v5", config), *SMALL_MOUNT).refusal() or ""
    factor = float(refusal.split(" times what")[0].split()[-1]) + 0.01  # as it was rounded
    lowered = dataclasses.replace(config, replay_buffer_n=int(config.replay_buffer_n / factor))
    assert _limited(plan_run("HalfCheetah-v5", lowered), *SMALL_MOUNT).refusal() is None


def test_on_a_mount_of_64_mb_the_default_appo_fits():
    budget = plan_run("HalfCheetah-v5", APPOConfig.for_task("HalfCheetah-v5"))
    _limited(budget, *SMALL_MOUNT).check()


@pytest.mark.parametrize("kind", ["anonymous", "named"])
def test_the_mount_bounds_named_segments_alone(kind, monkeypatch):
    monkeypatch.setenv("TORCHRL_UNILAB_SEGMENT", kind)
    mounts = [limit for limit in memory_limits(torch.device("cpu")) if "mount" in limit.name]
    assert len(mounts) == (kind == "named")


@pytest.mark.parametrize("own_env", [False, True])
def test_a_run_that_does_not_fit_is_refused_with_nothing_allocated(
    own_env, tmp_path, monkeypatch, reserved
):
    monkeypatch.setattr(budget_module, "memory_limits", lambda device: SMALL_MOUNT)
    run_dir = tmp_path / "run"
    create_env = partial(MujocoBatchEnv, "HalfCheetah-v5", num_envs=16, num_threads=1)
    with pytest.raises(ConfigError, match=r"(?s)lower replay_buffer_n or .*packed replay +167"):
        train_off_policy(
            "HalfCheetah-v5",
            frames=9999,
            run_dir=run_dir,
            create_env=create_env if own_env else None,
            progress_bar=False,
        )
    assert not reserved
    assert not run_dir.exists()
    assert not live_children()


# The command


def test_the_command_takes_the_settings_of_a_run_and_prints_lines_or_plain_data(capsys):
    settings = ["--replay-buffer-n", "1000", "--num-envs", "4", "--num-collectors", "2"]
    assert main(["budget", "sac", "--env", "Hopper-v5", "--json", *settings]) == 0
    printed = json.loads(capsys.readouterr().out)
    config = OffPolicyConfig.for_task(
        "Hopper-v5", replay_buffer_n=1000, num_envs=4, num_collectors=2
    )
    expected = plan_run("Hopper-v5", config)
    assert printed["threads"] == dataclasses.asdict(expected.threads)
    assert printed["memory"]["items"][0]["nbytes"] == expected.memory.items[0].nbytes
    assert printed["memory"]["fits"] is True
    assert main(["budget", "appo", "--env", "Hopper-v5", "--physics-threads", "3"]) == 0
    printed = capsys.readouterr().out
    assert "1 collector(s) with 3 physics thread(s) each" in printed
    assert "rollout ring" in printed


def test_the_command_says_what_does_not_fit_and_fails(monkeypatch, capsys):
    monkeypatch.setattr(budget_module, "memory_limits", lambda device: SMALL_MOUNT)
    assert main(["budget", "sac", "--env", "HalfCheetah-v5"]) == 2
    out, err = capsys.readouterr()
    assert "TOO MUCH" in out
    assert err.startswith("error: memory of the run: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("algorithm", ["appo", "sac", "td3"])
def test_networks_that_fit_no_memory_are_refused_before_they_are_made(algorithm, capsys):
    wide = ["--hidden", "10000000", "10000000"]
    assert main(["budget", algorithm, "--env", "Hopper-v5", *wide]) == 2
    refused = capsys.readouterr().err
    assert refused.startswith("error: hidden (10000000, 10000000), networks: 12")
    assert refused.endswith("Lower it.\n")
