"""Weight synchronisation through shared memory, for TorchRL's collectors."""

from torchrl_unilab.weight_update.obs_stats import SharedObsNormStats
from torchrl_unilab.weight_update.scheme import UniLabShmScheme
from torchrl_unilab.weight_update.transport import UniLabShmTransport

__all__ = ["SharedObsNormStats", "UniLabShmScheme", "UniLabShmTransport"]
