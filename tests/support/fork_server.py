"""Start processes from one that has imported TorchRL and pytest, once.

Arguments are pickled for them as for spawned ones. Test processes import this module, and the
tutorials' kernels run it first; scripts that tests run spawn theirs.
"""

import multiprocessing

multiprocessing.set_start_method("forkserver")
multiprocessing.set_forkserver_preload(["torchrl_unilab.preload", "pytest", "hypothesis"])
