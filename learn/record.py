"""Runs kernels on the CPU and records what every warpgroup does, in its own order.

JAX's interpreter executes each load, store, copy and wait of a kernel in a separate function; we
put a notebook in front of these functions.  They are private to JAX, so this works with the
versions that the project supports, and nothing outside learn/ uses it.
"""

import contextlib
import functools
import inspect
import logging
import math
from typing import Any, NamedTuple

import interpreter_extension
import jax
import kernel_checks
import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import primitives as gpu_primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as cb
from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret as ji
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory
from jax._src.state import primitives as state_primitives
from jax.experimental.mosaic.gpu import fragmented_array as fa

from learn.ladder import like
from pallas_kernels import mosaic

LOADS = (state_primitives.get_p, gpu_primitives.load_p)
LINE = 128  # bytes of a request: a line of the caches
GLOBAL = memory.get_memory_space_idx(gpu_core.GMEM)
REGISTERS = memory.get_memory_space_idx(gpu_core.MemorySpace.REGS)


class Event(NamedTuple):
    """One thing that a warpgroup does."""

    # load, store, copy in, copy out, arrive, wait, wait copies, wait copies in, wgmma, wait wgmma
    kind: str
    kernel: int
    block: tuple[int, ...]
    wg: int
    buffer: str = ""  # "x_smem[1]"; of "wait copies": "read" or "done"
    space: str = ""  # "global" or "shared"
    bytes: int = 0
    requests: int = 0  # that the warps of a load from global memory make, if its layout is known
    first: int = 0  # the first index along the last axis
    where: int = 0  # the instruction: the same number in every turn of a loop
    count: int = 0  # copies or wgmmas that a wait leaves, multiply-adds of a wgmma
    barrier: str = ""  # the one on which a copy arrives; a copy of ampere.py has none
    warp: int | None = None  # if a warp does it alone
    array: tuple[int, str] = (0, "")  # in global memory: `like` of all of it


class Notebook:
    """What happened in a run."""

    def __init__(self):
        self.events: list[Event] = []
        self.kernels: list[tuple[str, list[str], list[str]]] = []  # names: itself, arrays, scratch
        self.arrivals: dict[int, dict[str, int]] = {}  # that complete a barrier, by kernel
        self.layouts: dict[
            tuple, Any
        ] = {}  # of loads, by the id of their source_info and their shape
        self.names: dict[tuple, str] = {}  # of buffers
        self.given: dict[tuple, int] = {}  # how many scratch buffers have a name, by thread
        self.at = -1  # the kernel that runs

    def label(self, which: int, number: int) -> str:
        known = self.kernels[self.at][which] if 0 <= self.at < len(self.kernels) else []
        return known[number] if number < len(known) else f"buffer {number}"


