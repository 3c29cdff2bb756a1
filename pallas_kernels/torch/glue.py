"""CUDA C++ for what lies between the kernels of a program: one function computes many arrays.

XLA would fuse these steps in the same way.  One thread computes an element of an array from the
elements of others: it follows the steps back to arrays in memory, and turns its position into
theirs.  Values of 16 bits are float, rounded after each step.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pallas_kernels.torch.program import Program, Step

_THREADS = 256
# dtype: type of its variables, type in memory
_TYPES = {
    "bool": ("bool", "bool"), "float16": ("float", "f16"), "bfloat16": ("float", "bf16"),
    "float32": ("float", "float"), "float64": ("double", "double"),
    "int8": ("signed char",) * 2, "int16": ("short",) * 2, "int32": ("int",) * 2,
    "int64": ("long long",) * 2, "uint8": ("unsigned char",) * 2,
    "uint16": ("unsigned short",) * 2, "uint32": ("unsigned",) * 2,
    "uint64": ("unsigned long long",) * 2,
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
"""
_CUDA = """\
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
struct Arrays { void* at[COUNT]; };
#define FUNCTION extern "C" __global__ void glue(const Arrays arrays)
#define AT(type, n) ((type*)arrays.at[n])
#define EACH(first, blocks, count) \\
  if (int b = int(blockIdx.x) - (first); b >= 0 && b < blocks) \\
    for (Index i = Index(b) * 256 + threadIdx.x; i < count; i = count)
"""  # noqa: E501
_FORMULAS = {
    "neg": "-{0}", "max": "({0} > {1} || {0} != {0} ? {0} : {1})", "square": "{0} * {0}",
    "min": "({0} < {1} || {0} != {0} ? {0} : {1})", "abs": "({0} < 0 ? -{0} : {0})",
    "sign": "({0} != {0} ? {0} : ({type})(({0} > 0) - ({0} < 0)))", "rsqrt": "1 / sqrt({0})",
    "logistic": "1 / (1 + exp(-{0}))", "copy": "{0}", "is_finite": "isfinite({0})",
    "clamp": "({1} < {0} ? {0} : {1} > {2} ? {2} : {1})", "reduce_precision": "float({bits}({0}))",
    "pow": "pow({0}, {1})", "shift_right_logical": "(unsigned {plain})({0}) >> {1}",
    "add": "{0} + {1}", "add_any": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}",
    "div": "{0} / {1}", "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}",
    "le": "{0} <= {1}", "gt": "{0} > {1}", "ge": "{0} >= {1}", "and": "{0} & {1}",
    "or": "{0} | {1}", "xor": "{0} ^ {1}", "shift_left": "{0} << {1}",
    "shift_right_arithmetic": "{0} >> {1}",
}  # fmt: skip
_SAME = "exp exp2 log log1p log2 expm1 tanh sqrt sin cos erf floor ceil".split()
_FORMULAS |= {name: name + "({0})" for name in _SAME}
_MOVES = {
    "pad", "slice", "transpose", "broadcast_in_dim", "concatenate", "split", "stack", "unstack",
    "select_n", "iota", "rev", "convert_element_type", "not", "rem", "integer_pow",
    "bitcast_convert_type",
}  # fmt: skip


class Glue(NamedTuple):
    """A function of `arrays`, numbers of a program's arrays, some of which it writes."""

    body: str
    index: str  # type of a position
    arrays: tuple[int, ...]
    blocks: int
    binary: bytes = b""

    def source(self, target: str = _CUDA) -> str:
        """The text for a target, which defines how memory is reached and who computes what."""
        head = f"typedef {self.index} Index;\n#define COUNT {len(self.arrays)}\n"
        return head + target + _PRELUDE + self.body


def fits(step: Step, program: Program) -> bool:
    """Whether the step can be part of a function."""
    known = step.primitive in _FORMULAS or step.primitive in _MOVES
    return known and all(program.arrays[i].dtype in _TYPES for i in (*step.ins, *step.outs))


