"""Layouts, tiles, loads, stores and checks that the Mosaic GPU kernels share."""

import functools
import math
import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import mma_utils
from jax.experimental.mosaic.gpu.wgmma import wgmma_fence, wgmma_m64
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector
from jaxlib.mlir.dialects import llvm, nvvm

from pallas_kernels import dispatch, guard
from pallas_kernels.options import own_settings

WGMMA = plgpu.Layout.WGMMA  # layout of a wgmma's result and of its left operand in registers
ROW, COL = WGMMA.reduce(1), WGMMA.reduce(0)  # one value for each row / column of a wgmma tile
ROWS = 64  # rows of one wgmma, and so of one computing warpgroup
cdiv = pl.cdiv
LOG2E = math.log2(math.e)  # exp(x) = exp2(x log2 e), and exp2 is one instruction


def warp_rows(vec: int) -> plgpu.Layout:
    """Register layout of a (4 k, 32 vec n) array in which each row lives in one warp.

    A lane holds `vec` consecutive elements of every 32 vec.  A reduction over axis 1 then takes
    five shuffles and no shared memory.
    """
    # pyrefly: ignore[bad-return]
    return plgpu.Layout.TILED(plgpu.Tiling(((4, 32 * vec), (vec,))), (-3,), (-2,), -1)


def wgmma_tiles(cols: int, dtype) -> tuple:
    """Tiling and swizzle with which TMA and wgmma can share a (rows, cols) buffer."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(cols * itemsize * 8)
    return (plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))


def tiled(*shape: int, dtype):
    """Shared memory in `wgmma_tiles`, for rows; mma and ldmatrix (ampere.py) read it, too."""
    return plgpu.SMEM(shape, dtype, transforms=wgmma_tiles(shape[-1], dtype))


def sm_count() -> int:
    """Blocks of a persistent grid: one for each SM (132 on an H100 or H200)."""
    return jax.devices()[0].core_count if jax.default_backend() == "gpu" else 132


def is_tight() -> bool:
    """Whether the general form takes its smaller tiles: on GPUs other than 8.0 and 9.0."""
    # Ahead-of-time compilation makes the target GPU the default device.
    device = jax.config.jax_default_device
    if device is None or isinstance(device, str):  # a platform
        device = jax.devices(device)[0]
    capability = getattr(device, "compute_capability", "9.0")  # a CPU lowers for Hopper
    return capability not in ("8.0", "9.0")


def folded(f, parts: list):
    """f of all parts, combined in pairs, so that no operation waits for a long chain."""
    while len(parts) > 1:
        odd = parts[len(parts) // 2 * 2 :]
        parts = [f(*two) for two in zip(parts[::2], parts[1::2], strict=False)] + odd
    return parts[0]


def inline(code, types, shape, dtype, layout):
    """`code`, which emits MLIR, as a function of arrays and references of these types."""
    result = plgpu.ShapeDtypeStruct(shape, jnp.dtype(dtype), layout=layout)
    return plgpu.inline_mgpu(arg_types=types, return_type=result)(code)


def any_reaches(x, limit: float):
    """Whether an element of a warp's part of x, in WGMMA's layout, is at least the limit.

    Warps may get different answers, so what depends on the answer must not synchronize warps.
    """
    code = functools.partial(_any_reaches, limit)
    return inline(code, (WGMMA,), (), jnp.int32, plgpu.Layout.WG_SPLAT)(x) != 0


def _any_reaches(limit, _, x):
    i32 = ir.IntegerType.get_signless(32)
    most = folded(arith.maxnumf, list(x.registers.flat))  # a vector of two
    ends = (vector.extract(most, dynamic_position=[], static_position=[n]) for n in range(2))
    most = arith.maxnumf(*ends)
    bound = arith.constant(most.type, ir.FloatAttr.get(most.type, limit))
    above = arith.cmpf(arith.CmpFPredicate.OGE, most, bound)
    everyone = arith.constant(i32, ir.IntegerAttr.get(i32, -1))
    above = nvvm.vote_sync(everyone, above, nvvm.VoteSyncKind.any)
    return mgpu.FragmentedArray.splat(arith.extui(i32, above), (), is_signed=True)


def count(counter):
    """Adds 1 to counter[0] in the block's first thread; returns the old value to that thread."""
    return inline(_count, (plgpu.RefType(),), (), jnp.int32, plgpu.Layout.WG_SPLAT)(counter)


def _count(_, counter):
    code = "{ .reg .pred p; setp.eq.u32 p, $2, 0; @p atom.global.add.u32 $0, [$1], 1; }"
    place, thread = global_pointer(counter), mgpu.thread_idx()
    old = llvm.inline_asm(thread.type, [place, thread], code, "=r,l,r", has_side_effects=True)
    return mgpu.FragmentedArray.splat(old, (), is_signed=True)  # pyrefly: ignore[bad-argument-type]


