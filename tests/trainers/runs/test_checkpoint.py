from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tqdm import tqdm

from tests.support.checkpoints import tree
from torchrl_unilab.data import PackedReplayStorage
from torchrl_unilab.errors import CheckpointError
from torchrl_unilab.trainers.runs import checkpoint as module
from torchrl_unilab.trainers.runs.checkpoint import (
    RunCheckpoints,
    load_trainer,
    run_checkpoint,
    save_learner,
)

RUN = {"env": "Hopper-v5", "algo": "appo", "seed": 3, "hidden": [16]}


class Part:
    """A component of a checkpoint: one tensor."""

    def __init__(self, value: float) -> None:
        self.value = torch.full((8,), value)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.value = state_dict["value"]


class Broken(Part):
    """Cannot be saved."""

    error: Exception = OSError(28, "No space left on device")

    def state_dict(self) -> dict[str, Any]:
        raise self.error


class Copying(Part):
    """Copies, when it is saved, what a process that is killed then would leave."""

    def __init__(self, source: Path, copy: Path) -> None:
        super().__init__(0.0)
        self.paths = source, copy

    def state_dict(self) -> dict[str, Any]:
        shutil.copytree(*self.paths)
        return super().state_dict()


def save(directory: Path, frames: int, keep: int = 2, **parts: Any) -> Path:
    """Save a checkpoint after so many frames, which it holds."""
    checkpoints = RunCheckpoints(directory, keep, interval=100)
    metadata = checkpoints.metadata(RUN, total_frames=1000, resumed=[50])
    return checkpoints.save(
        run_checkpoint(part=Part(frames), **parts),
        step=frames,
        metadata={**metadata, "collected_frames": frames},
    )


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_a_checkpoint_tells_what_run_it_is_of_and_brings_components_back(tmp_path):
    path = save(tmp_path, 300)
    saved = RunCheckpoints(tmp_path).newest()
    assert (saved.path, saved.run, saved.frames, saved.total_frames) == (path, RUN, 300, 1000)
    assert (saved.interval, saved.keep, saved.resumed) == (100, 2, [50])
    torch.manual_seed(5)
    expected = save(tmp_path, 400), torch.rand(3)
    part = Part(0.0)
    run_checkpoint(part=part).load(expected[0])
    assert part.value.tolist() == [400.0] * 8
    assert torch.equal(torch.rand(3), expected[1])  # the generator too


def test_copies_by_other_names_are_neither_loaded_nor_removed(tmp_path):
    shutil.copytree(save(tmp_path, 100), tmp_path / "frames-best")
    shutil.copytree(tmp_path / "frames-best", tmp_path / "frames-000000000100.mine")
    for frames in (200, 300):
        save(tmp_path, frames)
    assert RunCheckpoints(tmp_path).newest().frames == 300
    numbered = ["frames-000000000200", "frames-000000000300"]
    assert names(tmp_path) == ["frames-000000000100.mine", *numbered, "frames-best"]


def test_the_rows_of_a_replay_are_saved_and_loaded(tmp_path):
    rows = TensorDict({"reward": torch.arange(5.0)}, [5])
    with (
        PackedReplayStorage(8, example=rows[0]) as replay,
        PackedReplayStorage(8, example=rows[0]) as other,
    ):
        replay.append(rows)
        path = save(tmp_path, 1, replay=replay)
        run_checkpoint(part=Part(0.0), replay=other).load(path)
        assert other.size == 5
        assert torch.equal(other.get(torch.arange(5))["reward"], rows["reward"])


def test_nothing_stays_of_a_checkpoint_in_which_a_process_was_killed(tmp_path):
    written, left = tmp_path / "written", tmp_path / "left"
    save(written, 4, zzz=Copying(written, left))  # the last part
    assert tree(left)  # other parts
    (left / ".frames-000000000003").mkdir()  # all parts, and not yet by its name
    save(left, 5)
    assert names(left) == ["frames-000000000005"]


def test_only_the_newest_are_kept(tmp_path):
    for frames in (5, 20, 100, 1_000_000):
        save(tmp_path, frames, keep=3)
    assert names(tmp_path) == ["frames-000000000020", "frames-000000000100", "frames-000001000000"]
    save(tmp_path, 2_000_000, keep=1)
    assert names(tmp_path) == ["frames-000002000000"]


def test_other_hidden_directories_stay(tmp_path):
    (tmp_path / ".git").mkdir()
    save(tmp_path, 100)
    assert names(tmp_path) == [".git", "frames-000000000100"]