class _Function:
    """The text of one group: arrays of one shape, computed by the same thread."""

    def __init__(self, program: Program, steps: dict[int, Step], stored, parameter: Callable):
        self.program, self.steps, self.stored, self.parameter = program, steps, stored, parameter
        self.lines: list[str] = []
        self.known: dict[Any, str] = {}

    def let(self, kind: str, text: str) -> str:
        """The name of a variable with this value."""
        if re.fullmatch(r"\w+", text) and kind == "Index":
            return text
        found = self.known.get((kind, text))
        if found is None:
            found = self.known[kind, text] = f"v{len(self.lines)}"
            self.lines.append(f"const {kind} {found} = {text};")
        return found

    def flat(self, at: Sequence[str], shape) -> str:
        text = "0"
        for x, n in zip(at, shape, strict=True):
            if n != 1:
                text = x if text == "0" else f"{text} * {n} + {x}"
                text = self.let("Index", text)
        return text

    def places(self, flat: str, shape) -> tuple[str, ...]:
        at = ["0"] * len(shape)
        for axis in reversed(range(len(shape))):
            if shape[axis] != 1:
                rest = math.prod(shape[:axis]) != 1
                at[axis] = self.let("Index", f"{flat} % {shape[axis]}") if rest else flat
                flat = self.let("Index", f"{flat} / {shape[axis]}") if rest else "0"
        return tuple(at)

    def value(self, number: int, at: tuple[str, ...]) -> str:
        """The name of the variable with array `number` at this place."""
        array = self.program.arrays[number]
        at = tuple("0" if n == 1 else x for x, n in zip(at, array.shape, strict=True))
        found = self.known.get((number, at))
        if found is None:
            found = self.known[number, at] = self._value(number, at)
        return found

    def _value(self, number: int, at: tuple[str, ...]) -> str:
        program, root = self.program, self.program.roots[number]
        array = program.arrays[number]
        kind, memory = _TYPES[array.dtype]
        constant = program.constants.get(root)
        if constant is not None and constant.size == 1:
            return self.let(kind, _literal(constant, array.dtype))
        if root in self.stored:
            place = self.flat(at, array.shape)
            return self.let(kind, f"AT(const {memory}, {self.parameter(root)})[{place}]")
        if root != number:
            return self.value(
                root, self.places(self.flat(at, array.shape), program.arrays[root].shape)
            )
        text = self.computed(self.steps[root], root, at)
        return self.let(kind, f"float({memory}({text}))" if memory in ("f16", "bf16") else text)

    def computed(self, step: Step, number: int, at: tuple[str, ...]) -> str:
        name, p, ins, arrays = step.primitive, step.params, step.ins, self.program.arrays
        shapes = [arrays[i].shape for i in ins]
        dtype = arrays[number].dtype
        kind = _TYPES[dtype][0]
        get = lambda i, at: self.value(ins[i], tuple(at))
        index = lambda text: self.let("Index", text)
        if name == "broadcast_in_dim":
            return get(0, (at[d] for d in p["broadcast_dimensions"]))
        if name == "transpose":
            back = dict(zip(p["permutation"], at, strict=True))
            return get(0, (back[axis] for axis in range(len(at))))
        if name == "slice":
            moved = zip(at, p["strides"] or (1,) * len(at), p["start_indices"], strict=True)
            return get(0, (index(f"{x} * {step} + {begin}") for x, step, begin in moved))
        if name == "rev":
            ends = [n - 1 if axis in p["dimensions"] else 0 for axis, n in enumerate(shapes[0])]
            pairs = zip(at, ends, strict=True)
            return get(0, (index(f"{end} - {x}") if end else x for x, end in pairs))
        if name == "pad":
            return self._pad(p["padding_config"], shapes[0], at, get)
        if name in ("concatenate", "stack", "split", "unstack"):
            return self._parts(step, number, at, shapes, get)
        if name == "iota":
            return f"({kind})({at[p['dimension']]})"
        x = [get(i, at if shapes[i] else ()) for i in range(len(ins))]
        if name == "select_n":
            if len(x) == 3:
                return f"{x[0]} ? {x[2]} : {x[1]}"
            cases = enumerate(x[2:], 1)
            return "".join(f"{x[0]} == {n} ? {case} : " for n, case in cases) + x[1]
        if name == "convert_element_type":
            return f"{x[0]} != 0" if dtype == "bool" else f"({kind})({x[0]})"
        if name == "bitcast_convert_type":
            return f"as<{_TYPES[dtype][1]}>({_TYPES[arrays[ins[0]].dtype][1]}({x[0]}))"
        if name == "not":
            return f"!{x[0]}" if dtype == "bool" else f"~{x[0]}"
        if name == "rem":
            return f"fmod({x[0]}, {x[1]})" if kind in ("float", "double") else f"{x[0]} % {x[1]}"
        if name == "integer_pow":
            power = " * ".join([x[0]] * abs(p["y"])) or f"({kind})(1)"
            return f"1 / ({power})" if p["y"] < 0 else power
        plain = kind.replace("unsigned", "").replace("signed", "")
        bits = "bf16" if p.get("exponent_bits") == 8 else "f16"
        return _FORMULAS[name].format(*x, type=kind, plain=plain, bits=bits)

    def _pad(self, config, shape, at, get) -> str:
        inside, places = [], []
        for x, n, (low, _, gap) in zip(at, shape, config, strict=True):
            x = self.let("Index", f"{x} - {low}") if low else x
            if gap:
                inside.append(f"{x} % {gap + 1} == 0")
            span = self.let("Index", f"{x} / {gap + 1}") if gap else x
            inside += [f"{x} >= 0", f"{span} < {n}"]
            # Computed even where it is not used, so its place must exist.
            places.append(self.let("Index", f"{span} < 0 ? 0 : {span} < {n} ? {span} : {n - 1}"))
        if 0 in shape:
            return get(1, ())
        within = self.let("bool", " && ".join(inside) or "true")
        return f"{within} ? {get(0, places)} : {get(1, ())}"

    def _parts(self, step, number, at, shapes, get) -> str:
        p, name = step.params, step.primitive
        axis = next(p[k] for k in ("axis", "dimension") if k in p)
        before, after = at[:axis], at[axis + 1 :]
        if name == "split":
            begin = sum(p["sizes"][: step.outs.index(number)])
            return get(0, (*before, self.let("Index", f"{at[axis]} + {begin}"), *after))
        if name == "unstack":
            return get(0, (*before, str(step.outs.index(number)), *at[axis:]))
        text, part, begin = "", "", 0
        for i, shape in enumerate(shapes):
            n = 1 if name == "stack" else shape[axis]
            own = f"{at[axis]} - {begin}"  # of this part; its place must exist even if not used
            own = self.let("Index", f"{own} < 0 ? 0 : {own} < {n} ? {own} : {n - 1}")
            if n:
                begin += n
                part = get(i, (*before, *(() if name == "stack" else (own,)), *after))
                text += f"{at[axis]} < {begin} ? {part} : "
        return f"{text}{part}"


