"""`RankTrainer`: what both trainers do in step with the other ranks, and how they log."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl import logger as torchrl_logger
from torchrl.trainers import CountFramesLog, LogScalar, Trainer, UTDRHook

from torchrl_unilab.checks import as_number
from torchrl_unilab.collectors import ReplayCollector
from torchrl_unilab.collectors.base import WorkerCollector
from torchrl_unilab.configs import Config
from torchrl_unilab.errors import (
    CheckpointError,
    ConfigError,
    DivergedError,
    LayoutKeyError,
    SegmentClosedError,
    UsageError,
)
from torchrl_unilab.modules import ObservationNormalizer
from torchrl_unilab.runtime.ranks import Ranks, shapes_of
from torchrl_unilab.trainers.hooks import is_stock_update

NORM = "norm of the weights"
"""Key, in an update's means, of the norm of all learnt parameters: checked, not logged."""

_NEVER_CALLED = ("post_loss", "process_loss", "optimizer")
"""Hook stages of TorchRL's own optimiser step, which our trainers replace."""


def norm_of(optimizers: Iterable[torch.optim.Optimizer]) -> torch.Tensor:
    """Return the norm of all that optimisers step, a scalar: not finite if one number is not.

    Examples:
        >>> import torch
        >>> from torchrl_unilab.trainers.base import norm_of
        >>> norm_of([torch.optim.Adam([torch.tensor([3.0]), torch.tensor([4.0])])])
        tensor(5.)
    """
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return nn.utils.get_total_norm([p.detach() for group in groups for p in group["params"]])


