"""What the command line imports, and the process that forks its workers: all of the package.

Importing torch creates half a million objects, none of them garbage. The garbage collector skips
them: during the import, in collections during training, and when a process ends, where looking
through them would take longer than all else. In forked workers their pages stay shared.
"""

from __future__ import annotations

import gc

gc.disable()
import torchrl_unilab.trainers  # noqa: E402, F401

gc.freeze()
gc.enable()
