# ruff: noqa: RUF001 (answers are written with these characters)
"""Reads a cleaned answer into its form: a quantity, an interval, a set, a tuple, an equation, ..."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, TypeAlias

from jaxrl_llm.rewards.verify import expression, quantity
from jaxrl_llm.rewards.verify.expression import KNOWN_WORDS, Number, Unreadable
from jaxrl_llm.rewards.verify.quantity import Quantity

if TYPE_CHECKING:
    import sympy


@dataclass(frozen=True)
class Text:
    words: str


@dataclass(frozen=True)
class Interval:
    low: Number
    high: Number
    has_low: bool
    has_high: bool


@dataclass(frozen=True)
class Union:
    parts: tuple[Form, ...]


@dataclass(frozen=True)
class Sequence:
    kind: str  # "tuple" (ordered), "set" (no order, no repeats) or "list" (bare: commas, "and", "or")
    items: tuple[Form, ...]


@dataclass(frozen=True)
class Matrix:
    rows: tuple[tuple[Form, ...], ...]


@dataclass(frozen=True)
class Named:
    """`x = form`, `x in form`, or an inequality solved for x."""

    name: str
    form: Form


@dataclass(frozen=True)
class Relation:
    """`value = 0`, `value < 0` or `value <= 0`."""

    value: Number
    sign: str  # "=", "<" or "≤"


Form: TypeAlias = Quantity | Text | Interval | Union | Sequence | Matrix | Named | Relation


def read(text: str) -> Form:
    """Returns the form of a cleaned answer.

    Raises:
      Unreadable: if it has none; in particular if any part of it isn't understood.
    """
    text = _unwrap(_join_thousands(text.strip()))
    if not text:
        raise Unreadable("nothing left")
    for reader in _READERS:
        if (form := reader(text)) is not None:
            return form
    raise Unreadable(f"{text!r} has no known form")


# Pieces of text.

_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d|,\d)")


def has_thousands(text: str) -> bool:
    """True if `text` has a comma that may separate thousands or elements."""
    return bool(_THOUSANDS.search(text))


def _join_thousands(text: str) -> str:
    """Drops thousands separators; inside brackets commas separate elements."""

    def join(match: re.Match) -> str:
        before = text[: match.start()]
        inside = sum(map(before.count, "([{")) > sum(map(before.count, ")]}"))
        return match.group() if inside else match.group().replace(",", "")

    return _THOUSANDS.sub(join, text)


def split(text: str, separator: str) -> list[str]:
    """Splits at matches of the pattern `separator` that no bracket encloses.

    Raises:
      Unreadable: if the brackets don't balance.
    """
    pattern = re.compile(separator)
    pieces, depth, start, at = [], 0, 0, 0
    while at < len(text):
        if text[at] in "([{":
            depth += 1
        elif text[at] in ")]}":
            depth -= 1
        elif depth == 0 and (match := pattern.match(text, at)) and match.end() > at:
            pieces.append(text[start:at].strip())
            start = at = match.end()
            continue
        if depth < 0:
            break
        at += 1
    if depth:
        raise Unreadable("brackets don't balance")
    return [*pieces, text[start:].strip()]


def _unwrap(text: str) -> str:
    """Drops braces that enclose everything and separate nothing."""
    while text.startswith("{") and text.endswith("}") and "," not in text and _encloses(text):
        text = text[1:-1].strip()
    return text


def _encloses(text: str) -> bool:
    """True if the first bracket closes at the last character."""
    depth = 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if depth == 0:
            return i == len(text) - 1
    return False


# Readers, in the order in which they are tried: each returns a form, or None if the text isn't of its kind.

_MATRIX = re.compile(r"\\begin\{(?:[pbB]?matrix|array)\}(?:\{[clr|]*\})?(.*)\\end\{(?:[pbB]?matrix|array)\}")
_REALS = {r"\mathbb{R}", r"\mathbb R", r"\R", "ℝ", "all real numbers", "all reals"}
_BUILDER = re.compile(r"\\\{ *(\w) *(?:∈ *\\mathbb *\{?R\}? *)?(?:\||:|\\mid) *(.*?) *\\?\}")
_VARIABLE = re.compile(r"(?:[A-Za-z]|\\[a-z]+)(?:_(?:\w|\{\w+\}))?'*(?:\([A-Za-z](?:, *[A-Za-z])*\))?")
_LABEL = re.compile(
    "(?!(?:" + "|".join(KNOWN_WORDS) + r")\b)[A-Za-z]{3,}(?: [A-Za-z]+)*|m?\\(?:angle|triangle).*"
)
_TUPLE_OF_VARIABLES = re.compile(r"\( *[A-Za-z](?:_\w)?(?: *, *[A-Za-z](?:_\w)?)+ *\)")


def _matrix(text: str) -> Form | None:
    if not (match := _MATRIX.fullmatch(text)):
        return None
    rows = [row for row in re.split(r"\\\\", match.group(1).replace("\\hline", "")) if row.strip(" \\")]
    cells = tuple(tuple(read(cell) for cell in row.split("&")) for row in rows)
    if len({len(row) for row in cells}) != 1:
        raise Unreadable("rows of different lengths")
    return Matrix(cells)


def _special_set(text: str) -> Form | None:
    if text in ("∅", r"\{\}", r"\{ \}"):
        return Sequence("set", ())
    if text in _REALS:
        return Interval(-_infinity(), _infinity(), False, False)
    match = _BUILDER.fullmatch(text)
    return read(match.group(2)) if match else None


def _alternatives(text: str) -> Form | None:
    """Inequalities joined by "or" or "and", then bare lists."""
    for word, joined in (("or", _union), ("and", _intersection)):
        parts = split(text, rf"(?:(?<=\W)|(?<=\d)){word}\b")
        if len(parts) > 1 and all(re.search("[<>≤≥≠]", part) for part in parts):
            forms = [read(part) for part in parts]
            if not all(isinstance(form, Named) for form in forms) or len({form.name for form in forms}) > 1:
                raise Unreadable("inequalities in several variables")
            return Named(forms[0].name, joined([form.form for form in forms]))
    parts = split(text, r"(?:,|;|(?:(?<=\W)|(?<=\d))(?:and|or)\b)\s*(?:(?:and|or)\b)?")
    if len(parts) == 1:
        return None
    if not all(parts):
        raise Unreadable("an element of the list is empty")
    return Sequence("list", _spread(parts))


def _spread(parts: list[str]) -> tuple[Form, ...]:
    """Reads elements; `±2` among them is two."""
    items = []
    for part in parts:
        form = read(part)
        items += form.items if isinstance(form, Sequence) and form.kind == "list" else [form]
    return tuple(items)


def _membership(text: str) -> Form | None:
    name, *rest = split(text, "∈")
    if len(rest) != 1:
        return None
    if not _VARIABLE.fullmatch(name):
        raise Unreadable(f"{name!r} isn't a variable")
    return Named(_spelling(name), read(rest[0]))


def _equation(text: str) -> Form | None:
    sides = split(text, "=")
    if len(sides) == 1 or re.search("[<>≤≥≠]", text):
        return None
    first, last = sides[0], sides[-1]
    if _LABEL.fullmatch(first) or _TUPLE_OF_VARIABLES.fullmatch(first):
        return read(last)
    if _VARIABLE.fullmatch(first):
        return Named(_spelling(first), read(last))
    if _VARIABLE.fullmatch(last) and len(sides) == 2:
        return Named(_spelling(last), read(first))
    values = [expression.read(side) for side in sides[:-1]]
    if all(isinstance(value, Fraction) for value in values) and not re.search("[a-z]", last):
        return read(last)  # 2 + 40 = 42: what stands last counts
    if len(sides) > 2:
        raise Unreadable("a chain of equations")
    return Relation(expression.lift(values[0]) - expression.lift(expression.read(last)), "=")


def _spelling(name: str) -> str:
    return re.sub(r"[\s{}]", "", name)


def _inequality(text: str) -> Form | None:
    if not re.search("[<>≤≥≠]", text):
        return None
    signs = re.findall("[<>≤≥≠]", text)
    sides = [expression.read(side) for side in split(text, "[<>≤≥≠]")]
    if len(sides) != len(signs) + 1 or len({"<≤".find(s) >= 0 for s in signs}) > 1:
        raise Unreadable("signs of the inequality point both ways")
    solved = [_solve(a, sign, b) for a, sign, b in zip(sides, signs, sides[1:])]
    if all(isinstance(form, Named) for form in solved) and len({form.name for form in solved}) == 1:
        return Named(solved[0].name, _intersection([form.form for form in solved]))
    if len(solved) > 1:
        raise Unreadable("a chain of inequalities in several variables")
    return solved[0]


def _solve(a: Number, sign: str, b: Number) -> Form:
    """`a sign b` as an interval of its one variable if it is linear, else as a relation."""
    a, b = expression.lift(a), expression.lift(b)
    if sign in "><≥≤" and (a.is_infinite or b.is_infinite):
        names = [str(symbol) for symbol in a.free_symbols | b.free_symbols]
        if len(names) != 1:
            raise Unreadable("an infinite bound of no single variable")
        return Named(names[0], Interval(-_infinity(), _infinity(), False, False))
    if sign in ">≥":
        a, b, sign = b, a, {">": "<", "≥": "≤"}[sign]
    difference = (a - b).expand()
    symbols = difference.free_symbols
    if len(symbols) != 1 or not (slope := difference.diff(*symbols)).is_number or not slope.is_real:
        if sign == "≠" or not symbols:
            raise Unreadable("an inequality without one variable to solve for")
        return Relation(difference, sign)
    (variable,) = symbols
    bound = _exact(-difference.subs(variable, 0) / slope)
    below = Interval(-_infinity(), bound, False, sign == "≤")
    above = Interval(bound, _infinity(), sign == "≤", False)
    solution = Union((below, above)) if sign == "≠" else below if slope > 0 else above
    return Named(str(variable), solution)


def _exact(value: sympy.Expr) -> Number:
    return Fraction(int(value.p), int(value.q)) if value.is_Rational else value


def _union(forms: list[Form]) -> Form:
    parts = [part for form in forms for part in (form.parts if isinstance(form, Union) else (form,))]
    return Union(tuple(parts))


def _intersection(forms: list[Form]) -> Form:
    if len(forms) == 1:
        return forms[0]
    if not all(isinstance(form, Interval) for form in forms):
        raise Unreadable("an intersection of unions")
    low = max((form.low for form in forms), key=expression.lift)
    high = min((form.high for form in forms), key=expression.lift)
    has_low = all(form.has_low for form in forms if form.low == low)
    has_high = all(form.has_high for form in forms if form.high == high)
    return Interval(low, high, has_low, has_high)


def _joined_sets(text: str) -> Form | None:
    parts = split(text, "∪")
    return _union([read(part) for part in parts]) if len(parts) > 1 else None


def _bracketed(text: str) -> Form | None:
    text = text.replace(r"\{", "{").replace(r"\}", "}")
    if text[0] not in "([{" or text[-1] not in ")]}" or not _encloses(text):
        return None
    ends, parts = text[0] + text[-1], split(text[1:-1], "[,;]")
    if ends == "{}":
        return Sequence("set", _spread(parts))
    if len(parts) == 1:
        letter = re.fullmatch(r"[A-Za-z]", parts[0])
        return Text(parts[0]) if letter else None  # (E) is a choice, (x+1) an expression
    if len(parts) == 2 and ends != "()":
        low, high = (_number(part) for part in parts)
        return Interval(low, high, ends[0] == "[", ends[1] == "]")
    if ends not in ("()", "[]"):
        raise Unreadable(f"brackets {ends} around {len(parts)} elements")
    return Sequence("tuple", tuple(read(part) for part in parts))


def _number(text: str) -> Number:
    form = read(text)
    if not isinstance(form, Quantity):
        raise Unreadable(f"{text!r} can't end an interval")
    return form.value


def _two_values(text: str) -> Form | None:
    if text.count("±") != 1:
        return None
    return Sequence("list", tuple(read(re.sub(r"^\+ *", "", text.replace("±", sign))) for sign in "+-"))


def _quantity(text: str) -> Form | None:
    try:
        return quantity.read(text)
    except Unreadable:
        return None


def _word(text: str) -> Form | None:
    """A lone letter is a choice or a variable, a lone word isn't algebra; `(B) 5` is choice B."""
    if choice := re.fullmatch(r"\(([A-H])\) [^()]+", text):
        return Text(choice.group(1))
    return Text(text.rstrip(")")) if re.fullmatch(r"[A-Za-z]\)?|[A-Za-z]+", text) else None


_WORDS = re.compile(r"[^\W\d_][\w '’.:/-]*|\d+(?::\d+)+(?: ?[ap]\.?m\.?)?", re.IGNORECASE)
_MAX_WORDS = 6


def _text(text: str) -> Form | None:
    text = text.strip("\"'“”` ")
    if not _WORDS.fullmatch(text) or len(text.split()) > _MAX_WORDS:
        return None
    return Text(text)


def _infinity() -> Number:
    import sympy

    return sympy.oo


_READERS = (
    _word,
    quantity.literal,
    _matrix,
    _special_set,
    _alternatives,
    _membership,
    _equation,
    _inequality,
    _joined_sets,
    _bracketed,
    _two_values,
    _quantity,
    _text,
)
