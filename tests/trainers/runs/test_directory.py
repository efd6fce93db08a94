from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchrl_unilab.configs.file import as_yaml
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.trainers.runs.directory import (
    check_run_dir,
    check_same_run,
    run_dir_held,
    run_path,
    write_whole,
)


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    file = tmp_path / "config.yaml"
    write_whole(file, "a: 1\n")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(file, "a: 2\n")
    assert file.read_text() == "a: 1\n"


def test_a_run_starts_in_a_directory_with_a_draft_of_its_first_file(tmp_path):
    (tmp_path / ".config.yaml").touch()
    check_run_dir(tmp_path)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(
        ConfigError, match=r"it is not empty .* or continue the run in it: --resume"
    ):
        check_run_dir(tmp_path)


@pytest.mark.parametrize("other", [{"env": "Ant-v5"}, {"algo": "sac"}, {"seed": 4}])
def test_a_run_starts_again_only_as_the_one_that_a_directory_is_of(tmp_path, other):
    run = {"env": "Hopper-v5", "algo": "appo", "seed": 3}
    (tmp_path / "config.yaml").write_text(as_yaml({**run, "gamma": 0.9}))
    check_same_run(tmp_path, {**run, "gamma": 0.5})
    with pytest.raises(ConfigError, match=r"it is of a run with .*'seed': 3\} \(expected"):
        check_same_run(tmp_path, {**run, **other})


def test_to_resume_is_not_the_way_where_there_is_no_run(tmp_path):
    (tmp_path / "notes").touch()
    with pytest.raises(ConfigError, match=r"it is not empty \(.*\)\. Choose another\.$"):
        check_run_dir(tmp_path)


def test_to_copy_the_run_is_not_the_way_where_its_directory_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"cannot be made, Not a .*\)\. Choose another\.$"),
        run_dir_held(tmp_path / "file" / "run"),
    ):
        pass


@pytest.mark.parametrize("below_a_file", [True, False])
def test_a_directory_that_cannot_be_made_is_refused_before_a_run_starts(
    tmp_path, monkeypatch, below_a_file
):
    parent = tmp_path / "parent"
    if below_a_file:
        parent.touch()
    else:
        parent.mkdir()
        monkeypatch.setattr(os, "access", lambda path, mode: False)  # as root may write it
    with pytest.raises(ConfigError, match=rf"cannot be made in {parent} \(expected"):
        check_run_dir(parent / "new" / "run")


def test_a_link_that_leads_nowhere_is_no_directory_for_a_run(tmp_path):
    (tmp_path / "run").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"it is a file \(expected a new or empty directory\)"):
        check_run_dir(tmp_path / "run")


def test_a_run_directory_below_a_working_directory_that_was_deleted_is_refused(deleted_directory):
    with pytest.raises(ConfigError, match=r"'run': relative to a working directory .* deleted"):
        run_path("run")
    assert run_path("/run") == Path("/run")
