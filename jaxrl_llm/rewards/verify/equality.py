"""Decides whether two numbers, or two functions of variables, are the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING

from jaxrl_llm.rewards.verify.expression import Number, lift

if TYPE_CHECKING:
    import sympy

_DIGITS = 40  # to which numbers are evaluated
_POINTS = 8  # at which expressions with variables are compared


def is_same(a: Number, b: Number) -> bool:
    """True if `a` and `b` are the same number, or the same function of their variables.

    Rationals are compared exactly. Irrational numbers agree to 25 significant digits, which is relative to
    their size: 1/2004! isn't 1/2006!. Functions agree at every one of several fixed random points where both
    are real, negative ones among them.
    """
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    a, b = lift(a), lift(b)
    return a == b or _agree(_close, a, b)


def ratio(a: Number, b: Number) -> sympy.Expr | None:
    """Returns the constant c other than 0 with a = c b, None if there is none (or nothing varies)."""
    a, b = lift(a), lift(b)
    if a.free_symbols != b.free_symbols or not a.free_symbols:
        return None
    ratios: list[sympy.Expr] = []

    def keeps_ratio(x, y) -> bool:
        if x == 0 or y == 0:
            return x == y
        ratios.append(x / y)
        return _close(ratios[0], ratios[-1])

    return ratios[0] if _agree(keeps_ratio, a, b) and ratios else None


def value_at(expression: sympy.Expr, point: dict) -> sympy.Expr | None:
    """Returns the number that `expression` is at `point`, None where it has none."""
    value = expression.evalf(_DIGITS, subs=point)
    known = all(part.is_Number and part.is_finite for part in value.as_real_imag())
    return value if known else None


def _close(x: sympy.Expr, y: sympy.Expr) -> bool:
    return x == y or bool(abs(x - y) <= max(abs(x), abs(y)) * 10.0**-25)


def _agree(test: Callable[[sympy.Expr, sympy.Expr], bool], a: sympy.Expr, b: sympy.Expr) -> bool:
    """True if `test` holds for the values of a and b at every drawn point where both are real.

    Where there is no such point, those count at which both are finite.
    """
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    draw = random.Random(0)
    real, other = [], []
    for i in range(_POINTS if symbols else 1):
        signs = (1, 1) if i % 2 else (1, -1)  # every other point has all variables positive
        point = {s: lift(draw.choice(signs) * Fraction(draw.randint(1, 4000), 997)) for s in symbols}
        x, y = value_at(a, point), value_at(b, point)
        if x is not None and y is not None:
            (real if x.is_real and y.is_real else other).append((x, y))
    pairs = real or other
    return bool(pairs) and all(test(x, y) for x, y in pairs)