def test_a_checkpoint_of_as_many_frames_stays_as_it_is(tmp_path):
    save(tmp_path, 100)
    before = tree(tmp_path)
    save(tmp_path, 100, other=Broken(0.0))
    assert tree(tmp_path) == before


def test_a_full_disk_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: Mock(free=7))
    said = r"No space left .*; 7 bytes are free\)\. Make room and train again\."
    with pytest.raises(OSError, match=said):
        save(tmp_path, 100, broken=Broken(0.0))
    assert names(tmp_path) == []
    save(tmp_path, 100)
    before = tree(tmp_path)
    with pytest.raises(OSError, match=r"No space left .* resume from the checkpoint before"):
        save(tmp_path, 200, broken=Broken(0.0))
    assert tree(tmp_path) == before
    assert names(tmp_path) == ["frames-000000000100"]


@pytest.mark.parametrize(
    ("error", "is_the_disk_s"),
    [
        *((OSError(code, os.strerror(code)), True) for code in (errno.EDQUOT, errno.EFBIG)),
        (OSError(errno.EIO, os.strerror(errno.EIO)), True),
        (RuntimeError(f"write failed: {os.strerror(errno.ENOSPC)}"), True),  # as torch says it
        (OSError(errno.EACCES, os.strerror(errno.EACCES)), False),
        (RuntimeError("another one"), False),
    ],
)
def test_what_a_disk_refuses_is_distinguished_from_other_errors(
    tmp_path, monkeypatch, error, is_the_disk_s
):
    monkeypatch.setattr(Broken, "error", error)
    with pytest.raises(OSError if is_the_disk_s else type(error)) as caught:
        save(tmp_path, 100, broken=Broken(0.0))
    assert ("Make room and train again" in str(caught.value)) is is_the_disk_s
    assert names(tmp_path) == []


def test_a_disk_that_is_full_at_the_last_leaves_no_draft(tmp_path, monkeypatch):
    monkeypatch.setattr(module.os, "fsync", Mock(side_effect=OSError(28, os.strerror(28))))
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 100)
    assert names(tmp_path) == []


def test_all_files_are_on_the_disk_before_a_checkpoint_has_its_name(tmp_path, monkeypatch):
    synced: dict[str, bool] = {}
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced[os.readlink(f"/proc/self/fd/{descriptor}")] = path.exists()
        real(descriptor)

    path = tmp_path / "frames-000000000100"
    monkeypatch.setattr(module.os, "fsync", fsync)
    save(tmp_path, 100)
    draft = str(tmp_path / ".frames-000000000100")
    files = {f"{draft}/{name}" for name in tree(path)}
    assert files
    assert {draft, *files} <= {name for name, named in synced.items() if not named}
    assert synced[str(tmp_path)]  # the name itself, after it was given


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """A directory with two checkpoints."""
    directory = tmp_path_factory.mktemp("two")
    save(directory, 100)
    save(directory, 200)
    return directory


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_of_any_byte_of_any_file_is_found_and_the_older_one_offered(two, data):
    files = [path for path in sorted((two / "frames-000000000200").rglob("*")) if path.is_file()]
    path = data.draw(st.sampled_from(files))
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    cut = data.draw(st.booleans())
    path.write_bytes(whole[:at] + (b"" if cut else bytes([whole[at] ^ 1]) + whole[at + 1 :]))
    try:
        with pytest.raises(
            CheckpointError, match="remove frames-000000000200 to resume from there"
        ):
            RunCheckpoints(two).newest()
    finally:
        path.write_bytes(whole)
    assert RunCheckpoints(two).newest().frames == 200


def test_a_missing_file_and_one_too_many_are_found(two):
    path = next((two / "frames-000000000200" / "components").rglob("*.json"))
    whole = path.read_bytes()
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path.name}.* are not as they were written"):
        RunCheckpoints(two).newest()
    path.write_bytes(whole)
    (path.parent / "more.json").write_text("?")
    with pytest.raises(CheckpointError, match=r"more.* are not as they were written"):
        RunCheckpoints(two).newest()
    (path.parent / "more.json").unlink()


@pytest.mark.parametrize("name", ["digests.json", "manifest.json"])
@pytest.mark.parametrize("text", ["", "{", "{}", "[]", "[1]", "null"])
def test_where_all_are_damaged_no_older_one_is_offered(tmp_path, name, text):
    for frames in (100, 200):
        (save(tmp_path, frames) / name).write_text(text)
    with pytest.raises(CheckpointError, match="None of the older ones is whole either"):
        RunCheckpoints(tmp_path).newest()


