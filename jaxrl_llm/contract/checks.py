"""The checks, each on one function and one seed. `CHECKS` is their order, plain faults first."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.contract.inputs import SIZES, VOCABULARY, axes_of_shape, lead_of
from jaxrl_llm.contract.subject import Arrays, Subject, fields, to_numpy
from jaxrl_llm.signature import did_you_mean, hyperparameters_of, unwrap

FACTS = {
    "output": "axes of the result as the function returns it, such as 'GT', or '' for a scalar",
    "stop_gradient": "parts of the value are held constant, so that its gradient is not its derivative",
    "zero_at_zero_advantage": "advantages of 0 give loss 0 and gradient 0, whatever the policy does",
    "linear": "linear in token_loss",
    "counts_empty": "responses without tokens count in the denominator of the aggregation",
    "min_group": "fewer responses than this in a group give no signal",
    "ordered": "the order of the responses in a group, or of the prompts, matters",
}


def check_signature(subject: Subject) -> None:
    for name in getattr(unwrap(subject.fn), "facts", {}):
        if name not in FACTS:
            subject.fail(f"declares an unknown fact {name!r}{did_you_mean(name, FACTS)}")
    for name in subject.names:
        if name not in VOCABULARY and name not in subject.extra_arrays:
            subject.fail(
                f"asks for {name!r}, which is not in the vocabulary{did_you_mean(name, VOCABULARY)}; "
                f"hyperparameters go after '*', arrays of your own into extra_arrays={{{name!r}: axes}}"
            )
    for name, axes in subject.extra_arrays.items():
        if isinstance(axes, str) and not set(axes) <= SIZES.keys():
            subject.fail(f"extra_arrays[{name!r}] is {axes!r}; axes are letters of {''.join(SIZES)}")
    hyperparameters = hyperparameters_of(subject.fn)
    for name, default in hyperparameters.items():
        if default is inspect.Parameter.empty:
            subject.fail(
                f"the hyperparameter {name!r} has no default; give one, or bind it with functools.partial"
            )
    for name in inspect.signature(subject.fn).parameters:
        if name not in subject.names and name not in hyperparameters:
            subject.fail(f"the parameter {name!r} is neither an array nor keyword-only; put it after '*'")


def check_jit(subject: Subject, seed: int) -> None:
    inputs = subject.draw(seed)
    with jax.enable_x64(True):
        plain = to_numpy(fields(subject.fn(*map(jnp.asarray, inputs.cast(np.float64).values()))))
    try:
        traced = subject.value(inputs)
    except jax.errors.JAXTypeError as error:
        subject.fail(f"must run under jax.jit, but: {str(error).splitlines()[0]}", error)
    subject.require_same("must give the same under jax.jit as without", traced, plain)


def check_shape(subject: Subject, seed: int) -> None:
    declared, lead = subject.fact("output"), lead_of(subject.scope)
    if declared is not None:
        allowed = {declared}
    elif subject.is_loss:
        allowed = {lead + "T"}
    else:
        allowed = {lead[:i] + tail for i in range(len(lead) + 1) for tail in ("", "T", "S")}
    for name, found in subject.value(subject.draw(seed)).items():
        if axes_of_shape(found.shape) not in allowed:
            expected = " or ".join(f"[{', '.join(axes)}]" for axes in sorted(allowed))
            subject.fail(
                f"{name} has shape {found.shape} where {SIZES}; expected {expected}. If another is meant, "
                "declare it: @scope(..., output=axes)"
            )


def check_precision(subject: Subject, seed: int) -> None:
    inputs = subject.draw(seed).rounded()
    single, double = subject.value(inputs, np.float32), subject.value(inputs, np.float64)
    for name, found in double.items():
        if found.dtype.kind == "f" and found.dtype != np.float64:
            subject.fail(f"must keep float64, but {name} is {found.dtype}; take the dtype of the inputs")
    subject.require_same("float32 must agree with float64", single, double, rtol=1e-4, atol=1e-5)


def check_padding(subject: Subject, seed: int) -> None:
    if not subject.is_masked:
        return
    for masks in ("full", "holes"):
        inputs = subject.draw(seed, masks)
        value, padded = subject.value(inputs), subject.value(inputs.padded())
        for name, found in value.items():
            axis = axes_of_shape(found.shape).find("T")
            if axis >= 0:
                padded[name], rest = np.split(padded[name], [SIZES["T"]], axis=axis)
                subject.require_zero("must be 0 on padding", {name: rest})
        subject.require_same("padding must change nothing", padded, value)


def check_outside(subject: Subject, seed: int) -> None:
    if not subject.is_masked:
        return
    claim = "NaN outside the mask must not reach the {} (jnp.where on what goes in, then on what comes out)"
    for masks in ("ragged", "holes"):
        inputs = subject.draw(seed, masks)
        poisoned = inputs.poisoned()
        subject.require_same(claim.format("value"), subject.value(poisoned), subject.value(inputs))
        gradient = subject.gradient(poisoned)
        subject.require_same(claim.format("gradient"), gradient, subject.gradient(inputs))


def check_empty(subject: Subject, seed: int) -> None:
    if not subject.is_masked:
        return
    inputs = subject.draw(seed, "empty").poisoned()
    value, gradient = subject.value(inputs), subject.gradient(inputs)
    of_tokens = {n: x for n, x in value.items() if subject.is_loss or "T" in axes_of_shape(x.shape)}
    subject.require_zero("an empty mask must give 0", of_tokens)
    subject.require_finite("an empty mask must give finite values", value)
    if subject.is_loss:
        subject.require_zero("an empty mask must give a gradient of 0", gradient)
    subject.require_finite("an empty mask must give finite gradients", gradient)
    if lead_of(subject.scope):
        inputs = subject.draw(seed, "one empty").poisoned()
        subject.require_finite("values must be finite beside an empty response", subject.value(inputs))
        subject.require_finite("gradients must be finite beside an empty response", subject.gradient(inputs))


def check_finite(subject: Subject, seed: int) -> None:
    for inputs, what in subject.draw(seed).extremes():
        subject.require_finite(f"values must be finite for {what}", subject.value(inputs, np.float32))
        subject.require_finite(f"gradients must be finite for {what}", subject.gradient(inputs, np.float32))
    inputs = subject.draw(seed).equal()
    subject.require_finite("values must be finite for equal rewards", subject.value(inputs, np.float32))


def check_derivative(subject: Subject, seed: int) -> None:
    """The gradient of a loss in its live arrays is its derivative, by central differences."""
    if not subject.is_loss:
        return
    inputs, differs = subject.draw(seed), None
    gradient = subject.gradient(inputs)
    floats, others = subject.split(inputs.cast(np.float64))
    for name in floats:
        derivative, smooth = _differences(subject, name, floats, others)
        wrong = smooth & ~np.isclose(gradient[name], derivative, rtol=1e-5, atol=1e-6)
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            differs = f"in {name}{list(at)} is {gradient[name][at]:.6g}, the derivative {derivative[at]:.6g}"
    if differs and not subject.fact("stop_gradient"):
        subject.fail(
            f"the gradient {differs}; if parts are held constant, declare @scope(..., stop_gradient=True)"
        )
    if subject.fact("stop_gradient") and not differs:
        subject.fail(
            "declares stop_gradient, but its gradient is its derivative: is jax.lax.stop_gradient missing?"
        )


def _differences(
    subject: Subject, name: str, floats: Arrays, others: Arrays
) -> tuple[np.ndarray, np.ndarray]:
    """Returns central differences, and where the function has no kink within the step."""
    x, h = floats[name], 1e-6
    moves = h * np.eye(x.size).reshape(x.size, *x.shape)
    up, down, here = (subject.totals(name, x + m, floats, others) for m in (moves, -moves, 0 * moves))
    forward, backward = (up - here) / h, (here - down) / h
    smooth = np.abs(forward - backward) <= 1e-3 * (1 + np.abs(forward))
    return ((up - down) / (2 * h)).reshape(x.shape), smooth.reshape(x.shape)


def check_constant(subject: Subject, seed: int) -> None:
    if subject.stage == "select":
        claim = "what it selects is constant (jax.lax.stop_gradient), so gradients must be 0"
        subject.require_zero(claim, subject.gradient(subject.draw(seed)))


def check_order(subject: Subject, seed: int) -> None:
    if subject.fact("ordered"):
        return
    rng = np.random.default_rng(seed)
    for inputs in (subject.draw(seed), subject.draw(seed).binary()):
        for axis in lead_of(subject.scope):
            order = rng.permutation(SIZES[axis])
            moved = {n: _take(x, axis, order) for n, x in subject.value(inputs).items()}
            claim = f"the order along {axis} must not matter (if it must, declare @scope(..., ordered=True))"
            subject.require_same(claim, subject.value(inputs.permuted(axis, order)), moved)


def _take(x: np.ndarray, axis: str, order: np.ndarray) -> np.ndarray:
    where = axes_of_shape(x.shape).find(axis)
    return x if where < 0 else np.take(x, order, axis=where)


def check_single(subject: Subject, seed: int) -> None:
    if not lead_of(subject.scope):
        return
    inputs = subject.draw(seed, G=1)
    subject.require_finite("a group of one must give finite values", subject.value(inputs))
    if subject.is_loss:
        subject.require_finite("a group of one must give finite gradients", subject.gradient(inputs))


def check_vmap(subject: Subject, seed: int) -> None:
    each = [subject.draw(seed + i) for i in range(3)]
    batched = subject.batched_value(each)
    for i, inputs in enumerate(each):
        one = {n: x[i] for n, x in batched.items()}
        subject.require_same("jax.vmap must give the same as a loop", one, subject.value(inputs))


def check_mask_types(subject: Subject, seed: int) -> None:
    inputs = subject.draw(seed, "holes")
    for dtype in (np.int32, np.float64):
        claim = f"a mask of {np.dtype(dtype)} must do as well as one of bool"
        try:
            found = subject.value(inputs.with_masks(dtype))
        except TypeError as error:
            subject.fail(f"{claim}, but: {error}", error)
        subject.require_same(claim, found, subject.value(inputs))


def check_advantage_of_response(subject: Subject, seed: int) -> None:
    """A loss takes advantages of responses and of tokens."""
    if not subject.is_loss or "advantages" not in subject.names:
        return
    inputs = subject.draw(seed)
    of_tokens = np.broadcast_to(inputs.arrays["advantages"][..., :1], inputs.arrays["advantages"].shape)
    of_responses = of_tokens[..., 0]
    claim = "one advantage for a response must do as the same advantage at each of its tokens"
    try:
        found = subject.value(inputs.replace(advantages=of_responses))
    except (TypeError, ValueError, IndexError) as error:
        subject.fail(f"{claim}, but: {error}", error)
    subject.require_same(claim, found, subject.value(inputs.replace(advantages=of_tokens)))


def check_zero_at_zero_advantage(subject: Subject, seed: int) -> None:
    if not subject.fact("zero_at_zero_advantage"):
        return
    inputs = subject.draw(seed)
    inputs = inputs.replace(advantages=np.zeros_like(inputs.arrays["advantages"]))
    claim = "declares zero_at_zero_advantage, so advantages of 0 must give a {} of 0"
    subject.require_zero(claim.format("loss"), subject.value(inputs))
    subject.require_zero(claim.format("gradient"), subject.gradient(inputs))


def check_linear(subject: Subject, seed: int) -> None:
    if not subject.fact("linear"):
        return
    inputs = subject.draw(seed)
    x, y = (subject.draw(s).arrays["token_loss"] for s in (seed, seed + 1))
    value = lambda token_loss: subject.value(inputs.replace(token_loss=token_loss))
    combined = {n: 2 * v - 3 * value(y)[n] for n, v in value(x).items()}
    subject.require_same(
        "declares linear, so f(2x - 3y) must be 2f(x) - 3f(y)", value(2 * x - 3 * y), combined
    )


def check_counts_empty(subject: Subject, seed: int) -> None:
    if not subject.fact("linear") or "mask" not in subject.names:
        return
    inputs = subject.draw(seed)
    mask = inputs.arrays["mask"].copy()
    mask[-1] = False
    among = inputs.replace(mask=mask)
    without = among.replace(**{n: a[:-1] for n, a in among.arrays.items()})
    pairs = zip(subject.value(among).values(), subject.value(without).values())
    changed = any(not np.allclose(a, b) for a, b in pairs)
    if changed and not subject.fact("counts_empty"):
        subject.fail("responses without tokens change the aggregate; declare @scope(..., counts_empty=True)")
    if subject.fact("counts_empty") and not changed:
        subject.fail("declares counts_empty, but responses without tokens do not change the aggregate")


CHECKS = (
    check_jit,
    check_shape,
    check_precision,
    check_padding,
    check_outside,
    check_empty,
    check_finite,
    check_derivative,
    check_constant,
    check_order,
    check_single,
    check_vmap,
    check_mask_types,
    check_advantage_of_response,
    check_zero_at_zero_advantage,
    check_linear,
    check_counts_empty,
)
