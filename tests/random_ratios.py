"""Which errors a random call may have beside the truth and the XLA form."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from kernel_checks import FLOOR, ON_GPU, RATIO
from random_calls import Call
from random_forms import Arguments, wide

FEW = 16  # elements
# Ops that compute in float32 whatever their dtype, and round once, at the end.
IN_FLOAT32 = (*("encoder", "rope", "swiglu", "cross_entropy", "vlstm_step"),)
TF32 = 2.0**-10  # relative spacing of what XLA multiplies on a GPU in place of float32


def spacing(call: Call, dtype) -> float:
    """The relative spacing of numbers in which an op multiplies."""
    if call.op == "fp8_linear" or call.options.get("fp8") or "precision" in call.options:
        return 2.0**-2  # of e5m2
    return max(float(jnp.finfo(dtype).eps), TF32 if ON_GPU else 0)


def of_leaf(call: Call, coarse: float) -> float:
    norm = call.op in ("layer_norm", "rms_norm") and call.arrays.get("residual") is None
    return float(np.finfo(np.float32).eps) if norm or call.op in IN_FLOAT32 else coarse


def cancelled(given: Arguments, names, truth, coarse: float) -> list[float]:
    """Errors of results and gradients that are small differences of larger numbers."""
    call, lost = given.call, []
    most = lambda kind: max(
        (_largest(t[np.isfinite(t)]) for t, n in zip(truth, names, strict=True) if n[0] == kind),
        default=0.0,
    )
    largest = {kind: most(kind) for kind in "yd"}  # of results, of gradients
    # A norm after the only position of a vLSTM: di is the norm's eps times h dh.
    normed = call.op == "vlstm" and call.arrays.get("norm_weight") is not None
    alone = normed and call.arrays["i"].shape[1] == 1 and not call.arrays.get("initial_state")
    small = ("df", "dinitial_state.1", *["di"] * alone)
    for name in names:
        error = 4 * FLOOR * largest[name[0]] + float(np.finfo(np.float32).eps) * _logit(given)
        # Sums of q dq and of k dk; of h dh, which is 0 where a norm follows h.
        if call.op.startswith("vlstm") and name in small:
            error += coarse / 8 * max(largest.values())
        if call.op == "attention" and name in ("dq", "dk"):
            error += float(np.finfo(np.float32).eps) * _differences(given)
        if call.op == "layer_norm" and name == "dx" and given.leaves[0].shape[-1] == 1:
            # 0: g - mean(g) of one column, which a fused multiply-add rounds once, times r.
            error += float(np.finfo(np.float32).eps) / max(call.options["eps"], 1e-12) ** 0.5
        lost.append(error)
    return lost


def _differences(given: Arguments) -> float:
    """The largest term of dq and dk where dP - delta is a difference of equal numbers.

    A row that sees one key has the weight 1 and no gradient.  XLA subtracts the same float32 from
    itself; the kernels compute delta from O, so that the rounding of dO . v is left.
    """
    arrays = dict(zip(given.names, map(wide, given.leaves), strict=True))
    most = {name: _largest(x[np.isfinite(x)]) for name, x in arrays.items()}
    packed = max(most.values())  # of an array that holds all three
    q, k, v = (most.get(name, packed) for name in "qkv")
    width = max(x.shape[-1] for x in arrays.values())
    scale = abs(given.call.options.get("scale") or 1)
    return 4 * v * width**0.5 * scale * max(q, k)  # the gradients of O are normal numbers


def _logit(given: Arguments) -> float:
    """The largest logit of a loss, whose rounding is all that a label that is certain leaves."""
    call, arrays = given.call, dict(zip(given.names, given.leaves, strict=True))
    most = lambda name: np.abs(wide(arrays[name]))[np.isfinite(wide(arrays[name]))].max(initial=0)
    if call.op == "cross_entropy":
        return float(most("logits"))
    if call.op == "linear_cross_entropy":
        x, weight = most("x"), most("weight")
        logit = x * weight * arrays["x"].shape[-1] ** 0.5
        logit = min(call.options.get("softcap") or math.inf, logit)
        rows = 1 if call.options["reduction"] == "mean" else arrays["labels"].size
        return max(logit, 1) * rows * max(x, weight, 1)
    return 0.0


def named(given: Arguments, f, cotangents) -> list[str]:
    """A name for each result and gradient."""
    y = [f"y{jax.tree_util.keystr(p)}" for p, _ in jax.tree_util.tree_leaves_with_path(cotangents)]
    return y + sorted(f"d{given.names[i]}" for i in given.differentiable)


def _rms(x) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0


def _largest(x) -> float:
    return float(np.abs(x).max(initial=0))


def against_truth(xla, exact, truth, error, finite: bool, is_result: bool) -> str | None:
    """What is wrong with the XLA form, or None."""
    inside = np.isfinite(truth) & (np.abs(truth) <= float(jnp.finfo(xla.dtype).max) / 2)
    if finite and (bad := inside & ~np.isfinite(wide(xla))).any():
        return f"the XLA form has {bad.sum()} elements that are not finite, where the truth is"
    if is_result and (bad := ~np.isfinite(truth) & np.isfinite(wide(xla))).any():
        return f"the XLA form has {bad.sum()} finite elements, where the truth is not finite"
    if exact is None:
        return None
    ok = inside & np.isfinite(exact)
    if finite and not np.array_equal(ok, inside):
        return "the XLA form in float64 is not finite, where the truth is"
    wrong, most = _largest((exact - truth)[ok]), _largest(truth[ok])
    allowed = 1e-7 * most + 1e-12 + 2 * _largest(error[ok & np.isfinite(error)]) + 1e-290
    return (
        None if wrong <= allowed else f"the XLA form in float64 is off by {wrong:.3g} of {most:.3g}"
    )


def in_range(truth, dtype) -> bool:
    """Whether the dtype holds every finite number of the truth."""
    return _largest(truth[np.isfinite(truth)]) <= float(jnp.finfo(dtype).max)


def against_reference(actual, xla, truth, error, free: bool = False) -> str | None:
    """What is wrong with a result, or None.

    free: one of the two may have numbers where the other has NaN or infinities.
    """
    info = jnp.finfo(xla.dtype)
    actual, xla = wide(actual), wide(xla)
    finite_truth = np.isfinite(truth)
    clear = ~finite_truth | (np.abs(truth) <= float(info.max) / 2)  # else rounding may overflow
    same = (
        (np.isfinite(actual) & np.isfinite(xla))
        | (actual == xla)
        | (np.isnan(actual) & np.isnan(xla))
        | (free & finite_truth)
    )
    if (bad := clear & ~same).any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        return f"{bad.sum()} elements, first {at}: {actual[at]:.4g}, XLA has {xla[at]:.4g}"
    ok = clear & finite_truth & np.isfinite(xla) & np.isfinite(actual)
    a, x, t = actual[ok], xla[ok], truth[ok]
    e = np.where(np.isfinite(error), error, 0)[ok]
    most = _largest(t)
    floor = (FLOOR + float(info.eps) / 2) * most + float(info.smallest_subnormal)
    floor += float(np.finfo(np.float32).tiny)
    for what, norm in (("max", _largest), ("rms", _rms)):
        mine, theirs = norm(a - t), max(norm(x - t), norm(e))
        # The reference's error in a few numbers may be small by luck.
        if mine > (RATIO if t.size >= FEW else 2 * RATIO) * theirs + floor:
            ratio = f"{mine / max(theirs, 1e-300):.3g} x XLA's {theirs:.3g}"
            return f"{what} error {mine:.3g} is {ratio} (largest value {most:.3g})"
    return None
