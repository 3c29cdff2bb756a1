"""Lets the interpreter run the attention kernels: import before anything of them is interpreted.

JAX's GPU interpreter has no rule for a store to a wgmma accumulator (`acc[...] = x`), and it needs
a thread for each warpgroup that waits on a barrier: XLA's pool has one for each core unless NPROC
says otherwise, and three warpgroups and a loader on two cores wait for each other for ever.
"""

import functools
import os

import interpreter_extension as extension
import numpy as np
from jax._src import callback, xla_bridge
from jax._src.pallas.mosaic_gpu import primitives

# Three computing warpgroups can be interpreted; else a test has to make do with two.
ENOUGH_THREADS = "NPROC" in os.environ or not xla_bridge.backends_are_initialized()
os.environ.setdefault("NPROC", "16")


@extension.cb.fail_on_exception
def _store(*, token, mesh_location, thread, key, value, source_info):
    memory = extension.cb._get_shared_memory()
    key = extension.cb.HostAllocationKey.from_array(key)
    info = extension.memory.GPULoggingInfo(mesh_location, thread, source_info)
    memory.store_buffer_content(
        key, memory.access(key, ()), np.asarray(value), thread, logging_info=info
    )
    return token


def _interpret_store(self, eqn, token, get_invals):
    acc, value = get_invals()
    return callback.io_callback(
        functools.partial(_store, source_info=eqn.source_info),
        extension.cb.TOKEN_SHAPE_DTYPE,
        token=token,
        mesh_location=self.mesh_location,
        thread=self.thread,
        key=acc,
        value=value,
    ), [acc]


extension._EXTRA[primitives.wgmma_accumulator_store_p] = _interpret_store