def multiply(acc, p, tile: list) -> None:
    """acc += p, in registers, times a tile in shared memory, by wgmmas that run on.

    tile: `tiled` arrays (blocks, rows, width); their columns side by side are acc's.  Unlike
    `plgpu.wgmma` it reads all blocks of a width at once, and any multiple of 16 rows.
    """
    if len(tile) == tile[0].shape[0] == 1 and p.shape[1] % 64 == 0:
        plgpu.wgmma(acc, p, tile[0].at[0])  # with one fence less: up to 1.5% faster
        return
    types = [plgpu.RefType(wgmma_tiles(x.shape[2], p.dtype)) for x in tile]
    code = functools.partial(_multiply)
    run = inline(code, (WGMMA, WGMMA, types), acc.shape, acc.dtype, WGMMA)
    acc[...] = run(plgpu.wgmma_accumulator_load(acc, wait_n=None), p, tile)


def _multiply(_, acc, p, tile):
    acc, p, start = mgpu.WGMMAAccumulator.from_registers(acc, sync=False), wgmma_fence(p), 0
    registers, i64 = acc._value.registers.copy(), ir.IntegerType.get_signless(64)
    for x in tile:
        blocks, groups, strips, _, width = ir.MemRefType(x.type).shape  # groups of 8 rows
        x = mgpu.memref_slice(x, 0 if blocks == 1 else (slice(None), slice(None), 0))
        x = x if blocks == 1 else mgpu.memref_transpose(x, (1, 0, 2, 3))
        columns = blocks * strips * width
        part = registers[:, start // 8 : (start + columns) // 8]
        how = dict(swizzle=2 * width, group_size=(16, columns), logical_k_major=True)
        (first, (_, (stride,))), (_, step), _ = mma_utils.create_descriptor(x, **how)
        for k in range(groups // 2):
            # pyrefly: ignore[bad-argument-type]
            rows = arith.addi(first, arith.constant(i64, mma_utils.encode_addr(k * step)))
            part[...] = wgmma_m64(
                part, p[:, 16 * k : 16 * k + 16], rows, a_transpose=None, b_transpose=True,
                a_k_stride=None, b_k_stride=stride, n=columns, swizzle=32,  # of one instruction
                a_element_type=p.mlir_dtype, b_element_type=p.mlir_dtype,
            )  # fmt: skip
        start += columns
    nvvm.wgmma_commit_group_sync_aligned()
    y = mgpu.FragmentedArray(_registers=registers, _layout=acc._value.layout, _is_signed=None)
    return y.to_layout(acc._original_layout)


def global_pointer(array):
    """The address of an array in global memory, in MLIR."""
    return llvm.addrspacecast(llvm.PointerType.get(1), mgpu.utils.memref_ptr(array))


def store_number(ref, x) -> None:
    """ref[0] = the int32 x of the block's first thread; ref is in shared memory."""
    types = plgpu.RefType(), plgpu.Layout.WG_SPLAT
    plgpu.inline_mgpu(arg_types=types)(functools.partial(_store_number))(ref, x)


def _store_number(_, ref, x):
    code = "{ .reg .pred p; setp.eq.u32 p, $2, 0; @p st.shared.u32 [$0], $1; }"
    thread = mgpu.thread_idx()
    place = llvm.ptrtoint(thread.type, mgpu.utils.memref_ptr(ref))
    operands, void = [place, x.registers.item(), thread], ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, operands, code, "r,r,r", has_side_effects=True)


def read(ref, layout) -> jax.Array:
    """Loads a global or unswizzled shared ref into registers of `layout`, in its dtype."""
    # The optimised path supports only swizzled shared memory; these layouts are coalesced anyway.
    return plgpu.load(ref, layout=layout, optimized=False)


def load(ref, layout) -> jax.Array:
    """`read`, as float32."""
    return read(ref, layout).astype(jnp.float32)


def store(ref, value) -> None:
    """Stores registers of any layout to a ref, in the ref's dtype."""
    value = value.astype(ref.dtype)
    if hasattr(plgpu, "store"):  # jax >= 0.12 rejects small global stores otherwise
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def zeros(shape, layout) -> jax.Array:
    """float32 zeros with a layout, as a loop carry needs."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def pad_axis(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """Zero-pads one axis up to a multiple; returns x itself if nothing is missing."""
    extra = -x.shape[axis] % multiple
    return jnp.pad(x, [(0, extra * (n == axis)) for n in range(x.ndim)]) if extra else x


def place(*axes) -> jax.sharding.NamedSharding | None:
    """`out_sharding` of a result with these axes, (array, slice) in order: JAX chooses none for
    gathers, scatters and some matmuls on a mesh with explicit axes, and needs none elsewhere.
    """
    given = [(jax.typeof(x).sharding, part) for x, part in axes]
    spec = tuple(axis for of, part in given for axis in of.spec[part])
    return next((of.update(spec=spec) for of, _ in given if any(of.spec)), None)


def rounded(x, dtype) -> jax.Array:
    """x rounded to dtype, in x's dtype: XLA may cancel a cast and the cast back, but never this."""
    to, wide = jnp.finfo(dtype), x.astype(stat_dtype(x.dtype))
    y = lax.reduce_precision(x, to.nexp, to.nmant)
    if dtype != jnp.float16:
        return y
    # float16's subnormals, which would become 0, are multiples of 2^-24, like all near `near`.
    near = 1.5 * 2.0 ** (jnp.finfo(wide.dtype).nmant - 24)
    return jnp.where(abs(x) < to.tiny, ((wide + near) - near).astype(x.dtype), y)


@jax.custom_jvp
@own_settings()
def plus(x, bias):
    """x + bias in x's dtype, or x; sums the gradient of a bias in float32, not in 16 bits."""
    return x if bias is None else x + bias.astype(x.dtype)


@plus.defjvp
@own_settings()
def _plus_jvp(primals, tangents):
    y, terms = plus(*primals), [t.astype(stat_dtype(t.dtype)) for t in tangents if t is not None]
    return y, functools.reduce(jnp.add, terms).astype(y.dtype)


def _check_interpreter(threads: int) -> None:
    """Raises RuntimeError if JAX's interpreter would hang: each warpgroup takes an XLA thread."""
    if not dispatch.interpreting():
        return
    # XLA has one thread for each core, or $NPROC if that is set when JAX initialises its devices.
    nproc, cores = os.environ.get("NPROC", ""), getattr(os, "sched_getaffinity", None)
    have = int(nproc) if nproc.isdecimal() else len(cores(0)) if cores else os.cpu_count() or 1
    if have < threads:
        raise RuntimeError(
            f"interpreting {threads} warpgroups of a block needs {threads} XLA threads, but XLA"
            f" has {have}: set NPROC=16 in the environment before JAX starts"
        )


def kernel(body, *, name: str | None = None, scratch_types=(), **options):
    """`plgpu.kernel` that passes scratch by name and that vmap calls once for each member.

    body(*inputs, *outputs, **scratch): gets one argument for each argument of the call and each
    entry of out_type: a tree of references for a tree of arrays, None for None.
    name: the kernel's name (default: the body's).
    num_threads: warpgroups of a block, along the axis "wg" unless thread_name says otherwise.
    scratch_types: a dictionary, allocated in its order: plgpu.kernel would sort the names.

    JAX's own vmap rule adds the members to the grid.  On a GPU (0.11.2) the last rows of one member
    then overwrite the first rows of the next.
    """
    _check_interpreter(options.get("num_threads") or 1)
    if "num_threads" in options:
        options.setdefault("thread_name", "wg")
    scratch = dict(scratch_types)

    def run(*refs):
        count = len(refs) - len(scratch)
        with jax.enable_x64(False), own_settings():  # indices are int32
            body(*refs[:count], **dict(zip(scratch, refs[count:], strict=True)))

    run.__name__ = name or body.__name__
    call = plgpu.kernel(run, scratch_types=list(scratch.values()), **options)
    call = jax.custom_batching.sequential_vmap(call)
    return lambda *arrays: call(*guard.guarded(run.__name__, arrays))


def in_place(call, state, *arrays, results=False):
    """Calls call(references to state, *arrays), and returns `state` as that call has changed it.

    state: an array or a list of arrays.  The barriers keep XLA from fusing the kernel with slices
    of its operands, as it may inside a loop: input and output would then have separate buffers, and
    what is written in place would be lost.
    results: whether the call has results; then (state, results) is returned.
    """

    @jax.custom_batching.sequential_vmap
    def run(state, *arrays):
        state, *arrays = lax.optimization_barrier((state, *arrays))
        if not results:
            # Between new_ref and freeze jax.checkpoint would drop a call that returns nothing.
            return lax.optimization_barrier(pl.run_state(lambda refs: call(refs, *arrays))(state))
        refs = jax.tree.map(jax.new_ref, state)
        returned = call(refs, *arrays)
        # The barrier also ties them together: jax.checkpoint drops a call with unused results.
        return lax.optimization_barrier((jax.tree.map(jax.freeze, refs), returned))

    return run(state, *arrays)


def grid(**axes: int) -> dict:
    """`grid` and `grid_names` for `kernel`: the blocks along each axis; the last varies fastest.

    CUDA allows only 65,535 blocks along the other axes, so a longer axis becomes the fastest.
    """
    long = [name for name, blocks in axes.items() if blocks > 65_535]
    names = sorted(axes, key=lambda name: name in long)  # stable, so short axes keep their order
    return {"grid": tuple(axes[name] for name in names), "grid_names": tuple(names)}


def launch_parts(name: str, run, wgs: int, scratch: dict, blocks: list[int], types, *arrays):
    """A kernel for one row x and several weights; run(refs, n) computes block n of a part.

    blocks, types: for each part (the weights and biases of one result) its blocks and its result.
    arrays: x, the parts, norm and residual; refs has x, one part's arrays, its out and the scratch.
    """

    def body(x, parts, norm, residual, *outs, **smem):
        block, start = lax.axis_index("n"), 0
        for weights, out, count in zip(parts, outs, blocks, strict=True):
            own = dict(x=x, weights=weights, norm=norm, residual=residual, out=out)
            mine = functools.partial(run, SimpleNamespace(**own, **smem), block - start)
            inside = (block >= start) & (block < start + count)
            mine() if len(blocks) == 1 else pl.when(inside)(mine)
            start += count

    return kernel(
        body,
        name=name,
        out_type=types,
        scratch_types=scratch,
        **grid(n=sum(blocks)),
        num_threads=wgs,
        # The sum of a warp needs no shared memory.
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
    )(*arrays)


def stat_dtype(dtype) -> jnp.dtype:
    """The dtype of statistics and sums: float32, or float64 for float64 data (in tests).

    Raises ValueError for integers, to which results would silently be rounded, and for fp8.
    """
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.dtype(dtype).itemsize == 1:
        raise ValueError(f"an array is {jnp.dtype(dtype)}: cast it to bfloat16, float16 or float32")
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def divide(n, by: int):
    """(n // by, n % by) for n >= 0, in half the instructions of // and %, inside a kernel."""
    return lax.div(n, jnp.int32(by)), lax.rem(n, jnp.int32(by))


def along(vector, shape, axis: int) -> jax.Array:
    """Broadcasts a vector along `axis` of a two-dimensional shape, inside a kernel."""
    return lax.broadcast_in_dim(vector, shape, [axis])


def sigmoid(z):
    """1 / (1 + exp(-z)) inside a kernel; accurate in both tails."""
    return 1 / (1 + jnp.exp(-z))  # Mosaic's division of float32 is rcp.approx


def check_axes(axes: str, **arrays) -> None:
    """Raises ValueError unless every array has as many axes as `axes` names ("B T H D")."""
    names = axes.split()
    for name, x in arrays.items():
        if x.ndim != len(names):
            raise ValueError(f"{name} has shape {x.shape}, but needs {len(names)} axes: {axes}")


def lossy_softcap(softcap: float | None) -> str | None:
    """Why the kernels would lose precision under this softcap, or None.

    The error of the kernels' tanh is 1e-7 of the softcap.  At 300 the error of attention's lse is
    5.5 times the reference's; at 1000 the loss of linear_cross_entropy is wrong by 2e-5.
    """
    limit = 100
    if softcap is None or softcap <= limit:
        return None
    return f"softcap={softcap} is more than {limit}, so the logits would lose precision"


def too_many(**counts: int) -> str | None:
    """Which of these numbers the kernels, whose indices are int32, cannot count to, or None."""
    over = (f"{name}={n} is more than {2**31 - 1}" for name, n in counts.items() if n >= 2**31)
    return next(over, None)


def unsupported_dtype(**arrays) -> str | None:
    """Why the kernels do not support these dtypes, or None."""
    for name, x in arrays.items():
        if x is not None and x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            return f"{name} is {x.dtype}, not float32, bfloat16 or float16"
    return None


def mixed_dtypes(**arrays) -> str | None:
    """Why the kernels do not support these dtypes (one differs from the first), or None."""
    (first, x), *rest = arrays.items()
    for name, y in rest:
        if y is not None and y.dtype != x.dtype:
            return f"{first} is {x.dtype} but {name} is {y.dtype}"
    return None


def empty(**arrays) -> str | None:
    """Why the kernels do not support these shapes (an array is empty), or None."""
    found = ((name, x) for name, x in arrays.items() if x is not None and x.size == 0)
    return next((f"{name} has shape {x.shape}, without elements" for name, x in found), None)


def not_a_multiple(n: int, **sizes: int) -> str | None:
    """Which size is 0 or not a multiple of n, or None."""
    wrong = (f"{name}={size}" for name, size in sizes.items() if size == 0 or size % n)
    return next((f"{size} is not a positive multiple of {n}" for size in wrong), None)
