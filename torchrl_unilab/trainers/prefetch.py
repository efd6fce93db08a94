"""`PrefetchReplay`: batches from a replay pipeline for TorchRL's own off-policy trainers.

A large batch is packed while the trainer learns from the one before it, and cut into the
minibatches of its optimiser steps. TorchRL's trainers call it as a hook.
"""

from __future__ import annotations

import inspect
from collections import deque
from typing import Any

from tensordict import TensorDictBase
from torchrl.data import RandomSampler
from torchrl.trainers import ReplayBufferTrainer, Trainer
from torchrl.trainers.trainers import TrainerHookBase

from torchrl_unilab.checks import as_instance, as_integer
from torchrl_unilab.data import DoubleBufferReplayPipeline
from torchrl_unilab.errors import ConfigError


class PrefetchReplay(TrainerHookBase):
    """Gives a trainer minibatches from large batches that are packed while it learns.

    Replaces the sampling that TorchRL's `SACTrainer` and `TD3Trainer` register for their replay
    buffer (`ReplayBufferTrainer`), which still extends the buffer. A large batch is drawn when the
    previous one is first used, so its rows are at most one large batch of optimiser steps behind
    the buffer.

    Args:
        pipeline: Samples from the buffer's storage. The caller closes it.
        minibatches: How many minibatches a large batch is cut into; use the trainer's
            ``optim_steps_per_batch`` for one large batch per batch of frames.

    Raises:
        ConfigError: `pipeline` is none, or its ``sample_count`` no multiple of `minibatches`.

    Attributes:
        ticks: Large batches drawn.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_unilab.data import DoubleBufferReplayPipeline, PackedReplayStorage
        >>> from torchrl_unilab.trainers import PrefetchReplay
        >>> storage = PackedReplayStorage(100, example=TensorDict({"reward": torch.zeros(1)}))
        >>> with DoubleBufferReplayPipeline(storage, sample_count=8 * 256) as pipeline:
        ...     prefetch = PrefetchReplay(pipeline, minibatches=8)
        ...     # prefetch.register(trainer); trainer.train()
        >>> storage.close()
    """

    def __init__(self, pipeline: DoubleBufferReplayPipeline, minibatches: int) -> None:
        remedy = "Make one of the buffer's storage."
        as_instance("PrefetchReplay pipeline", pipeline, DoubleBufferReplayPipeline, remedy)
        as_integer("PrefetchReplay minibatches", minibatches, "Use the trainer's optimiser steps.")
        if pipeline.sample_count % minibatches:
            raise ConfigError(
                f"PrefetchReplay: {minibatches} minibatches of {pipeline.sample_count} rows "
                f"(expected minibatches of equal size). Use a multiple of {minibatches} as "
                "sample_count."
            )
        self.pipeline, self.minibatches = pipeline, minibatches
        self.ticks = 0
        self._left: deque[TensorDictBase] = deque()

    def __call__(self, batch: TensorDictBase | None = None) -> TensorDictBase:
        """Return the next minibatch, [sample_count / minibatches], on the pipeline's device.

        It is the pipeline's memory, valid until the next large batch is drawn.
        """
        if not self._left:
            pipeline, count = self.pipeline, self.pipeline.sample_count
            pipeline.after_tick()
            large = pipeline.sample_large_batch(self.ticks, count)
            self.ticks += 1
            pipeline.start_prepare(self.ticks, count)
            self._left.extend(large.split(count // self.minibatches))
        return self._left.popleft()

    def register(self, trainer: Trainer, name: str = "prefetch_replay") -> None:
        """Register in place of the trainer's own sampling.

        Raises:
            ConfigError: The trainer's buffer has a sampler other than `RandomSampler`, or
                transforms: a pipeline supports neither.
        """
        hooks = trainer._process_optim_batch_ops
        index = len(hooks)
        for entry in list(hooks):
            # TorchRL times its hooks; this one is a method.
            owner = getattr(inspect.unwrap(entry[0]), "__self__", None)
            if not isinstance(owner, ReplayBufferTrainer):
                continue
            buffer = owner.replay_buffer
            sampler = buffer.sampler.__class__
            if sampler is not RandomSampler or len(buffer._transform):
                raise ConfigError(
                    f"PrefetchReplay: the trainer's buffer has a {sampler.__name__} "
                    f"and {len(buffer._transform)} transforms (expected a RandomSampler and none: "
                    "the pipeline reads the storage itself). Sample by the buffer."
                )
            index = hooks.index(entry)
            hooks.remove(entry)
        trainer.register_op("process_optim_batch", self)
        hooks.insert(index, hooks.pop())  # keep the order of later hooks
        trainer.register_module(name, self)

    def state_dict(self) -> dict[str, Any]:
        """Return how many large batches were drawn: a resumed trainer draws others."""
        return {"ticks": self.ticks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; a batch that was prepared is not used."""
        self.ticks = state_dict["ticks"]
        self._left.clear()
        self.pipeline.discard()
