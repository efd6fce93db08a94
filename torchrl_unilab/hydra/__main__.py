"""``python -m torchrl_unilab.hydra --config-name appo``: train what a configuration composes."""

from __future__ import annotations

import logging

import hydra
import torchrl.trainers.algorithms.configs  # noqa: F401  (registers TorchRL's groups)
from hydra.utils import instantiate
from omegaconf import DictConfig

__all__ = ["main"]


@hydra.main(version_base="1.3", config_path="pkg://torchrl_unilab.hydra.recipes")
def main(config: DictConfig) -> None:
    """Instantiate the trainer of a configuration, train, and end the collector."""
    trainer = instantiate(config.trainer)
    try:
        trainer.train()
    finally:
        trainer.collector.shutdown()
    logging.getLogger(__name__).info("%d frames collected", trainer.collected_frames)


if __name__ == "__main__":
    main()
