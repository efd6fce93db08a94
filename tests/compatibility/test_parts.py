"""The record that the page on compatibility shows, against what happens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.compatibility.parts import GROUPS, outcome

RECORD = Path(__file__).with_name("results.json")
RECORDED = json.loads(RECORD.read_text())
BY_TITLE = {group.title: group for group in GROUPS}


@pytest.mark.parametrize("title", BY_TITLE)
def test_each_class_that_torchrl_has_is_on_the_page(title):
    assert BY_TITLE[title].known() == set(RECORDED[title]) == set(BY_TITLE[title].parts)


@pytest.mark.parametrize("title", BY_TITLE)
def test_what_is_recorded_happens(title):
    group = BY_TITLE[title]
    assert {name: outcome(group, name) for name in group.parts} == RECORDED[title]
