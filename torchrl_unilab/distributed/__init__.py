"""Collectors on more than one machine: weights by one mailbox of a Ray cluster, a seqlock per node.

Needs the extra ``torchrl-unilab[ray]``; importing it starts nothing.
"""

from torchrl_unilab.distributed.scheme import UniLabRayScheme

__all__ = ["UniLabRayScheme"]