def test_what_is_not_needed_may_be_damaged(tmp_path):
    path = save(tmp_path, 100, policy=Part(1.0))
    file = next(path.glob("components/*-part/**/*.tdz"))
    file.write_bytes(b"")
    assert RunCheckpoints(tmp_path).newest(["policy"]).frames == 100
    with pytest.raises(CheckpointError, match="not as they were written"):
        RunCheckpoints(tmp_path).newest(["part"])


def test_another_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FORMAT", 99)
    save(tmp_path, 100)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"it is of format 99 \(expected .*format \d+\)"):
        RunCheckpoints(tmp_path).newest()


def test_a_checkpoint_without_what_is_needed_of_it_is_refused(tmp_path):
    save(tmp_path, 100)
    with pytest.raises(CheckpointError, match=r"it has no \['policy'\] \(expected a whole one"):
        RunCheckpoints(tmp_path).newest(("part", "policy"))


def test_a_directory_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        RunCheckpoints(tmp_path / "nowhere").newest()
    assert not (tmp_path / "nowhere").exists()


# A trainer's


@pytest.fixture
def trainer() -> SimpleNamespace:
    """What is saved of a trainer, without one."""
    return SimpleNamespace(
        loss_module=torch.nn.Linear(2, 1),
        checkpoint=None,
        checkpoint_rotation=Mock(),
        collected_frames=100,
        _checkpoint_manifest_metadata=dict,
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.0])
def test_networks_are_saved_after_an_error_if_all_of_their_numbers_are_finite(trainer, value):
    trainer.loss_module.weight.data[0, 1] = value
    save_learner(trainer)
    assert trainer.checkpoint_rotation.save.called is (value == 1.0)


@pytest.mark.parametrize(("insist", "interrupts"), [(False, 1), (True, 1), (True, 2)])
def test_a_save_that_was_interrupted_begins_again_once_where_that_is_asked_for(
    trainer, insist, interrupts
):
    save = trainer.checkpoint_rotation.save
    save.side_effect = [*[KeyboardInterrupt] * interrupts, None]
    saved = insist and interrupts == 1
    with contextlib.nullcontext() if saved else pytest.raises(KeyboardInterrupt):
        save_learner(trainer, insist=insist)
    assert save.call_count == 1 + insist


def test_a_replay_is_loaded_before_its_writers(tmp_path):
    loaded = []
    parts = {name: Part(1.0) for name in ("collector", "replay", "writers")}
    save(tmp_path, 100, **parts)
    for name, part in parts.items():
        part.load_state_dict = lambda state, name=name: loaded.append(name)
    trainer = Mock(checkpoint=run_checkpoint(**parts), ranks=Mock(rank=0), progress_bar=False)
    load_trainer(trainer, RunCheckpoints(tmp_path).newest())
    assert loaded[0] == "replay"
    assert sorted(loaded) == sorted(parts)


@pytest.mark.parametrize(("rank", "moved"), [(0, False), (1, False), (0, True)])
def test_generators_begin_anew_on_other_ranks_and_other_devices(tmp_path, rank, moved):
    saved_state = torch.get_rng_state()
    save(tmp_path, 100)
    torch.rand(1)
    before = torch.get_rng_state()
    checkpoint = run_checkpoint(part=Part(0.0))
    trainer = Mock(checkpoint=checkpoint, ranks=Mock(rank=rank), progress_bar=False)
    load_trainer(trainer, RunCheckpoints(tmp_path).newest(), moved=moved)
    anew = bool(rank or moved)
    assert trainer.set_seed.called is anew
    assert torch.equal(torch.get_rng_state(), before if anew else saved_state)


def test_the_progress_bar_of_a_resumed_run_begins_at_its_frames_which_its_rate_leaves_out(tmp_path):
    save(tmp_path, 100)
    trainer = Mock(checkpoint=run_checkpoint(part=Part(0.0)), ranks=Mock(rank=0))
    load_trainer(trainer, RunCheckpoints(tmp_path).newest())
    (when, begin), _ = trainer.register_op.call_args
    with tqdm(total=200, file=io.StringIO()) as trainer._pbar:
        begin()
        shown = trainer._pbar.format_dict
    assert (when, shown["n"], shown["initial"]) == ("setup", 100, 100)
    assert trainer._pbar.last_print_n == 100
