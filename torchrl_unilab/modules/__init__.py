"""Networks: observation normaliser, actors, critics, exploration."""

from torchrl_unilab.modules.critics import make_critic, make_q_value
from torchrl_unilab.modules.exploration import PerEnvNoise
from torchrl_unilab.modules.gaussian import make_actor
from torchrl_unilab.modules.normalizer import ObservationNormalizer
from torchrl_unilab.modules.squashed import make_sac_actor, make_td3_actor

__all__ = [
    "ObservationNormalizer",
    "PerEnvNoise",
    "make_actor",
    "make_critic",
    "make_q_value",
    "make_sac_actor",
    "make_td3_actor",
]
