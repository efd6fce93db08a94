"""Networks: observation normaliser, Gaussian actor, critic."""

from torchrl_unilab.modules.actor_critic import make_actor, make_critic
from torchrl_unilab.modules.normalizer import ObservationNormalizer

__all__ = ["ObservationNormalizer", "make_actor", "make_critic"]
