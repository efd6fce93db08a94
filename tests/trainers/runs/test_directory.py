from __future__ import annotations

import os

import pytest

from torchrl_unilab.errors import ConfigError
from torchrl_unilab.trainers.runs.directory import check_run_dir, write_whole


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
    with pytest.raises(ConfigError, match="it is not empty"):
        check_run_dir(tmp_path)