def requests(layout, addresses: np.ndarray, itemsize: int) -> int:
    """Requests of a load: the lines that each instruction of a warp touches, added up."""
    alike = 1  # warps that load the same
    if isinstance(layout, fa.WGStridedFragLayout):
        lanes = addresses.reshape(-1, 32 * layout.vec_size)
    elif isinstance(layout, fa.TiledLayout):
        for tile in layout.tiling.tiles:
            head = addresses.shape[: -len(tile)]
            own = addresses.shape[-len(tile) :]
            if len(own) < len(tile) or any(size % t for size, t in zip(own, tile, strict=True)):
                raise ValueError(f"a load of {own} is no multiple of {tile}, a tile of its layout")
            pairs = zip(own, tile, strict=True)
            split = addresses.reshape(*head, *(n for size, t in pairs for n in (size // t, t)))
            axes = range(len(head), split.ndim)
            addresses = split.transpose(*range(len(head)), *axes[::2], *axes[1::2])
        # One instruction: a warp's lanes and their vectors; the other axes are registers and warps.
        last = [d for d in (*layout.lane_dims, layout.vector_dim) if isinstance(d, int)]
        moved = np.moveaxis(addresses, last, range(-len(last), 0))
        lanes = moved.reshape(-1, math.prod(moved.shape[-len(last) :]))
        alike = math.prod(d.times for d in layout.warp_dims if isinstance(d, fa.Replicated))
    else:
        return 0
    return alike * sum(len(np.unique(row * itemsize // LINE)) for row in lanes)


def touched(key, access) -> tuple[np.ndarray, int]:
    """The addresses, in elements, that an access touches, and the bytes of an element."""
    shape, dtype = cb._get_shared_memory().buffer_shape_and_dtype(key)
    addresses = np.arange(math.prod(shape)).reshape(shape)[access.range]
    return addresses, np.dtype(dtype).itemsize


def _array(key) -> tuple[int, str]:
    return like(cb._get_shared_memory().buffer_shape_and_dtype(key))


def _place(book: Notebook, arguments) -> dict:
    location = arguments["mesh_location"]
    block = tuple(int(i) for i in location.cluster_coords)
    warp = location.warp_id  # None: all warps of the warpgroup
    return dict(kernel=book.at, block=block, wg=int(location.thread_id), warp=warp)


def _named(book: Notebook, key, access=None) -> str:
    name = book.names.get((tuple(key)), "acc" if key.memory_space_id == REGISTERS else "?")
    first = access.range[0] if access is not None and access.range else None
    return f"{name}[{first}]" if isinstance(first, int) and key.memory_space_id != GLOBAL else name


def _first(access) -> int:
    last = access.range[-1] if access.range else 0
    return last if isinstance(last, int) else last.start or 0


def _key(array):
    return memory.HostAllocationKey.from_array(np.asarray(array))


def _access(arguments, prefix=""):
    key = _key(arguments[f"{prefix}allocation_key_as_array"])
    transforms = jax.tree.map(int, cb._remove_noop_transforms(arguments[f"{prefix}transforms"]))
    return key, cb._get_shared_memory().access(key, transforms)


def _load_or_store(kind, book, arguments):
    if arguments["thread"] is None:
        return
    key, access = _access(arguments)
    if key.memory_space_id == REGISTERS:
        return
    addresses, itemsize = touched(key, access)
    instruction = id(arguments["source_info"])
    space, wanted, array = "shared", 0, (0, "")
    if key.memory_space_id == GLOBAL:
        layout, _ = book.layouts.get((instruction, addresses.shape), (None, None))
        space, wanted, array = "global", requests(layout, addresses, itemsize), _array(key)
    event = Event(
        kind,
        **_place(book, arguments),
        buffer=_named(book, key, access),
        space=space,
        bytes=addresses.size * itemsize,
        requests=wanted,
        first=_first(access),
        where=instruction,
        array=array,
    )
    book.events.append(event)


def _copy(kind, book, arguments):
    prefix, other = ("dst_", "src_") if kind == "copy in" else ("src_", "dst_")
    key, access = _access(arguments, prefix)
    addresses, itemsize = touched(key, access)
    array = _array(_key(arguments[f"{other}allocation_key_as_array"]))
    barrier = ""
    if kind == "copy in":
        barrier = _named(book, _key(arguments["barrier_allocation_key_as_array"]))
    book.events.append(
        Event(kind, **_place(book, arguments), buffer=_named(book, key, access), space="global",
              bytes=addresses.size * itemsize, where=id(arguments["source_info"]), barrier=barrier,
              array=array)
    )  # fmt: skip


def _inline_load(book, arguments):
    """A load by code that emits MLIR."""
    given = dict(allocation_key_as_array=arguments["key"], transforms=arguments["transforms"] or ())
    _load_or_store("load", book, {**arguments, **given})


def _inline_copy(book, arguments):
    """A copy of ampere.py: by cp.async or by the threads' stores, or a wait for cp.async."""
    code, args, place = arguments["fn"], arguments["args"], _place(book, arguments)
    if not args:  # a wait, or the warps meet
        if code.copies is not None:
            book.events.append(Event("wait copies in", **place, count=code.copies))
        return
    tile = dict(allocation_key_as_array=args[1], transforms=arguments["transforms"][1] or ())
    key, access = _access(tile)
    addresses, itemsize = touched(key, access)
    rows, end = len(addresses), args[5] - args[4] if len(args) > 5 else len(addresses)
    size = addresses.size // rows * min(max(int(end), 0), rows) * itemsize
    event = Event(
        "copy in" if code.asynchronous else "store",
        **place,
        buffer=_named(book, key, access),
        space="global",
        bytes=size,
        count=int(code.commits),
        where=id(arguments["source_info"]),
        array=_array(_key(args[0])),
    )
    book.events.append(event)


def _wait_or_arrive(kind, book, arguments):
    name = _named(book, _key(arguments["allocation_key_as_array"]))
    book.events.append(Event(kind, **_place(book, arguments), buffer=name))


def _wait_copies(book, arguments):
    what = "read" if arguments["wait_read_only"] else "done"
    place = _place(book, arguments)
    book.events.append(Event("wait copies", **place, buffer=what, count=int(arguments["n"])))


def _wgmma(book, arguments):
    b, access = _access({**arguments, "b_allocation_key_as_array": arguments["b_key"]}, "b_")
    (rows, _), _ = cb._get_shared_memory().buffer_shape_and_dtype(_key(arguments["acc_key"]))
    count = rows * math.prod(access.shape)
    book.events.append(
        Event("wgmma", **_place(book, arguments), buffer=_named(book, b, access), count=count)
    )


def _read_accumulator(book, arguments):
    """Reading the sums waits for the wgmmas that add to them."""
    count = arguments.get("wait_n") or 0
    book.events.append(Event("wait wgmma", **_place(book, arguments), count=count))


OBSERVED = {
    "_get": functools.partial(_load_or_store, "load"),
    "_swap": functools.partial(_load_or_store, "store"),
    "copy_gmem_to_smem": functools.partial(_copy, "copy in"),
    "copy_smem_to_gmem": functools.partial(_copy, "copy out"),
    "_barrier_wait": functools.partial(_wait_or_arrive, "wait"),
    "_barrier_arrive": functools.partial(_wait_or_arrive, "arrive"),
    "wait_smem_to_gmem": _wait_copies,
    "wgmma_accumulator_deref": _read_accumulator,
}


def _observed(book: Notebook, function, note):
    """`function`, which also writes to the notebook before it runs."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def run(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        note(book, bound.arguments)
        return function(*args, **kwargs)

    return run


def _allocating(book: Notebook, function, which: int):
    """`function`, whose new buffers get names: 1: arrays in global memory, 2: scratch."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        result = function(*args, **kwargs)
        keys = np.asarray(result[1]).reshape(-1, np.asarray(result[1]).shape[-1])
        if _key(keys[0]).memory_space_id == REGISTERS:
            return result
        bound = inspect.signature(function).bind(*args, **kwargs).arguments
        thread = "all" if which == 1 else tuple(_place(book, bound).values())
        number = book.given[thread] = book.given.get(thread, -1) + 1
        name = book.label(which, number)
        for i, key in enumerate(keys):
            own = name if len(keys) == 1 else f"{name}[{i}]"
            book.names[tuple(_key(key))] = own
            if "num_arrivals" in bound:
                of_kernel = book.arrivals.setdefault(book.at, {})
                of_kernel[own] = int(bound["num_arrivals"])
        return result

    return run


def _starting(book: Notebook, function):
    def run(*args, **kwargs):
        book.at, book.names, book.given = book.at + 1, {}, {}
        return function(*args, **kwargs)

    return run


def _reading_layouts(book: Notebook, function):
    """Notes the layout of every load: the layout_cast that follows it in the program."""

    def interpret(self, jaxpr, token, *args):
        casts = {e.invars[0]: e for e in jaxpr.eqns if e.primitive is gpu_core.layout_cast_p}
        for eqn in jaxpr.eqns:
            if eqn.primitive in LOADS and (cast := casts.get(eqn.outvars[0])):
                layout = cast.params["new_layout"]
                # The source_info is kept, so that no other one gets its id; loads may share it.
                key = id(eqn.source_info), eqn.outvars[0].aval.shape
                book.layouts[key] = layout.to_mgpu(), eqn.source_info
            elif eqn.primitive is gpu_primitives.inline_mgpu_p:
                for result in eqn.params["flat_ret_ty"]:
                    key = id(eqn.source_info), result.shape
                    book.layouts[key] = result.layout.to_mgpu(), eqn.source_info
        return function(self, jaxpr, token, *args)

    return interpret


def _naming(book: Notebook, function):
    """mosaic.kernel, which also notes the names of the kernel's arrays and scratch."""

    def kernel(body, *, name=None, scratch_types=(), **options):
        if 0 in (grid := options.get("grid", ())):
            raise ValueError(f"the grid {grid} has no block: a tile is larger than its array")
        call = function(body, name=name, scratch_types=scratch_types, **options)
        scratch = [
            key
            for key, types in (scratch_types.items() if isinstance(scratch_types, dict) else ())
            for _ in jax.tree.leaves(types)
        ]
        parameters = [
            p.name for p in inspect.signature(body).parameters.values() if p.kind != p.KEYWORD_ONLY
        ]

        def run(*arrays):
            trees = [*arrays, *jax.tree.leaves(options["out_type"], is_leaf=_is_tuple)]
            pairs = zip(parameters, trees, strict=False)
            given = [name for name, tree in pairs for _ in jax.tree.leaves(tree)]
            book.kernels.append((name or body.__name__, given, scratch))
            return call(*arrays)

        return run

    return kernel


def _is_tuple(x):
    return isinstance(x, tuple)


def _wgmma_wait(book: Notebook):
    """The rule of a wait for wgmmas, which the interpreter skips as it has none under way."""

    def rule(self, eqn, token, get_invals):
        def note(token, mesh_location):
            place = _place(book, {"mesh_location": mesh_location})
            book.events.append(Event("wait wgmma", **place, count=eqn.params["n"]))
            return token

        token = callback.io_callback(note, cb.TOKEN_SHAPE_DTYPE, token, self.mesh_location)
        return token, []

    return rule


@contextlib.contextmanager
def recording():
    """Interprets kernels inside, with race detection, and yields the notebook."""
    book = Notebook()
    extension = interpreter_extension
    with contextlib.ExitStack() as stack:
        stack.enter_context(kernel_checks.kernels_run_here())

        def replace(owner, name, value):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        # JAX logs an error with its traceback, and then raises it.
        replace(logging.getLogger(callback.__name__), "disabled", True)
        for name, note in OBSERVED.items():
            replace(cb, name, _observed(book, getattr(cb, name), note))
        for name, which in (("_allocate_buffer_for_all_threads", 1), ("_allocate_buffer", 2),
                            ("_allocate_barriers", 2)):  # fmt: skip
            replace(cb, name, _allocating(book, getattr(cb, name), which))
        start = _starting(book, cb._initialize_shared_memory)
        replace(cb, "_initialize_shared_memory", start)
        for name, note in (("_wgmma", _wgmma), ("_read", _inline_load),
                           ("_run_on_memory", _inline_copy)):  # fmt: skip
            replace(extension, name, _observed(book, getattr(extension, name), note))
        wait = gpu_primitives.wgmma_wait_p
        stack.callback(extension._EXTRA.pop, wait)
        extension._EXTRA[wait] = _wgmma_wait(book)
        interpret = ji.JaxprInterpreter.interpret
        replace(ji.JaxprInterpreter, "interpret", _reading_layouts(book, interpret))
        replace(mosaic, "kernel", _naming(book, mosaic.kernel))
        yield book


def watched(book: Notebook):
    """Runs a rung inside `recording`; what its `prepare` did is not in the notebook."""

    def run(function, arguments):
        arguments = jax.block_until_ready(arguments)
        book.events.clear(), book.kernels.clear()
        book.at = -1
        return jax.block_until_ready(jax.jit(function)(*arguments))

    return run


def summary(book: Notebook) -> str:
    """What a run moved, in words."""
    of = lambda kind, space: [e for e in book.events if (e.kind, e.space) == (kind, space)]
    loads, stores = of("load", "global"), of("store", "global")
    ins, outs = of("copy in", "global"), of("copy out", "global")
    total = lambda events: sum(e.bytes for e in events)
    words = []
    if loads:
        asked = sum(e.requests for e in loads)
        words.append(f"{total(loads)} bytes loaded in {asked} requests of the warps")
    for how, copies in (
        ("TMA", [e for e in ins if e.barrier]),
        ("cp.async", [e for e in ins if not e.barrier]),
    ):
        if copies:
            words.append(f"{total(copies)} bytes copied in by {how}")
    written = f"{total(stores) + total(outs)} bytes written"
    return ", ".join([*words, written])
