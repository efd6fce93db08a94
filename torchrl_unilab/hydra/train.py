"""Train what a configuration composes; ``python -m torchrl_unilab.hydra`` calls `main`."""

from __future__ import annotations

import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path

import hydra
import torchrl.trainers.algorithms.configs  # noqa: F401  (registers TorchRL's groups)
from hydra.errors import CompactHydraException, InstantiationException, MissingConfigException
from hydra.utils import instantiate
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from torchrl_unilab.configs.settings import nearest
from torchrl_unilab.errors import ConfigError, UniLabError
from torchrl_unilab.trainers import OffPolicyTrainer
from torchrl_unilab.trainers.base import RankTrainer


@hydra.main(version_base="1.3", config_path="pkg://torchrl_unilab.hydra.recipes")
def _train(config: DictConfig) -> None:
    """Instantiate the trainer of a configuration, train, and end the collector."""
    if "_target_" not in (config.get("trainer") or {}):
        raise ConfigError(f"configuration without a trainer ({_expected()}). Name one of them.")
    trainer = instantiate(config.trainer)
    try:
        trainer.train()
    except KeyboardInterrupt:
        if isinstance(trainer, RankTrainer):  # TorchRL's workers have been interrupted, too
            collector = trainer.collector  # whose workers may be busy, or ended by the end of a job
            collector.state_dict = partial(collector.state_dict, workers=False)
            trainer.save_trainer(force_save=True)  # where `save_trainer_file` says
        raise
    finally:
        if isinstance(trainer, OffPolicyTrainer):
            trainer.close()  # `--multirun` trains several in this process
        trainer.collector.shutdown()
    logging.getLogger(__name__).info("%d frames collected", trainer.collected_frames)


def _expected() -> str:
    files = Path(__file__).with_name("recipes").glob("*.yaml")
    recipes = [file.stem for file in files if file.stem != "unilab_trainer"]  # a part of others
    return f"expected --config-name of {', '.join(sorted(recipes))}, or one of your own"


def main() -> None:
    """Train; end without a traceback of this process where the reason is known."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # else Hydra prints an error and exits
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # KeyboardInterrupt
    try:
        _train()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    except UniLabError as error:
        sys.exit(f"error: {error}")
    except InstantiationException as error:
        if not isinstance(error.__cause__, UniLabError):
            raise
        sys.exit(f"error: {error.__cause__}")
    except OmegaConfBaseException as error:  # such as an interpolation that cannot be resolved
        reason = " ".join(str(error).split())
        sys.exit(f"error: {reason} (expected a value of its type). Correct the value.")
    except ValueError as error:  # of Hydra, for a group that is null
        if not str(error).startswith("Config group override"):
            raise
        sys.exit(f"error: {error} (expected an option). Name one, or set trainer.logger=null.")
    except MissingConfigException as error:
        options = error.options  # the group's options; None if a whole configuration is missing
        expected = f"expected one of {', '.join(options)}" if options else _expected()
        sys.exit(f"error: {str(error).splitlines()[0]} ({expected}). Correct the name.")
    except CompactHydraException as error:  # Hydra also shows it without a traceback
        unknown = error.__cause__
        if not isinstance(unknown, (ConfigAttributeError, ConfigKeyError)):
            reason = "" if unknown is None else f": {' '.join(str(unknown).split())}"
            sys.exit(f"error: {error}{reason}")
        name, known = unknown.full_key, [*map(str, unknown.parent_node)]
        sys.exit(
            f"error: {name}: unknown (expected a key of the configuration)."
            f"{nearest(str(unknown.key), known)} Correct the name."
        )
