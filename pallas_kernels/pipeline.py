"""A ring of slots in shared memory, through which steps stream from global memory to warpgroups.

    loader     send n --TMA--> slot n % slots --full--> wait n, read, release n      each reader
                  ^                                                     |
                  +--- refill n: send n + slots <--------- free --------+

`full` and `free` hold one barrier per slot.  Round n // slots of a barrier belongs to step n, so
every reader must wait for every step that is sent, and release it, in order.  The loader may be a
reader; then it must release a step before it waits for the other readers, or it waits for itself.
A ring with a single reader, who also loads, needs no `free`: plgpu.commit_smem() after the reads.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


class Ring(NamedTuple):
    """The barriers of a ring.  Its user numbers the steps consecutively across all items."""

    slots: int
    full: Any  # the copies of a step arrive
    free: Any = None  # the readers of a step arrive
    first: Any = 0  # the ring's first barrier, where several rings share these arrays
    flat: bool = False  # whether their buffers share arrays, too
    wg: Any = 0  # this warpgroup
    loader: int = 0  # the warpgroup that refills the ring

    def _bar(self, n):
        return self.first + lax.rem(n, jnp.int32(self.slots))

    def slot(self, n):
        """The place of step n in its buffers."""
        return self._bar(n) if self.flat else lax.rem(n, jnp.int32(self.slots))

    def send(self, n, source, smem, *rest):
        """Starts a copy of step n to smem[slot, *rest]."""
        target = smem.at[self.slot(n), *rest]
        plgpu.copy_gmem_to_smem(source, target, self.full.at[self._bar(n)])

    def wait(self, n):
        """Waits until step n has arrived; returns its slot."""
        plgpu.barrier_wait(self.full.at[self._bar(n)])
        return self.slot(n)

    def release(self, n):
        """This reader has read step n."""
        plgpu.barrier_arrive(self.free.at[self._bar(n)])

    def claim(self, n):
        """Waits until all readers have released the step that last had the slot of step n."""
        bar = self._bar(n)  # outside, so that `send` has it too
        pl.when(n >= self.slots)(lambda: plgpu.barrier_wait(self.free.at[bar]))

    def refill(self, n, load):
        """The loader runs load(n + slots) once all readers have released step n."""

        def run():
            plgpu.barrier_wait(self.free.at[self._bar(n)])
            load(n + self.slots)

        pl.when(self.wg == self.loader)(run)
