from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.support.bounds import DEADLINE
from torchrl_unilab.distributed import UniLabRayScheme
from torchrl_unilab.distributed.mailbox import Mailbox, load_ray
from torchrl_unilab.errors import ConfigError


def _with_a_mailbox(scenario: Callable[[Mailbox], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that plays a scenario with a mailbox of its own."""
    return lambda: asyncio.run(scenario(Mailbox()))


@_with_a_mailbox
async def test_a_node_gets_the_newest_version_and_none_twice(mailbox):
    assert await mailbox.poll(-1, 0.001, None, {}) is None
    await mailbox.post(3, [3])
    await mailbox.post(5, [5])
    assert await mailbox.poll(-1, DEADLINE, None, {}) == [5]
    assert await mailbox.poll(4, DEADLINE, None, {}) == [5]
    assert await mailbox.poll(5, 0.001, None, {}) is None


@_with_a_mailbox
async def test_a_version_that_comes_late_does_not_replace_a_newer_one(mailbox):
    await mailbox.post(5, [5])
    await mailbox.post(4, [4])
    assert await mailbox.poll(-1, DEADLINE, None, {}) == [5]


@_with_a_mailbox
async def test_a_post_wakes_all_nodes_that_wait(mailbox):
    await mailbox.post(0, [0])
    waiting = [asyncio.create_task(mailbox.poll(0, DEADLINE, None, {})) for _ in range(3)]
    await asyncio.sleep(0)  # they have begun to wait
    await mailbox.post(1, [1])
    assert await asyncio.gather(*waiting) == [[1]] * 3


@_with_a_mailbox
async def test_each_node_has_the_last_of_its_own_reports(mailbox):
    await mailbox.post(0, [0])
    await mailbox.poll(0, 0.001, 0, {0: 1, 1: None})
    await mailbox.poll(0, 0.001, 1, {0: 2})
    await mailbox.poll(0, 0.001, None, {})  # of a node that has nothing to report yet
    await mailbox.poll(0, 0.001, 0, {0: 3})  # it was started again, with one worker
    assert await mailbox.reports() == {0: {0: 3}, 1: {0: 2}}


def test_its_process_needs_no_torch():
    code = (
        "import sys, torchrl_unilab.distributed.mailbox\n"
        "assert sys.modules.keys().isdisjoint({'torch', 'torchrl', 'ray'})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_ray_the_scheme_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for refused in (load_ray, UniLabRayScheme):
        with pytest.raises(ConfigError, match=r"pip install 'torchrl-unilab\[ray\]'"):
            refused()