def _literal(x: np.ndarray, dtype: str) -> str:
    x = x.reshape(())
    kind = _TYPES[dtype][0]
    if kind == "float":
        return f"as<float>({x.astype(np.float32).view(np.uint32)}u)"
    if kind == "double":
        return f"as<double>({x.view(np.uint64)}ull)"
    return f"({kind})({int(x)}{'ull' if dtype == 'uint64' else 'll'})"


def write(program: Program, steps: dict[int, Step], stored, roots: Sequence[int]) -> Glue:
    """The function that computes `roots`; `stored` are in memory, `steps` make the others."""
    slots: dict[int, int] = {}
    parameter = lambda root: slots.setdefault(root, len(slots))
    groups: dict[tuple[int, ...], list[int]] = {}
    for root in roots:
        groups.setdefault(program.arrays[root].shape, []).append(root)
    body, blocks = [], 0
    for shape, members in groups.items():
        f = _Function(program, steps, stored, parameter)
        at = f.places("i", shape)
        values = [f.value(root, at) for root in members]
        size = math.prod(shape)
        own = -(-size // _THREADS)
        body.append(f"  EACH({blocks}, {own}, {size}) {{")
        body += [f"    {line}" for line in f.lines]
        for root, value in zip(members, values, strict=True):
            memory = _TYPES[program.arrays[root].dtype][1]
            body.append(f"    AT({memory}, {parameter(root)})[i] = {value};")
        body.append("  }")
        blocks += own
    large = max(math.prod(a.shape) for a in program.arrays) + _THREADS >= 2**31
    text = "FUNCTION {\n" + "\n".join(body) + "\n}\n"
    return Glue(text, "long long" if large else "int", tuple(slots), blocks)
