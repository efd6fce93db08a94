"""Ranks: processes that learn in step, one learner each, as ``torchrun`` starts them.

Their invariant: after each step all ranks have the same parameters, bit for bit on processors of
one kind. So all that parameters depend on is averaged, gathered or agreed upon, by all ranks in the
same order. In a world of one, the default, each operation returns at once. `Run` joins;
trainers and updates call the operations.

A rank that fails says why before it leaves, in the store that the launcher keeps; so do those
that fail because of it. The first reason is the one that all name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from torchrl_unilab.checks import as_integer, as_seconds
from torchrl_unilab.errors import (
    ConfigError,
    DivergedError,
    PeerGoneError,
    UsageError,
    WaitTimeoutError,
)
from torchrl_unilab.limits import launcher_env, local_ranks
from torchrl_unilab.processes import process_id, process_is_alive, process_is_stopped, this_process
from torchrl_unilab.waits import poll_while

EXIT_REASON_SECONDS = 5.0  # within which the others say why they leave
_POLL_SECONDS = 0.05
_FOLLOWED = ""  # exit reason of a rank that leaves because another one did
_CRASHED = "was ended by a signal, or has crashed"
_LONGEST_SECONDS = 1e8  # c10d counts nanoseconds in 64 bits
_LONGEST_PAUSE_SECONDS = 0.01  # between two polls whether the others have come


class Ranks:
    """This process's rank among those that learn together, and their collective operations.

    Entering the context joins the other ranks, and leaving it tells them why. In between, SIGTERM,
    with which a launcher ends ranks, raises KeyboardInterrupt unless something else handles it. If
    a rank of this machine has crashed, an interrupt leaves the context as a PeerGoneError, which
    names it. All ranks call the same methods in the same order. If a rank does not, because it was
    killed, stopped or has failed, the others raise a PeerGoneError within `timeout` seconds, which
    names it.

    Args:
        rank: This one's number; rank 0 alone writes, logs and evaluates.
        size: How many there are.
        device: The learner's device: with ``"cuda"`` each rank of a machine takes a separate GPU.
        timeout: Seconds within which all ranks must reach each step.

    Raises:
        ConfigError: The rank or the number of ranks is not possible.

    Examples:
        >>> import torch
        >>> from torchrl_unilab.runtime import Ranks
        >>> gradient, statistics = torch.ones(3), torch.zeros(2)
        >>> with Ranks.of_torchrun() as ranks:  # alone without it
        ...     ranks.mean_([gradient], [statistics])
        ...     ranks.agree(False)
        False
    """

    def __init__(
        self, rank: int = 0, size: int = 1, *, device: str = "cpu", timeout: float = 300.0
    ) -> None:
        remedy = "Unset WORLD_SIZE and RANK, or start with torchrun, which sets both."
        self.size = as_integer("ranks", size, remedy)
        self.rank = as_integer("rank", rank, remedy, least=0, most=size - 1)
        self.device, self.timeout = device, as_seconds("timeout of ranks", timeout)
        self._store: Any = None
        self._checks = 0
        self._handler: Any = None  # SIGTERM's, from before the context was entered
        self._waiting = False  # in a collective operation, or interrupted in one
        self._processes: list[tuple[str, int]] = []  # host and process of each rank
        self._gone: PeerGoneError | None = None  # names those because of which this one leaves

    @classmethod
    def of_torchrun(cls, *, device: str = "cpu", timeout: float = 300.0) -> Self:
        """Return the ranks that a launcher started this process with: one, without a launcher.

        Raises:
            ConfigError: The environment variables of the launcher are not possible.
        """
        rank, size = launcher_env("RANK", 0), launcher_env("WORLD_SIZE", 1)
        return cls(rank, size, device=device, timeout=timeout)

    def __enter__(self) -> Self:
        if self.size == 1:
            return self
        # By rank: NaN if its gradients were not finite in the first step with such a rank.
        self._non_finite = torch.zeros(self.size)
        self._gone = None
        if dist.is_initialized():
            raise ConfigError(
                f"ranks: this process has a process group already (expected none: {self.size} "
                "ranks make their own). End it, or start without torchrun."
            )
        limit = timedelta(seconds=min(self.timeout, _LONGEST_SECONDS))
        try:
            launcher, _, _ = next(rendezvous("env://", timeout=limit))
            self._store = PrefixStore(self._agree_on_prefix(launcher), launcher)
            self._store.set(f"process/{self.rank}", f"{socket.gethostname()} {this_process()}")
            backend = self._choose_backend()
            dist.init_process_group(
                backend, store=self._store, rank=self.rank, world_size=self.size, timeout=limit
            )
            found = (self._store.get(f"process/{rank}").decode() for rank in range(self.size))
            self._processes = [(host, int(word)) for host, word in map(str.split, found)]
        except (RuntimeError, ValueError, TimeoutError) as error:
            raise WaitTimeoutError(
                f"rank {self.rank} of {self.size}: cannot join the others, {error} (expected all "
                f"within {self.timeout:g} s). Look at the output of the other ranks."
            ) from error
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.getsignal(signal.SIGTERM)
            if self._handler is signal.SIG_DFL:  # the launcher ends ranks by SIGTERM
                signal.signal(signal.SIGTERM, signal.default_int_handler)
        return self

    def _agree_on_prefix(self, store: Any) -> str:
        """Return a name for this start, one on all ranks, that no other start has.

        A launcher's store outlives restarts, and each machine's launcher counts its own: so no
        count tells one start from the next. Each rank writes a token, rank 0 all
        tokens that it finds, and a list holds once every rank has found its own in it.
        """
        own, ranks = uuid.uuid4().hex, range(self.size)
        tokens = [f"ranks/token/{rank}" for rank in ranks]
        store.set(tokens[self.rank], own)
        deadline = time.monotonic() + self.timeout
        while time.monotonic() < deadline:
            if self.rank == 0 and store.check(tokens):
                store.set("ranks/tokens", b",".join(map(store.get, tokens)))
            listed = store.get("ranks/tokens").decode() if store.check(["ranks/tokens"]) else ""
            if own in listed:
                start = f"ranks/{hashlib.sha256(listed.encode()).hexdigest()}"
                store.set(f"{start}/found/{self.rank}", b"")
                if store.check([f"{start}/found/{rank}" for rank in ranks]):
                    return start
            time.sleep(_POLL_SECONDS)
        raise TimeoutError("not all have come")

    def _choose_backend(self) -> str:
        if self.device != "cuda":  # "cuda:1" is one that all ranks share
            return "gloo"
        local, gpus = launcher_env("LOCAL_RANK", 0), torch.cuda.device_count()
        if gpus:  # `build_learner` refuses the device otherwise
            torch.cuda.set_device(local % gpus)
        # NCCL wants a GPU for each rank; decisions are exchanged by processors.
        own = gpus >= local_ranks()
        return "cpu:gloo,cuda:nccl" if own else "gloo"

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.leave(error)
        finally:
            if self._handler is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def leave(self, why: BaseException | None = None) -> None:
        """Tell the others why this rank leaves, and leave. Idempotent.

        A rank that was interrupted while it waited keeps its process group, because ending it would
        wait for the others. It cannot join another one in this process.

        Args:
            why: The error that it fails with; None if it is done.

        Raises:
            PeerGoneError: `why` is an interrupt, as a launcher sends to all ranks once one is lost.
                Names that one, if it has crashed on this machine, or broke off a step before.
        """
        interrupted = isinstance(why, KeyboardInterrupt)
        if self._store is not None:
            if interrupted and (crashed := self._crashed()):
                self._gone = self._gone_error(crashed)
            words = filter(None, (type(why).__name__, str(why)))  # an interrupt has no message
            reason = "is done" if why is None else f"failed with {': '.join(words)}"
            self._post_exit_reason(reason if self._gone is None else _FOLLOWED)
            self._store = None
            if dist.is_initialized() and not self._waiting:  # destroying it waits for the others
                dist.destroy_process_group()
        if interrupted and self._gone is not None:
            raise self._gone

    def mean_(self, gradients: Sequence[torch.Tensor], statistics: Sequence[torch.Tensor]) -> None:
        """Average gradients and statistics over all ranks, in place, by one ``all_reduce``.

        Args:
            gradients: Tensors of any shapes, on one device.
            statistics: Figures of the step, averaged alike. They may be NaN.
        """
        if self.size == 1:
            return
        non_finite = (*gradients, *statistics)[0].new_zeros(self.size)
        tensors = [*gradients, *statistics, non_finite]
        sizes = [tensor.numel() for tensor in tensors]
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        # `agree` checks it later: here nothing waits for the device.
        finite = flat[: sum(sizes[: len(gradients)])].isfinite().all()
        flat[self.rank - self.size] = torch.where(finite, 0.0, torch.nan)
        flat.div_(self.size)  # before the sum, which may overflow
        self._collective(flat, dist.all_reduce, flat)
        for tensor, part in zip(tensors, flat.split(sizes), strict=True):
            tensor.copy_(part.view_as(tensor))
        found = self._non_finite.to(non_finite)
        self._non_finite = torch.where(found.isnan().any(), found, non_finite)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return each rank's tensor, in their order; all have one shape, dtype and device.

        Raises:
            DivergedError: What ranks have sent is not finite, on all ranks; names those.
        """
        if self.size == 1:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        self._collective(tensor, dist.all_gather, gathered, tensor)
        _check_finite(gathered, "observations")
        return gathered

    def broadcast_(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give tensors rank 0's values, in place."""
        if self.size == 1:
            return
        for tensor in tensors:
            self._collective(tensor, dist.broadcast, tensor.detach(), 0)

    def agree(self, wish: bool) -> bool:
        """Return whether `wish` is true on any rank; all ranks get the same answer.

        Raises:
            DivergedError: Gradients of a rank were not finite since; names it.
        """
        if self.size == 1:
            return wish
        wishes = self.gather(torch.tensor([wish]))  # on the CPU: the device is waited for later
        _check_finite(self._non_finite, "gradients")
        return any(map(bool, wishes))

    def check_same(self, settings: Mapping[str, Any]) -> None:
        """Refuse settings that differ between ranks, on all ranks.

        Raises:
            ConfigError: Names the first setting, and its value on each rank.
        """
        if self.size == 1:
            return
        self._check_joined()
        self._checks += 1  # new keys: a rank that is ahead overwrites none that are still read
        keys = [f"settings/{self._checks}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], json.dumps(settings, default=str))
        self.agree(False)  # all have written theirs, or one has failed
        found = [json.loads(self._store.get(key)) for key in keys]
        for name in dict.fromkeys(name for one in found for name in one):
            values = [repr(one[name]) if name in one else "nothing" for one in found]
            if len({*values}) > 1:
                raise ConfigError(
                    f"{name}: {', '.join(values)} on ranks 0 to {self.size - 1} "
                    "(expected one value). Start all ranks by the same command, with one run "
                    "directory."
                )

    def _check_joined(self) -> None:
        if self._store is None:
            raise UsageError(
                f"rank {self.rank} of {self.size}: not among the others (expected to have joined, "
                "and not left). Use it in a with statement."
            )

    def _collective(self, tensor: torch.Tensor, op: Callable[..., Any], *arguments: Any) -> None:
        """Call an operation of ``torch.distributed`` on a tensor, and wait for the others."""
        self._check_joined()
        try:
            self._waiting = True
            work, pause = op(*arguments, async_op=True), 0.0
            # Waiting in C++ would hold up signals for as long as the others do not come.
            while tensor.is_cpu and not work.is_completed():
                time.sleep(pause)
                pause = min(pause + 1e-5, _LONGEST_PAUSE_SECONDS)
            work.wait()
            self._waiting = False
        except RuntimeError as error:
            self._waiting = False
            raise self._peer_error(error) from error

    def _post_exit_reason(self, reason: str) -> None:
        """Tell the others why this rank leaves, unless it has told them."""
        with contextlib.suppress(RuntimeError):  # the launcher has ended, and its store with it
            if not self._store.check([f"end/{self.rank}"]):
                self._store.set(f"end/{self.rank}", reason)

    def _peer_error(self, error: RuntimeError) -> PeerGoneError:
        """Return the error that names the ranks that broke off a step, and why."""
        self._post_exit_reason(_FOLLOWED)

        reasons: dict[int, str | None] = {}

        def undecided() -> bool:
            reasons.update(self._reasons())
            return None in reasons.values() and not any(reasons.values())

        poll_while(undecided, EXIT_REASON_SECONDS, _POLL_SECONDS)
        if not any(reasons.values()):
            late = f"did not come to a step within {self.timeout:g} s, or cannot be reached"
            reasons = {r: late if why is None else why for r, why in reasons.items()}
        named = [f"rank {rank} {reason}" for rank, reason in reasons.items() if reason]
        found = "; ".join(named) or f"came late, or for another step than the others, {error}"
        self._gone = self._gone_error(found)
        return self._gone

    def _gone_error(self, found: str) -> PeerGoneError:
        return PeerGoneError(
            f"rank {self.rank} of {self.size}: {found}\n(expected all to come "
            "to each step). Remove the cause, and start again, with --resume if there is a "
            "checkpoint."
        )

    def _crashed(self) -> str:
        """Return which ranks of this machine have ended without a word, and how, if any."""
        reasons = ((rank, why or "") for rank, why in self._reasons().items())
        return "; ".join(f"rank {r} {why}" for r, why in reasons if why.startswith(_CRASHED))

    def _reasons(self) -> dict[int, str | None]:
        """Return why each of the others leaves; see `_reason`."""
        return {rank: self._reason(rank) for rank in range(self.size) if rank != self.rank}

    def _reason(self, rank: int) -> str | None:
        """Return why a rank leaves: empty if another one is to blame, None if not known yet."""
        host, process = self._processes[rank] if self._processes else ("", 0)
        state = _state(process) if host == socket.gethostname() else None
        try:
            if self._store.check([f"end/{rank}"]):
                return str(self._store.get(f"end/{rank}").decode())
        except RuntimeError:  # the rank kept the store itself, as there is no launcher
            return "has ended, and what it said is gone with its store" if state else None
        return f"{state}, process {process_id(process)}" if state else None


def shapes_of(module: nn.Module) -> dict[str, list[int]]:
    """Return the shapes of a module's parameters, for `Ranks.check_same`: Gloo aborts on others."""
    return {f"shape of {name}": [*tensor.shape] for name, tensor in module.named_parameters()}


def _check_finite(gathered: Iterable[torch.Tensor], what: str) -> None:
    wrong = [str(rank) for rank, one in enumerate(gathered) if not one.isfinite().all()]
    if wrong:
        raise DivergedError(
            f"learning: {what} of rank {' and '.join(wrong)} are not finite (expected numbers). "
            "Lower the learning rates, and check rewards."
        )


def _state(process: int) -> str | None:
    """Return what keeps a process of this machine from working; None if nothing does."""
    if not process_is_alive(process):
        return _CRASHED
    return "was stopped by a signal" if process_is_stopped(process) else None


SINGLE_RANK = Ranks()
"""A world of one."""
