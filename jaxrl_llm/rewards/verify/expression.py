r"""Reads arithmetic and algebra, in LaTeX or plain notation, whole or not at all.

What is rational stays a `Fraction`, computed exactly; the rest becomes a SymPy expression. Nothing is cut
off: a text with one token too many is unreadable. Numbers that would take for ever to write down (towers of
powers, factorials of millions) are refused before they are computed.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import sympy

Number: TypeAlias = "Fraction | sympy.Expr"

MAX_BITS = 2_000_000  # of an exact power
MAX_FACTORIAL = 20_000
MAX_CHOSEN = 100  # in a binomial of variables
MAX_LENGTH = 2_000  # characters of one expression


class Unreadable(ValueError):
    """The text isn't an expression that the parser understands to its last character."""


class TooLarge(ArithmeticError):
    """The value is a number that nobody can write down; no other reader should try."""


_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<command>\\[A-Za-z]+)|(?P<word>[A-Za-z]+)|(?P<symbol>[-+*/^_!(){}\[\]|°]))"
)
_FUNCTIONS = {
    **{name: name for name in ("sin", "cos", "tan", "cot", "sec", "csc", "exp", "log")},
    **{name: name for name in ("sinh", "cosh", "tanh")},
    **{"arc" + name: "a" + name for name in ("sin", "cos", "tan")},
    "ln": "log",
    "abs": "Abs",
}
_CONSTANTS = {"pi": "pi", "infty": "oo", "e": "E", "i": "I"}
_GREEK = re.compile(
    r"(?:var)?(?:[aA]lpha|[bB]eta|[gG]amma|[dD]elta|epsilon|zeta|eta|[tT]heta|iota|kappa|[lL]ambda|mu|nu|xi|rho"
    r"|[sS]igma|tau|[pP]hi|chi|[pP]si|[oO]mega)|ell"
)
KNOWN_WORDS = frozenset(_FUNCTIONS) | {"sqrt", "pi"}


def read(text: str) -> Number:
    """Returns the value of an expression.

    Raises:
      Unreadable: if any part of `text` isn't understood.
      TooLarge: if the value is too large to compute.
    """
    if len(text) > MAX_LENGTH:
        raise Unreadable(f"{len(text)} characters, over the limit of {MAX_LENGTH}")
    try:
        return _Parser(_tokens(text)).whole()
    except (ZeroDivisionError, RecursionError) as error:
        raise Unreadable(str(error)) from error


def decimal(literal: str) -> Fraction:
    """Returns the exact value of a decimal literal such as `1.5e3`."""
    exponent = re.search(r"[eE]([+-]?\d+)$", literal)
    if exponent and len(exponent.group(1)) > 5:
        raise TooLarge(f"the exponent of {literal} is too large")
    return Fraction(literal.rstrip("."))


def lift(x: Number) -> sympy.Expr:
    """Returns `x` as a SymPy expression."""
    import sympy

    return sympy.Rational(x.numerator, x.denominator) if isinstance(x, Fraction) else x


def _tokens(text: str) -> list[str]:
    tokens, at, text = [], 0, text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if not match:
            raise Unreadable(f"unexpected {text[at:][:10]!r}")
        kind, token = match.lastgroup, match.group(match.lastgroup)
        if kind == "word" and token not in KNOWN_WORDS:
            tokens += _letters(token)
        elif kind == "word":
            tokens.append("\\" + token)
        else:
            tokens.append(token)
        at = match.end()
    return tokens


def _letters(word: str) -> list[str]:
    """Splits a run of letters into variables: `xy` is x times y, but a word isn't algebra."""
    if len(word) > 3:
        raise Unreadable(f"{word!r} is a word")
    return list(word)


