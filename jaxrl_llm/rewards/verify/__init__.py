r"""Verifies mathematical answers: exactly where they can be read, never by cutting them to a number.

    math_equal(r"so it is \boxed{\frac{1}{2}}", "0.5")  # True

The steps: `extract` finds the final answer in the text; `structure` reads it into a form (interval, set,
tuple, equation, matrix, ...) made of quantities (`quantity`); `expression` computes rationals exactly and the
rest through SymPy; `compare` decides. What they can't read is left to `math-verify`.

Nothing here keeps time: alarms work on the main thread only, so the hard limit is the `Scorer`'s, which kills
the process.
"""

from __future__ import annotations

import enum
import functools
import itertools
import logging
import re

from jaxrl_llm.rewards.verify import structure
from jaxrl_llm.rewards.verify.compare import is_equal
from jaxrl_llm.rewards.verify.equality import is_same
from jaxrl_llm.rewards.verify.expression import TooLarge, Unreadable
from jaxrl_llm.rewards.verify.extract import clean, final_answer

__all__ = ["Verdict", "judge", "math_equal"]


_log = logging.getLogger(__name__)


class Verdict(enum.Enum):
    """What a verifier says of an answer. Only CORRECT gets credit."""

    CORRECT = "correct"
    WRONG = "wrong"
    UNPARSED = "unparsed"  # empty, or not understood whole


def math_equal(answer: str, gold: str) -> bool:
    r"""Returns True if `answer` states the value of `gold`.

    Either may be a bare answer or a whole text that states one (`\boxed{}`, `####`, "the answer is"; the last
    statement wins). The choices where notations are ambiguous:

    - a decimal equals a fraction or root with an endless expansion from 6 significant digits on, all of them
      right; otherwise numbers are equal exactly;
    - 28% equals 28 percent, 0.28 and 28; units and currencies count only where both sides have them;
    - `x = 5` equals 5, but not `y = 5`; equations are equal up to a factor;
    - tuples have order; sets, and bare lists "1, 2 and 3", have none; (0, 1) is also the open interval;
    - words are compared without case.

    Empty and unreadable answers are never equal to anything, except that a text equals itself.
    """
    return judge(answer, gold) is Verdict.CORRECT


def judge(answer: str, gold: str) -> Verdict:
    """Returns whether `answer` is correct, wrong, or couldn't be read. See `math_equal`."""
    stated, expected = final_answer(answer), final_answer(gold)
    if stated is None:
        return Verdict.UNPARSED
    if expected is None:
        return Verdict.WRONG
    plain, plain_gold = clean(stated), clean(expected)
    if not _says_something(plain):
        return Verdict.UNPARSED
    if _spelling(plain) == _spelling(plain_gold):
        return Verdict.CORRECT
    try:
        return _judge_forms(plain, plain_gold, stated, expected)
    except TooLarge:
        return Verdict.UNPARSED
    except Exception:  # SymPy raises errors of every kind on inputs that nobody has tried
        _log.debug("%r could not be compared with %r", stated, expected, exc_info=True)
        return Verdict.UNPARSED


def _judge_forms(plain: str, plain_gold: str, stated: str, expected: str) -> Verdict:
    readings, gold_readings = _readings(plain), _readings(plain_gold)
    if any(is_equal(a, g) for a, g in itertools.product(readings, gold_readings)):
        return Verdict.CORRECT
    if readings and gold_readings:
        return Verdict.WRONG
    return _judge_by_math_verify(stated, expected, readable=bool(readings))


def _spelling(text: str) -> str:
    """`text` without the spaces and braces that make no difference to LaTeX."""
    return re.sub(r"\{(\w)\}(?!\w)", r"\1", re.sub(r"\s*([^\w\s])\s*", r"\1", text))


def _says_something(text: str) -> bool:
    return bool(re.search(r"[^\W_]|∅|\\\{", text))


def _readings(text: str) -> list[structure.Form]:
    """The forms of `text`: none, one, or two where `1,234` may be a number or a pair."""
    variants = [text, re.sub(r"(?<=\d),(?=\d)", ", ", text)] if structure.has_thousands(text) else [text]
    forms = []
    for variant in variants:
        try:
            forms.append(structure.read(variant))
        except Unreadable:
            continue
    return forms


_MAX_LENGTH = 300  # characters that math-verify is given
_TOWER = re.compile(r"\^[\s{(]*[^{}^()]*\^")
_PLAIN_NUMBER = re.compile(r"-?\d+(?:\.\d+|/\d+)?")
_MISREAD = re.compile(
    r"(?<![\d^_])\d+\s+\d|\d\s*\(|\)\s*\d|_\{?\d+\}?$"
)  # math-verify adds 2(3), drops the base of 12_8


def _judge_by_math_verify(answer: str, gold: str, readable: bool) -> Verdict:
    """The verdict of `math-verify` on LaTeX that our own readers don't know."""
    unread = Verdict.WRONG if readable else Verdict.UNPARSED
    parsed, parsed_gold = _parse(answer), _parse(gold)
    if parsed is None:
        return unread
    if parsed_gold is None:
        return Verdict.WRONG
    return Verdict.CORRECT if _same_sympy(parsed, parsed_gold) else Verdict.WRONG


@functools.cache
def _math_verify():
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that we switch its alarms off
    return math_verify


def _parse(text: str):
    r"""A SymPy object, None where the text isn't LaTeX or is one of the kinds that math-verify misreads."""
    text = text.strip().strip("$").strip()
    if (
        len(text) > _MAX_LENGTH
        or not ("\\" in text or _PLAIN_NUMBER.fullmatch(text))
        or _TOWER.search(text)
        or _MISREAD.search(text)
    ):
        return None
    math_verify = _math_verify()
    strict = math_verify.LatexNormalizationConfig(
        basic_latex=True, units=False, malformed_operators=False, nits=False, boxed="none", equations=False
    )
    config = math_verify.LatexExtractionConfig(boxed_match_priority=-1, normalization_config=strict)
    found = math_verify.parse(
        f"${text}$",
        [config],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return found[0] if found else None


def _same_sympy(a, b) -> bool:
    import sympy

    if isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr):
        return is_same(a.doit(), b.doit())
    return _math_verify().verify(b, a, timeout_seconds=None)