class RankTrainer(Trainer):
    """A trainer that counts observations, and stops, in step with those of the other ranks.

    Attributes:
        ranks: The processes that learn together.
        normalizers: Observation key to the normaliser in the networks that learns from it.
        checkpoint_seconds: Seconds after which a checkpoint is saved, too, however few frames were
            collected; None, the default, for never.
    """

    checkpoint_seconds: float | None = None
    config: Config
    ranks: Ranks
    normalizers: Mapping[str, ObservationNormalizer]

    def __init__(
        self, *, collector: Any, loss_module: nn.Module, total_frames: float, **kwargs: Any
    ) -> None:
        remedy = "Give how many to collect in all; float('inf') for no end."
        as_number("total_frames", total_frames, remedy, "(0, inf]")
        given = {"collector": collector, "loss_module": loss_module, "total_frames": total_frames}
        super().__init__(**given, **kwargs)
        self._saved_at = time.monotonic()
        self._compared = False  # whether settings were compared with those of other ranks
        if isinstance(collector, WorkerCollector):
            acting = {*collector.policy.parameters()}
            if acting and not acting & {*loss_module.parameters()}:
                torchrl_logger.warning(
                    "%s: the collector's policy has no parameter of the loss (expected the actor "
                    "that it learns). Give both the same one, or publish by a map of your own.",
                    type(self).__name__,
                )

    @property
    def _threads(self) -> int:
        """Torch's threads of this process while it trains."""
        return torch.get_num_threads()

    def train(self) -> None:
        """Train to the end, on the threads that are fastest for the updates.

        Torch's threads spin while they wait for each other: next to a busy program, such as the
        collector's workers, two of them are several times slower than one.

        Raises:
            UsageError: A hook raised StopIteration, which a caller's loop would take for its end.
        """
        found = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            super().train()
        except StopIteration as error:
            raise UsageError(
                f"{type(self).__name__}: a hook raised StopIteration (expected a value or None). "
                "Call request_stop of the trainer to end the training; a hook on 'pre_epoch' may "
                "leave samples out."
            ) from error
        finally:
            torch.set_num_threads(found)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            CheckpointError: It is of a trainer with another `fused`, of another algorithm, or
                without one of the hooks that have state; nothing was changed.
        """
        parts = ["collector", "loss_module", "state", *self._modules]
        parts += ["optimizer"] if self.optimizer is not None else []
        if missing := [part for part in parts if part not in state_dict]:
            raise CheckpointError(
                f"state of {type(self).__name__}: no {missing} (expected all of its parts). Load "
                "it into a trainer of the algorithm that was saved, with the hooks that it had."
            )
        for optimizer, saved in self._saved_optimizers(state_dict):
            found, own = (
                sum(len(group["params"]) for group in groups)
                for groups in (saved["param_groups"], optimizer.param_groups)
            )
            if found != own:
                raise CheckpointError(
                    f"state of {type(self).__name__}: an optimiser of {found} tensors (expected "
                    f"{own}; a fused update has one). Make the trainer with the networks, and "
                    "fused in config, of the one that was saved."
                )
        super().load_state_dict(state_dict)

    def _saved_optimizers(
        self, state_dict: Mapping[str, Any]
    ) -> list[tuple[torch.optim.Optimizer, Mapping[str, Any]]]:
        """Return each optimiser, and its state among a trainer's."""
        return [(self.optimizer, state_dict["optimizer"])]

    def register_op(self, dest: Any, op: Callable[..., Any], **kwargs: Any) -> None:
        """Register a hook; see TorchRL.

        Raises:
            ConfigError: Our updates, or those of this collector, have no such stage.
        """
        if dest in _NEVER_CALLED:
            raise ConfigError(
                f"hook stage {dest!r}: {type(self).__name__} takes its own steps (expected another "
                "stage, such as 'process_optim_batch' or 'post_optim'). Put what it does into the "
                "loss, or use TorchRL's Trainer."
            )
        if dest == "batch_process" and isinstance(self.collector, ReplayCollector):
            raise ConfigError(
                "hook stage 'batch_process': ReplayCollector yields no batches (expected another "
                "stage, such as 'process_optim_batch'). Scale rewards by reward_scale in config; "
                "change what is collected by a transform of the environment."
            )
        reads = isinstance(op, CountFramesLog | LogScalar) and dest.endswith("_steps_log")
        if reads and isinstance(self.collector, ReplayCollector):
            raise ConfigError(
                f"hook {type(op).__name__}: ReplayCollector yields no batches (expected a hook "
                "that reads none). Frames are logged with everything else; register LogScalar at "
                "'post_optim_log', by register_op."
            )
        if dest == "post_steps" and is_stock_update(op, self.collector):
            raise ConfigError(
                f"hook UpdateWeights: {type(self).__name__} publishes after each batch itself "
                "(expected one publish). Leave the hook out."
            )
        if isinstance(op, UTDRHook) and not isinstance(self.collector, ReplayCollector):
            raise ConfigError(
                f"hook UTDRHook: {type(self.collector).__name__} counts no rows of a replay "
                "(expected ReplayCollector). Leave the hook out."
            )
        super().register_op(dest, op, **kwargs)

    def _process_batch_hook(self, batch: TensorDictBase) -> TensorDictBase:
        """Do as TorchRL; before and after it, refuse padding, which would be learnt from.

        Raises:
            ConfigError: The batch is padded, by the collector or by a hook.
        """
        _refuse_padding(batch)
        batch = super()._process_batch_hook(batch)
        _refuse_padding(batch)
        return batch

    def _pre_epoch_hook(self, batch: TensorDictBase, **_: Any) -> TensorDictBase:
        """Call the hooks; as at other stages, what they return counts if it is a TensorDict."""
        for hook, kwargs in self._pre_epoch_ops:
            returned = hook(batch, **kwargs)
            batch = returned if isinstance(returned, TensorDictBase) else batch
        return batch

    def _report_update(self, means: Mapping[str, float]) -> None:
        """Call the hooks that come after an update's steps, and log its means.

        Raises:
            DivergedError: A loss or a weight is not finite: what was learnt has not been published.
        """
        # All ranks see the same means, which have been averaged, and so decide alike.
        checked = [name for name in means if name.startswith("loss") or name == NORM]
        if bad := [name for name in checked if not math.isfinite(means[name])]:
            self.ranks.agree(False)  # names the rank whose gradients are not finite
            raise DivergedError(
                f"update after {self.collected_frames} frames: {bad[0]} is {means[bad[0]]} "
                "(expected a finite one). Lower the learning rates, or look at rewards and "
                "observations; a checkpoint, if there is one, is from before."
            )
        losses: Mapping[str, float] | TensorDict
        losses = {name: mean for name, mean in means.items() if name != NORM}
        if self._post_optim_complete_log_ops:  # hooks take a TensorDict, which takes time to make
            losses = TensorDict({name: torch.tensor(mean) for name, mean in losses.items()})
        self._post_optim_complete_log_hook(self._optim_count, losses)

    def _read_observations(self, data: TensorDictBase) -> dict[str, torch.Tensor]:
        """Return the observations that the normalisers learn from."""
        found = {key: data.get(key, None) for key in self.normalizers}
        if missing := [key for key, seen in found.items() if seen is None]:
            raise LayoutKeyError(
                f"normalizers: no {missing} in what is collected (expected keys of observations, "
                f"of {sorted(map(str, data.keys()))}). Name them by the observation's key."
            )
        return found

    def _count_observations(self, observed: Mapping[str, torch.Tensor]) -> None:
        """Update the normalisers with new observations by key, of all ranks, each once."""
        if not observed:
            return
        own = {key: self.normalizers[key].moments(seen) for key, seen in observed.items()}
        sizes = [len(moments) for moments in own.values()]
        for gathered in self.ranks.gather(torch.cat([*own.values()])):
            parts = gathered.split(sizes)
            for normalizer, moments in zip(self.normalizers.values(), parts, strict=True):
                normalizer.merge(moments)

    def _pre_steps_log_hook(self, batch: TensorDictBase | None) -> None:
        if not self._compared:
            self._compared = True
            counts = {"frames until now": self.collected_frames, "total_frames": self.total_frames}
            self.ranks.check_same(counts | vars(self.config) | shapes_of(self.loss_module))
        super()._pre_steps_log_hook(batch)

    def _post_steps_log_hook(self, batch: TensorDictBase | None) -> None:
        super()._post_steps_log_hook(batch)  # TorchRL looks next whether to stop
        if self.ranks.agree(self._stop_training) and not self._stop_training:
            self.request_stop("another rank stops")

    def save_trainer(self, force_save: bool = False) -> None:
        """Save a checkpoint if one is due, on rank 0; make its directory if there is none.

        Raises:
            SegmentClosedError: `train` has ended, which saves the end itself.
        """
        if self.ranks.rank == 0:
            if self.save_trainer_file is not None:
                Path(self.save_trainer_file).parent.mkdir(parents=True, exist_ok=True)
            now, most = time.monotonic(), self.checkpoint_seconds
            if most is not None and now - self._saved_at >= most:
                force_save, self._saved_at = True, now
            try:
                super().save_trainer(force_save)
            except SegmentClosedError as error:
                raise SegmentClosedError(
                    "save_trainer: the collector is closed (expected an open one: `train`, which "
                    "closes it, saves the end). Give save_trainer_file before `train`."
                ) from error


def _refuse_padding(batch: TensorDictBase) -> None:
    if batch.get(("collector", "mask"), None) is not None:
        raise ConfigError(
            "batch: padded, by ('collector', 'mask') (expected steps alone). Leave split_trajs "
            "out of the collector, and split_trajectories out of the hooks."
        )
