"""Layouts, tiles and small loads and stores that the Mosaic GPU kernels share."""

import math
import os

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import config as jax_config
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

WGMMA = plgpu.Layout.WGMMA  # of the result of a wgmma, and of its left operand in registers
ROW, COL = WGMMA.reduce(1), WGMMA.reduce(0)  # one value for each row / column of a wgmma tile
ROWS = 64  # rows of one wgmma, and so of one computing warpgroup
LOG2E = math.log2(math.e)  # exp(x) = exp2(x log2 e), and exp2 is an instruction


def warp_rows(vec: int) -> plgpu.Layout:
    """Register layout of a (4 k, 32 vec n) array in which each row lives in one warp.

    A reduction over axis 1 is then registers and five shuffles, with no step through shared
    memory.  A lane holds `vec` consecutive elements of every 32 vec.
    """
    # pyrefly: ignore[bad-return]
    return plgpu.Layout.TILED(
        plgpu.Tiling(((4, 32 * vec), (vec,))),
        warp_dims=(-3,),
        lane_dims=(-2,),
        vector_dim=-1,
    )


def wgmma_tiles(cols: int, dtype) -> tuple:
    """Tiling and swizzle of a (rows, cols) shared-memory buffer that TMA and wgmma agree on."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(cols * itemsize * 8)
    return (plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))


def registers(wgs: int) -> tuple[int, int]:
    """Registers of a computing thread and of a loading one, of blocks with one loading warpgroup.

    wgs: computing warpgroups.  65,536 for all threads of an SM, in steps of 8 for a thread.
    """
    return {1: (232, 40), 2: (240, 24), 3: (160, 32)}[wgs]


def sm_count() -> int:
    """Blocks of persistent grids: one for each SM (132 on an H100 or H200)."""
    return jax.devices()[0].core_count if jax.default_backend() == "gpu" else 132


def load(ref, layout) -> jax.Array:
    """Loads a global or unswizzled shared ref straight into registers of `layout`, as float32."""
    # optimized=False: the layouts here are coalesced already, and the optimised path knows only
    # swizzled shared memory.
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def store(ref, value) -> None:
    """Stores registers to a ref in the ref's dtype, from any layout."""
    value = value.astype(ref.dtype)
    if hasattr(plgpu, "store"):  # jax >= 0.12 refuses small global stores unless told
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def zeros(shape, layout) -> jax.Array:
    """float32 zeros that a loop can carry (a loop-carried constant needs its layout named)."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def pad_axis(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """Zero-pads one axis up to a multiple (no operation where it is one already)."""
    extra = -x.shape[axis] % multiple
    if not extra:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, extra)
    return jnp.pad(x, widths)


def _check_interpreter(threads: int) -> None:
    """Raises RuntimeError where JAX's interpreter would wait for ever."""
    mode = getattr(jax_config, "pallas_tpu_interpret_mode_context_manager", None)
    if mode is None or mode.value is None:
        return
    # It runs every warpgroup of a block in a thread of XLA's, all at once.  XLA has one for each
    # core, or $NPROC of them if that is set when JAX first meets its devices.
    nproc, cores = os.environ.get("NPROC", ""), getattr(os, "sched_getaffinity", None)
    have = int(nproc) if nproc.isdecimal() else len(cores(0)) if cores else os.cpu_count() or 1
    if have < threads:
        raise RuntimeError(
            f"interpreting {threads} warpgroups of a block needs {threads} threads of XLA, which"
            f" has {have}: set NPROC=16 in the environment before JAX starts"
        )


def kernel(body, **options):
    """`plgpu.kernel`, under vmap called for one member after the other.

    JAX's own rule puts the members in the grid: natively (0.11.2) the last rows of one were written
    over the first ones of the next.
    """
    _check_interpreter(options.get("num_threads") or 1)
    return jax.custom_batching.sequential_vmap(plgpu.kernel(body, **options))


def in_place(call, state, *arrays):
    """`state`, one array or a list, after call(references to it, *arrays) has written into it.

    Not new_ref and freeze: between them jax.checkpoint drops a call that returns nothing.
    """

    @jax.custom_batching.sequential_vmap
    def run(state, *arrays):
        state, *arrays = apart((state, *arrays))
        return apart(pl.run_state(lambda refs: call(refs, *arrays))(state))

    return run(state, *arrays)


def apart(arrays):
    """`arrays`, around a kernel that writes in place: what goes in, and what comes out.

    In a loop XLA joins a kernel with slices that it reads or that become of its result, and then
    gives it another array to write than the one it reads: nothing arrives there.
    """
    return lax.optimization_barrier(arrays)


def grid(**axes: int) -> dict:
    """grid and grid_names for plgpu.kernel, from the blocks along each axis, the last one fastest.

    CUDA has at most 65,535 blocks along every axis but the fastest one: an axis of more becomes it.
    """
    long = [name for name, blocks in axes.items() if blocks > 65_535]
    names = sorted(axes, key=lambda name: name in long)  # stable: what is not long keeps its place
    return {"grid": tuple(axes[name] for name in names), "grid_names": tuple(names)}


def stat_dtype(dtype) -> jnp.dtype:
    """float32 for statistics and sums, float64 where the data are (the references' truth)."""
    return jnp.promote_types(dtype, jnp.float32)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def along(vector, shape, axis: int) -> jax.Array:
    """Broadcasts a vector that runs along `axis` to a two-dimensional shape, inside a kernel."""
    return lax.broadcast_in_dim(vector, shape, [axis])


def check_axes(axes: str, **arrays) -> None:
    """Raises ValueError unless every array has as many axes as `axes` names ("B T H D")."""
    names = axes.split()
    for name, x in arrays.items():
        if x.ndim != len(names):
            raise ValueError(f"{name} has shape {x.shape}, it needs {len(names)} axes: {axes}")


def check_whole_numbers(**arrays) -> None:
    """Raises ValueError for an array of floats, which a kernel would cut to whole numbers."""
    for name, x in arrays.items():
        if not (jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool):
            raise ValueError(f"{name} is {x.dtype}: cast it to an integer dtype, as int32")


def lossy_softcap(softcap: float | None) -> str | None:
    """Why a kernel would not keep the digits of logits under this softcap, or None.

    The kernels' tanh is good to 1e-7 of it.  At 300 attention's lse errs 5.5 times as much as the
    reference's, at 1000 the loss of linear_cross_entropy by 2e-5.
    """
    most = 100
    if softcap is None or softcap <= most:
        return None
    return f"softcap={softcap} is over {most}, which costs the logits digits"


def put_ends(results, start: int, rest: int) -> list[jax.Array]:
    """The first half of `results`, from `start` on the first `rest` of their twins in the second.

    A kernel cannot write past an array's end: what it has for the last, partial block is apart.
    """
    # Without it XLA's dynamic-slice fusion may take an update and the kernel for one, whose own
    # result it needs: "a cycle is detected", as in GELU of 6144 elements in JAX 0.11.2.
    results = lax.optimization_barrier(tuple(results))
    half = len(results) // 2
    return [
        y.at[start:].set(end[:rest]) for y, end in zip(results[:half], results[half:], strict=True)
    ]


def unsupported_dtype(**arrays) -> str | None:
    """Why kernels cannot take these arrays for their dtypes, or None."""
    for name, x in arrays.items():
        if x is not None and x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            return f"{name} is {x.dtype}, not float32, bfloat16 or float16"
    return None


def empty(**arrays) -> str | None:
    """Why kernels cannot take these arrays for their sizes, or None."""
    for name, x in arrays.items():
        if x is not None and x.size == 0:
            return f"{name} has shape {x.shape}, no elements"
    return None