class _Parser:
    """Recursive descent. Implicit products bind like explicit ones; `a/bc` is (a/b)c."""

    def __init__(self, tokens: list[str]):
        self.tokens = tokens
        self.at = 0
        self.in_bars = False

    @property
    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        token = self.next
        if not token:
            raise Unreadable("the expression ends too early")
        self.at += 1
        return token

    def expect(self, token: str) -> None:
        if (got := self.take()) != token:
            raise Unreadable(f"expected {token!r}, got {got!r}")

    def whole(self) -> Number:
        value = self.sum()
        if self.next:
            raise Unreadable(f"unexpected {self.next!r}")
        return value

    def sum(self) -> Number:
        value = self.product()
        while self.next in ("+", "-"):
            sign = self.take()
            term = self.product()
            value = _add(value, term if sign == "+" else _multiply(Fraction(-1), term))
        return value

    def product(self) -> Number:
        if self.next in ("+", "-"):
            sign = self.take()
            if self.next in ("+", "-"):
                raise Unreadable("two signs in a row")
            value = self.product()
            return value if sign == "+" else _multiply(Fraction(-1), value)
        integer = self.next.isdigit()
        value = self.power()
        if integer and self.next == "\\frac":  # 1\frac{1}{2} is a mixed number
            part = self.power()
            mixed = isinstance(value, Fraction) and isinstance(part, Fraction) and 0 < part < 1
            value = _add(value, part) if mixed else _multiply(value, part)
        while True:
            if self.next in ("*", "/"):
                operator = self.take()
                negative = self.next == "-" and bool(self.take())
                factor = self.power()
                factor = _multiply(Fraction(-1), factor) if negative else factor
                value = _multiply(value, factor) if operator == "*" else _divide(value, factor)
            elif self.starts_factor():
                value = _multiply(value, self.power())
            else:
                return value

    def starts_factor(self) -> bool:
        """True where a factor follows with no sign between; a number never does (`2 3`, `x2`)."""
        if self.next == "|":
            return not self.in_bars
        return self.next in ("(", "{") or self.next[:1].isalpha() or self.next[:1] == "\\"

    def power(self) -> Number:
        value = self.base()
        while True:
            if self.next == "!":
                self.take()
                value = _factorial(value)
            elif self.next == "°":
                self.take()
                value = _multiply(value, _divide(_constant("pi"), Fraction(180)))
            elif self.next == "^":
                self.take()
                value = _power(value, self.exponent())
            else:
                return value

    def exponent(self) -> Number:
        if self.next == "-":
            self.take()
            return _multiply(Fraction(-1), self.power())
        if self.next == "{":
            return self.base()
        return self.power() if self.next == "(" else self.base()

    def group(self, opening: str = "{", closing: str = "}") -> Number:
        self.expect(opening)
        value = self.sum()
        self.expect(closing)
        return value

    def base(self) -> Number:
        token = self.take()
        if token[0].isdigit() or token[0] == ".":
            return decimal(token)
        if token in ("(", "{"):
            value = self.sum()
            self.expect(")" if token == "(" else "}")
            return value
        if token == "|" and not self.in_bars:
            self.in_bars = True
            value = self.sum()
            self.expect("|")
            self.in_bars = False
            return _apply("Abs", value)
        if token[0].isalpha():
            return _constant(token) if token in _CONSTANTS else self.variable(token)
        if token[0] == "\\":
            return self.command(token[1:])
        raise Unreadable(f"unexpected {token!r}")

    def variable(self, name: str) -> Number:
        import sympy

        if self.next == "_":
            self.take()
            subscript = self.take()
            while subscript.startswith("{") and not subscript.endswith("}"):
                subscript += self.take()
            name += "_" + subscript.strip("{}")
        return sympy.Symbol(name)

    def command(self, name: str) -> Number:
        if name == "frac":
            numerator = self.argument()
            return _divide(numerator, self.argument())
        if name in ("binom", "dbinom", "tbinom"):
            n = self.group()
            return _binomial(n, self.group())
        if name == "sqrt":
            degree = self.group("[", "]") if self.next == "[" else Fraction(2)
            return _root(self.argument(), degree)
        if name in ("lvert", "vert"):
            value = self.sum()
            self.expect("\\rvert" if name == "lvert" else "\\vert")
            return _apply("Abs", value)
        if name in _CONSTANTS:
            return _constant(name)
        if _GREEK.fullmatch(name):
            return self.variable(name)
        if name in _FUNCTIONS:
            return self.function(_FUNCTIONS[name])
        raise Unreadable(f"unknown command \\{name}")

    def argument(self) -> Number:
        """The argument of a root or a fraction: a group, or one letter or command; never a bare number."""
        if self.next in ("{", "("):
            return self.group(self.next, "}" if self.next == "{" else ")")
        if self.next[:1].isalpha() or self.next[:1] == "\\":
            return self.base()
        raise Unreadable("an argument is missing")

    def function(self, name: str) -> Number:
        base = degree = None
        if name == "log" and self.next == "_":
            self.take()
            base = self.base()
        if self.next == "^":
            self.take()
            degree = self.exponent()
        if self.next in ("(", "{"):
            value = self.group(self.next, "}" if self.next == "{" else ")")
        else:
            value = self.power()
            while self.starts_factor() and self.next.lstrip("\\") not in _FUNCTIONS:
                value = _multiply(value, self.power())
        if degree == -1:
            return _apply("a" + name, value)
        result = _apply(name, value)
        result = _divide(result, _apply("log", base)) if base is not None else result
        return result if degree is None else _power(result, degree)


