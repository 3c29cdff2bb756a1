"""CUDA C++ for the steps between the kernels of a program: one function computes many arrays.

XLA would fuse these steps in the same way.  One thread computes an element of an array from the
elements of others: it follows the steps back to arrays in memory, and turns its position into
positions there.  Values of 16 bits are float, rounded after each step.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pallas_kernels.torch.program import Array, Program, ProgramStep

_THREADS = 256
DEEPEST = 100  # steps one upon the other; `value` calls itself for each
# dtype: type of its variables, type in memory
_TYPES = {
    "bool": ("bool", "bool"), "float32": ("float", "float"), "float16": ("float", "f16"),
    "bfloat16": ("float", "bf16"), "int8": ("signed char",) * 2, "int16": ("short",) * 2,
    "int32": ("int",) * 2, "uint8": ("unsigned char",) * 2, "uint16": ("unsigned short",) * 2,
    "uint32": ("unsigned",) * 2,
}  # fmt: skip
_PRELUDE = """\
struct bf16 {
  unsigned short bits;
  bf16() = default;
  HERE bf16(float x) {
    unsigned u = as<unsigned>(x);
    bits = x != x ? 0x7fc0 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
  }
  HERE operator float() const { return as<float>((unsigned)bits << 16); }
};
// A position outside is of a value that is not used.
template <class T> HERE T load(const T* x, Index i, Index n) {
  return i >= 0 && i < n ? x[i] : T();
}
"""
# How memory is reached and who computes what; what follows is the same for another target.
CUDA = """\
#define HERE __device__ __forceinline__
template <class T, class S> HERE T as(S x) {
  T y; static_assert(sizeof x == sizeof y, ""); memcpy(&y, &x, sizeof y); return y;
}
struct f16 {
  unsigned short bits;
  f16() = default;
  HERE f16(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  HERE operator float() const { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits)); return y; }
};
template <int count> struct Arrays { void* at[count]; };
#define FUNCTION extern "C" __global__ void glue(const Arrays<COUNT> arrays)
#define AT(type, n) ((type*)arrays.at[n])
#define EACH(first, blocks, count) \\
  if (int b = int(blockIdx.x) - (first); b >= 0 && b < blocks) \\
    for (Index i = Index(b) * 256 + threadIdx.x; i < count; i = count)
