"""What the command line imports, and the process that forks its workers: all of the package.

Importing torch makes half a million objects, none of which is garbage. They are not looked through
while they are made, nor later: not by a collection in mid-training, and not when a process ends,
which takes it longer than anything else then. In forked workers their pages stay shared.
"""

from __future__ import annotations

import gc

gc.disable()
import torchrl_unilab.trainers  # noqa: E402, F401

gc.freeze()
gc.enable()
