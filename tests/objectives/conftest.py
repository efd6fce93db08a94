from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch


@pytest.fixture
def no_looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """A context in which nothing may look at a tensor's value: a device would be waited for."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a step waited for the device")

    @contextlib.contextmanager
    def refusing() -> Iterator[None]:
        looks = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__float__", "__int__")
        with monkeypatch.context() as patch:
            for name in looks:
                patch.setattr(torch.Tensor, name, refuse)
            yield

    return refusing


@pytest.fixture
def gpu_refuses_to_wait() -> Callable[[], AbstractContextManager[None]]:
    """A context in which waiting for the GPU is an error."""

    @contextlib.contextmanager
    def refusing() -> Iterator[None]:
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is said to be a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    return refusing
