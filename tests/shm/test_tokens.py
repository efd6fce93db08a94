"""Waiting for tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.support.bounds import DEADLINE
from torchrl_unilab.shm import tokens
from torchrl_unilab.shm.tokens import TokenPipe, pack_token, waits


def test_a_wait_ends_when_a_pipe_has_a_token_and_not_only_to_look_who_lives(monkeypatch):
    monkeypatch.setattr(tokens, "LIFE_CHECK_SECONDS", DEADLINE)
    pipes = [TokenPipe.create() for _ in range(2)]
    pipes[1].put([pack_token(1, 0)])
    with ThreadPoolExecutor(1) as pool:
        pool.submit(next, waits(pipes, DEADLINE)).result(DEADLINE / 4)
    for pipe in pipes:
        pipe.close()