def _both_rational(a: Number, b: Number) -> bool:
    return isinstance(a, Fraction) and isinstance(b, Fraction)


def _add(a: Number, b: Number) -> Number:
    return a + b if _both_rational(a, b) else lift(a) + lift(b)


def _multiply(a: Number, b: Number) -> Number:
    return a * b if _both_rational(a, b) else lift(a) * lift(b)


def _divide(a: Number, b: Number) -> Number:
    if b == 0:
        raise ZeroDivisionError("division by zero")
    return a / b if _both_rational(a, b) else lift(a) / lift(b)


def _power(a: Number, b: Number) -> Number:
    if isinstance(a, Fraction):
        bits = max(a.numerator.bit_length(), a.denominator.bit_length())
        if isinstance(b, Fraction) and a not in (0, 1, -1) and abs(b) * bits > MAX_BITS:
            raise TooLarge(f"a power of more than {MAX_BITS} bits")
        if isinstance(b, Fraction) and b.denominator == 1:
            return a ** int(b)
    elif isinstance(b, Fraction) and abs(b) > MAX_BITS:
        raise TooLarge("the exponent is too large")
    return lift(a) ** lift(b)


def _root(a: Number, degree: Number) -> Number:
    if degree == 2 and isinstance(a, Fraction) and a >= 0:
        exact = Fraction(math.isqrt(a.numerator), math.isqrt(a.denominator))
        if exact * exact == a:
            return exact
    if isinstance(a, Fraction) and isinstance(degree, Fraction) and a < 0 and degree % 2 == 1:
        return _multiply(Fraction(-1), _root(-a, degree))  # the real root
    return _rational_if_exact(_power(a, _divide(Fraction(1), degree)))


def _factorial(a: Number) -> Number:
    if not isinstance(a, Fraction):
        return _apply("factorial", a)
    if a.denominator != 1 or not 0 <= a <= MAX_FACTORIAL:
        raise TooLarge(f"factorials are computed from 0 to {MAX_FACTORIAL}")
    return Fraction(math.factorial(int(a)))


def _binomial(n: Number, k: Number) -> Number:
    if not _both_rational(n, k):
        if isinstance(k, Fraction) and k > MAX_CHOSEN:
            raise TooLarge(f"binomials of variables are computed for k <= {MAX_CHOSEN}")
        return _apply("binomial", n, k)
    if n.denominator != 1 or k.denominator != 1 or not 0 <= k <= n <= MAX_FACTORIAL:
        raise TooLarge(f"binomials are computed for 0 <= k <= n <= {MAX_FACTORIAL}")
    return Fraction(math.comb(int(n), int(k)))


def _apply(name: str, *args: Number) -> Number:
    import sympy

    if name == "Abs" and isinstance(args[0], Fraction):
        return abs(args[0])
    if not hasattr(sympy, name):
        raise Unreadable(f"unknown function {name}")
    return _rational_if_exact(getattr(sympy, name)(*map(lift, args)))


def _rational_if_exact(value: Number) -> Number:
    if not isinstance(value, Fraction) and value.is_Rational:
        return Fraction(int(value.p), int(value.q))
    return value


def _constant(name: str) -> Number:
    import sympy

    return getattr(sympy, _CONSTANTS[name])