"""  # noqa: E501
_FORMULAS = {
    "neg": "-{0}", "square": "{0} * {0}", "copy": "{0}", "select_n": "{0} ? {2} : {1}",
    "max": "({0} > {1} || {0} != {0} ? {0} : {1})", "abs": "({0} < 0 ? -{0} : {0})",
    "min": "({0} < {1} || {0} != {0} ? {0} : {1})", "not": "({type})({0} ^ ({type})-1)",
    "convert_element_type": "({type})({0})", "bitcast_convert_type": "as<{memory}>(({bits})({0}))",
    "shift_right_logical": "(unsigned {plain})({0}) >> {1}", "logistic": "1 / (1 + exp(-{0}))",
    "reduce_precision": "float({rounded}({0}))", "sign": "{0} != {0} ? {0} : ({0} > 0) - ({0} < 0)",
}  # fmt: skip
_INFIX = dict(add="+", add_any="+", sub="-", mul="*", div="/", rem="%", eq="==", ne="!=", lt="<")
_INFIX |= {"le": "<=", "gt": ">", "ge": ">=", "and": "&", "or": "|"}
_FORMULAS |= {name: f"{{0}} {operator} {{1}}" for name, operator in _INFIX.items()}
_ROUNDED = {(8, 7): "bf16", (5, 10): "f16", (8, 23): "float"}
_FORMULAS |= {name: name + "({0})" for name in "exp exp2 log log1p log2 tanh sqrt".split()}
_MOVES = set("pad slice transpose broadcast_in_dim concatenate split stack unstack iota".split())


def fits(step: ProgramStep, arrays: Sequence[Array]) -> bool:
    """Whether the step can be part of a function."""
    kinds, name = [arrays[i] for i in (*step.ins, *step.outs)], step.primitive
    parts = name == "bitcast_convert_type" and kinds[0].shape != kinds[1].shape
    known = (name in _FORMULAS or name in _MOVES) and not parts
    return known and all(x.dtype in _TYPES for x in kinds)


class _Group:
    """The lines that compute, in one thread, an element of each of some arrays of one shape."""

    def __init__(self, program: Program, stored, parameter: Callable):
        self.program, self.stored, self.parameter = program, stored, parameter
        self.lines: list[str] = []
        self.known: dict[Any, str] = {}

    def let(self, kind: str, text: str) -> str:
        """The name of a variable with this value."""
        if kind == "Index" and text.isalnum():
            return text
        if (kind, text) not in self.known:
            self.known[kind, text] = f"v{len(self.lines)}"
            self.lines.append(f"const {kind} v{len(self.lines)} = {text};")
        return self.known[kind, text]

    def flat(self, at: Sequence[str], shape) -> str:
        text = "0"
        for x, n in zip(at, shape, strict=True):
            if n != 1:
                text = x if text == "0" else self.let("Index", f"{text} * {n} + {x}")
        return text

    def places(self, flat: str, shape) -> tuple[str, ...]:
        at = ["0"] * len(shape)
        for axis in reversed(range(len(shape))):
            if math.prod(shape[:axis]) == 1:
                at[axis] = flat
                break
            if (n := shape[axis]) != 1:
                at[axis], flat = (self.let("Index", f"{flat} {sign} {n}") for sign in "%/")
        return tuple(at)

    def value(self, number: int, at: tuple[str, ...]) -> str:
        """The name of the variable with array `number` at this place."""
        shape = self.program.arrays[number].shape
        at = tuple("0" if n == 1 else x for x, n in zip(at, shape, strict=True))
        if (number, at) not in self.known:
            self.known[number, at] = self._value(number, at)
        return self.known[number, at]

    def _value(self, number: int, at: tuple[str, ...]) -> str:
        arrays, root = self.program.arrays, self.program.roots[number]
        shape, dtype = arrays[number]
        kind, memory = _TYPES[dtype]
        constant = self.program.constants.get(root)
        if constant is not None and constant.size == 1:
            x = constant.item()
            if kind != "float":
                return self.let(kind, f"({kind})({int(x)}ll)")
            return self.let(kind, f"as<float>({np.float32(x).view(np.uint32)}u)")
        if root in self.stored:
            where = f"AT(const {memory}, {self.parameter(root)}), {self.flat(at, shape)}"
            return self.let(kind, f"load({where}, {math.prod(shape)})")
        if root != number:
            return self.value(root, self.places(self.flat(at, shape), arrays[root].shape))
        text = self.computed(self.program.made[root], root, at)
        return self.let(kind, f"float({memory}({text}))" if memory in ("f16", "bf16") else text)

    def computed(self, step: ProgramStep, number: int, at: tuple[str, ...]) -> str:
        name, p = step.primitive, step.params
        shapes = [self.program.arrays[i].shape for i in step.ins]
        kind, memory = _TYPES[self.program.arrays[number].dtype]
        get = lambda i, at: self.value(step.ins[i], tuple(at))
        index = lambda text: self.let("Index", text)
        part = step.outs.index(number)
        if name == "broadcast_in_dim":
            return get(0, (at[d] for d in p["broadcast_dimensions"]))
        if name == "transpose":
            return get(0, (at[p["permutation"].index(axis)] for axis in range(len(at))))
        if name == "slice":
            moved = zip(at, p["strides"] or (1,) * len(at), p["start_indices"], strict=True)
            return get(0, (index(f"{x} * {step} + {begin}") for x, step, begin in moved))
        if name == "iota":
            return f"({kind})({at[p['dimension']]})"
        if name == "pad":
            inside, places = ["true"], []
            for x, n, (low, _, gap) in zip(at, shapes[0], p["padding_config"], strict=True):
                x = index(f"{x} - {low}")
                places.append(index(f"{x} / {gap + 1}"))
                inside.append(f"{x} >= 0 && {x} % {gap + 1} == 0 && {places[-1]} < {n}")
            return f"{self.let('bool', ' && '.join(inside))} ? {get(0, places)} : {get(1, ())}"
        axis = p.get("axis", p.get("dimension", 0))
        before, here, after = at[:axis], at[axis : axis + 1], at[axis + 1 :]
        if name == "split":
            return get(0, (*before, index(f"{here[0]} + {sum(p['sizes'][:part])}"), *after))
        if name == "unstack":
            return get(0, (*before, str(part), *here, *after))
        if name in ("concatenate", "stack"):
            text, x, end = "", "", 0
            for i, shape in enumerate(shapes):
                own = (index(f"{here[0]} - {end}"),) if name == "concatenate" else ()
                x = get(i, (*before, *own, *after))
                end += shape[axis] if own else 1
                text += f"{here[0]} < {end} ? {x} : "
            return text + x
        x = [get(i, at if shape else ()) for i, shape in enumerate(shapes)]
        return _FORMULAS[name].format(
            *x, type=kind, plain=kind.replace("unsigned", ""), memory=memory,
            bits=_TYPES[self.program.arrays[step.ins[0]].dtype][1],
            rounded=_ROUNDED.get((p.get("exponent_bits"), p.get("mantissa_bits"))),
        )  # fmt: skip


def write(program: Program, stored, roots: Sequence[int]):
    """The text of a function that computes `roots` from the `stored`, its arguments, its blocks."""
    slots: dict[int, int] = {}
    parameter = lambda root: slots.setdefault(root, len(slots))
    body, blocks = [], 0
    for shape in dict.fromkeys(program.arrays[root].shape for root in roots):
        group = _Group(program, stored, parameter)
        at, size = group.places("i", shape), math.prod(shape)
        members = [root for root in roots if program.arrays[root].shape == shape]
        values = [group.value(root, at) for root in members]
        for root, value in zip(members, values, strict=True):
            memory = _TYPES[program.arrays[root].dtype][1]
            group.lines.append(f"AT({memory}, {parameter(root)})[i] = {value};")
        own = -(-size // _THREADS)
        body += [f"EACH({blocks}, {own}, {size}) {{", *group.lines, "}"]
        blocks += own
    large = max(math.prod(a.shape) for a in program.arrays) + _THREADS >= 2**31
    head = f"typedef {'long long' if large else 'int'} Index;\n#define COUNT {len(slots)}\n"
    text = "\n".join((head, _PRELUDE, "FUNCTION {", *body, "}\n"))
    return text, tuple(slots), blocks
