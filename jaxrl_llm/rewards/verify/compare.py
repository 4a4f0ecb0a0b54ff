"""Decides whether two forms are the same answer."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace
from fractions import Fraction

from jaxrl_llm.rewards.verify import expression
from jaxrl_llm.rewards.verify.equality import is_same, ratio, value_at
from jaxrl_llm.rewards.verify.expression import Unreadable, lift
from jaxrl_llm.rewards.verify.quantity import Quantity
from jaxrl_llm.rewards.verify.structure import (
    Form,
    Interval,
    Matrix,
    Named,
    Relation,
    Sequence,
    Text,
    Union,
)

MIN_DIGITS = 6  # significant digits from which a decimal stands for a number with an endless expansion


def is_equal(a: Form, b: Form) -> bool:
    """True if `a` and `b` are the same answer; symmetric."""
    match a, b:
        case Named(), Named() if a.name == b.name:
            return is_equal(a.form, b.form)
        case (Named() | Relation(), Named() | Relation()):
            return _same_relation(a, b)
        case (Named(), _):
            return is_equal(a.form, b)
        case (_, Named()):
            return is_equal(a, b.form)
        case Quantity(), Quantity():
            return _same_quantity(a, b)
        case Text(), Text():
            return _folded(a) == _folded(b)
        case Interval(), Interval():
            return _same_interval(a, b)
        case Union(), Union():
            return _match(a.parts, b.parts)
        case Sequence(), Sequence():
            return _same_sequence(a, b)
        case Matrix(), Matrix():
            return len(a.rows) == len(b.rows) and all(map(_in_order, a.rows, b.rows))
    return _same_across_kinds(a, b) or _same_across_kinds(b, a)


def _same_across_kinds(a: Form, b: Form) -> bool:
    """Notations that one text may share with another kind: (0, 1) is a pair or an open interval."""
    match a, b:
        case Interval(), Sequence(kind="tuple" | "list", items=(low, high)):
            pair = Sequence("tuple", (Quantity(a.low), Quantity(a.high)))
            if b.kind == "tuple":
                return not a.has_low and not a.has_high and is_equal(pair, b)
            return a.has_low == a.has_high and is_equal(pair, Sequence("tuple", (low, high)))
        case Union(), Sequence(kind="list"):
            return _match(a.parts, b.items)
        case Sequence(kind="set", items=(item,)), _:
            return is_equal(item, b)
        case Text(), Quantity():
            return (symbol := _symbol(a.words)) is not None and _same_quantity(Quantity(symbol), b)
    return False


def _same_quantity(a: Quantity, b: Quantity) -> bool:
    """Units count only where both are given. Percent signs and degrees are also factors: 28% equals
    28 percent, 0.28 and (its unit left out) 28."""
    if a.unit and b.unit and a.unit != b.unit:
        return False
    if _same_value(a, b):
        return True
    return a.unit != b.unit and _same_value(_without_unit(a), _without_unit(b))


def _without_unit(a: Quantity) -> Quantity:
    if a.unit == "%":
        value = a.value / 100 if isinstance(a.value, Fraction) else lift(a.value) / 100
        return replace(a, value=value, ulp=a.ulp and a.ulp / 100)
    if a.unit == "°":
        return Quantity(lift(a.value) * expression.read("pi/180"))
    return a


def _same_value(a: Quantity, b: Quantity) -> bool:
    return is_same(a.value, b.value) or _expands(a, b) or _expands(b, a)


def _expands(decimal: Quantity, exact: Quantity) -> bool:
    """True if `decimal` is the endless expansion of `exact`, rounded or cut after at least 6 digits."""
    if decimal.ulp is None or exact.ulp is not None or decimal.digits < MIN_DIGITS:
        return False
    target = exact.value
    if isinstance(target, Fraction):
        if _terminates(target):
            return False
    else:
        value = value_at(target, {}) if not target.free_symbols else None
        if value is None or not value.is_real:
            return False
        target = Fraction(str(value))
    missing = abs(target) - abs(decimal.value)
    same_sign = (target < 0) == (decimal.value < 0)
    return same_sign and (0 <= missing < decimal.ulp or abs(missing) <= decimal.ulp / 2)


def _terminates(x: Fraction) -> bool:
    denominator = x.denominator
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    return denominator == 1


def _same_interval(a: Interval, b: Interval) -> bool:
    ends = is_same(a.low, b.low) and is_same(a.high, b.high)
    return ends and a.has_low == b.has_low and a.has_high == b.has_high


def _same_sequence(a: Sequence, b: Sequence) -> bool:
    """Tuples have order, sets and bare lists have none; a bare list may be written for either."""
    kinds = {a.kind, b.kind}
    if kinds == {"set", "tuple"}:
        return False
    if "tuple" in kinds:
        return _in_order(a.items, b.items)
    if "set" in kinds:
        return _match(_distinct(a.items), _distinct(b.items))
    return _match(a.items, b.items)


def _distinct(items: Items[Form]) -> list[Form]:
    distinct: list[Form] = []
    for item in items:
        if not any(is_equal(item, other) for other in distinct):
            distinct.append(item)
    return distinct


def _in_order(a: Items[Form], b: Items[Form]) -> bool:
    return len(a) == len(b) and all(is_equal(x, y) for x, y in zip(a, b))


def _match(a: Items[Form], b: Items[Form]) -> bool:
    """True if the elements pair off in some order."""
    rest = list(b)
    for item in a:
        found = next((i for i, other in enumerate(rest) if is_equal(item, other)), None)
        if found is None:
            return False
        del rest[found]
    return not rest


def _same_relation(a: Named | Relation, b: Named | Relation) -> bool:
    """Equations are equal up to a factor other than 0, inequalities up to a positive one."""
    a, b = _as_relation(a), _as_relation(b)
    if a is None or b is None or a.sign != b.sign:
        return False
    factor = ratio(a.value, b.value)
    return factor is not None and (a.sign == "=" or bool(factor > 0))


def _as_relation(form: Named | Relation) -> Relation | None:
    if isinstance(form, Relation):
        return form
    name, value = _symbol(form.name), form.form
    value = _symbol(value.words) if isinstance(value, Text) else getattr(value, "value", None)
    return None if name is None or value is None else Relation(lift(name) - lift(value), "=")


def _symbol(name: str):
    try:
        return expression.read(name)
    except Unreadable:
        return None


def _folded(text: Text) -> str:
    return " ".join(text.words.casefold().replace("-", " ").rstrip(".").split())
