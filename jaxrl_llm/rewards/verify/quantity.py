"""Reads a number with what stands around it: a currency, a unit, a percent sign, a scale word."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from jaxrl_llm.rewards.verify import expression
from jaxrl_llm.rewards.verify.expression import KNOWN_WORDS, Number, Unreadable


@dataclass(frozen=True)
class Quantity:
    """A number or expression. A decimal literal knows the weight of its last digit and how many it has."""

    value: Number
    unit: str | None = None
    ulp: Fraction | None = None  # None: not a decimal literal
    digits: int = 0  # significant ones


_CURRENCY = re.compile(r"([-+]?) *(\$|€|£|¥) *([-+]?)(?=[\d.\\(])")
_CURRENCIES = {"$": "dollar", "€": "euro", "£": "pound", "¥": "yen"}
_LITERAL = re.compile(r"[-+]? ?(?:\d+\.?(?P<decimals>\d*)|\.(?P<only>\d+))(?P<exponent>[eE][+-]?\d+)?")
_MIXED = re.compile(r"([-+]?) ?(\d+)(?: | ?and )(\d+)/(\d+)")
_UNIT = re.compile(r"(?P<body>.*[\d)}])(?P<gap> ?)(?P<unit>[A-Za-z%°][A-Za-z%°./ -]*?(?: ?\^?\{?[23]\}?)?)")
_SCALES = {
    "dozen": 12,
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_SHORT_UNIT = re.compile(
    r"(?:%|°[cf]?|[cfghjklmnsvwa]|[cmk]?m|[mk]?g|[cdm]l|ft|in|yd|mi|lbs?|oz|hrs?|min|sec|ms|mph|[ap]m|k?hz|k?pa"
    r"|[km]?wh?|[kmgt]b)(?:/(?:s|h|hr|min|m|g|kg|l))?(?:\^?\{?[23]\}?)?\.?"
)
_NOT_A_UNIT = re.compile(
    "and|or|nor|not|plus|minus|times|over|divided|factorial|squared|cubed|half|root|power|base|choose|modulo?|mod"
    "|is|are|was|were|has|have|had|equals?|if|then|else|but|than|because|wrong|"
    + "|".join(KNOWN_WORDS - {"sec"})
)
_SPELLINGS = {
    "%": ("percent", "percentage"),
    "°": ("degree", "°c"),
    "dollar": ("usd",),
    "m": ("meter", "metre"),
    "cm": ("centimeter", "centimetre"),
    "km": ("kilometer", "kilometre"),
    "in": ("inch", "inche"),
    "ft": ("foot", "feet"),
    "yd": ("yard",),
    "mi": ("mile",),
    "g": ("gram",),
    "kg": ("kilogram",),
    "lb": ("pound",),
    "oz": ("ounce",),
    "l": ("liter", "litre"),
    "s": ("second", "sec"),
    "min": ("minute",),
    "hr": ("hour", "h"),
}
_SAME_UNITS = {spelling: unit for unit, spellings in _SPELLINGS.items() for spelling in spellings}


def read(text: str) -> Quantity:
    """Returns the quantity that `text` is.

    Raises:
      Unreadable: if any part of it isn't understood.
    """
    match = _CURRENCY.match(text)
    if not match:
        return _with_unit(text)
    amount = _with_unit(match.group(1) + match.group(3) + text[match.end() :])
    named = amount.unit in (None, _CURRENCIES[match.group(2)], "usd")
    unit = _CURRENCIES[match.group(2)] if named else f"{_CURRENCIES[match.group(2)]} {amount.unit}"
    return Quantity(amount.value, unit, amount.ulp, amount.digits)


def _with_unit(text: str) -> Quantity:
    """A number, then a unit: `%`, a known short one (`5cm`, `5 m`), or up to three words (`5 red apples`)."""
    if plain := literal(text):
        return plain
    match = _UNIT.fullmatch(text)
    words = match.group("unit").lower().replace(" ^", "^").split() if match else []
    of_angle = match and "°" in words[0] and re.search("sin|cos|tan|cot|sec|csc", text)
    if not match or of_angle or not _is_unit(words, attached=not match.group("gap")):
        return Quantity(expression.read(text))
    body = literal(match.group("body")) or Quantity(expression.read(match.group("body")))
    value, ulp = body.value, body.ulp
    while words and words[0] in _SCALES:
        scale = Fraction(_SCALES[words.pop(0)])
        if not isinstance(value, Fraction):
            raise Unreadable("a scale word after an irrational number")
        value, ulp = value * scale, ulp and ulp * scale
    unit = " ".join(_singular(word) for word in words) or None
    return Quantity(value, unit, ulp, body.digits)


def _is_unit(words: list[str], attached: bool) -> bool:
    if attached and not words[0].startswith(("%", "°")):  # 5x is algebra, 5cm a length
        return len(words) == 1 and len(words[0]) > 1 and bool(_SHORT_UNIT.fullmatch(words[0]))
    spelled = [word for word in words if not _SHORT_UNIT.fullmatch(word)]
    return len(words) <= 3 and all(len(w) >= 3 and not _NOT_A_UNIT.fullmatch(w) for w in spelled)


def _singular(word: str) -> str:
    word = re.sub(r"[{}^.]", "", word)
    word = word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
    return _SAME_UNITS.get(word, word)


def literal(text: str) -> Quantity | None:
    """A decimal literal or a mixed number."""
    if mixed := _MIXED.fullmatch(text):
        sign, whole, numerator, denominator = mixed.groups()
        value = int(whole) + expression.read(f"{numerator}/{denominator}")
        return Quantity(-value if sign == "-" else value)
    match = _LITERAL.fullmatch(text)
    if not match:
        return None
    value = expression.decimal(text.replace(" ", ""))
    decimals = match.group("decimals") or match.group("only")
    if not decimals:
        return Quantity(value)
    exponent = int((match.group("exponent") or "e0")[1:])
    significand = re.sub(r"\D", "", text[: match.start("exponent")] if match.group("exponent") else text)
    ulp = Fraction(10) ** (exponent - len(decimals))
    return Quantity(value, None, ulp, len(significand.lstrip("0")))
