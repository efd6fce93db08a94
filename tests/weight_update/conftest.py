from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.acting import receiver_of
from torchrl_unilab.weight_update import UniLabShmScheme

CPU = torch.device("cpu")


@pytest.fixture
def make_sender() -> Iterator[Callable[..., UniLabShmScheme]]:
    """Makes connected senders, each shut down at the end.

    It takes the arguments of `init_on_sender`, and the scheme's as `settings`.
    """
    with contextlib.ExitStack() as stack:

        def make(
            settings: dict[str, Any] | None = None,
            scheme: type[UniLabShmScheme] = UniLabShmScheme,
            **source: Any,
        ) -> UniLabShmScheme:
            sender = scheme(**(settings or {}))
            stack.callback(sender.shutdown)
            sender.init_on_sender(**source)
            sender.connect()
            return sender

        yield make


@pytest.fixture
def make_receiver() -> Callable[..., UniLabShmScheme]:
    """Makes connected receivers, as another process has them."""

    def make(sender: UniLabShmScheme, acting: nn.Module, worker: int = 0) -> UniLabShmScheme:
        receiver = receiver_of(sender)
        receiver.init_on_receiver(model_id="policy", model=acting, worker_idx=worker)
        receiver.connect()
        return receiver

    return make


@pytest.fixture
def pair(make_sender, make_receiver) -> Callable[..., tuple[UniLabShmScheme, UniLabShmScheme]]:
    """Makes a sender of one model and a receiver with another, connected, without a collector."""

    def make(
        learner: nn.Module, acting: nn.Module, **settings: Any
    ) -> tuple[UniLabShmScheme, UniLabShmScheme]:
        sender = make_sender(settings, model_id="policy", model=learner, devices=[CPU])
        return sender, make_receiver(sender, acting)

    return make
