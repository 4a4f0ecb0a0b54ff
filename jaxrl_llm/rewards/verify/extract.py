# ruff: noqa: RUF001 (answers are written with these characters)
"""Finds the final answer in a text, and writes it in the small notation that the parsers read."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\b\s*")
_HASHES = re.compile(r"####[ \t]*(.*)")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_PHRASE = re.compile(
    r"\b(?:answer|option|choice)(?:\s+(?:is|was|equals)\b\s*(?:\*\*)?\s*:?|\s*(?:\*\*)?\s*[:=])[\s*}]*"
    r"|\bfinal\s+answer\b(?:\*\*)?\s+(?!is\b|was\b|equals\b)[\s*]*",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?](?=\s+\S|\s*$)|\n")


def final_answer(text: str) -> str | None:
    r"""Returns the answer that `text` states, or None where it states none.

    The last statement wins, so what was retracted never counts. A statement is `\boxed{...}`, `#### ...` or
    `<answer>...</answer>`; a phrase like "the answer is ..." counts where none of these follows it, and
    overrules an earlier one only with a number ("The answer is in the box." doesn't). A last box that is
    empty or never closed is no answer. With no statement at all, the text itself is the answer.
    """
    marked = [(m.start(), m.start(1), m.group(1)) for p in (_HASHES, _TAGGED) for m in _last(p, text)]
    marked += [(m.start(), *_box_content(text, m.end())) for m in _last(_BOX, text)]
    _, end, content = max(marked, default=(0, 0, None), key=lambda mark: mark[0])
    phrases = list(_PHRASE.finditer(text, end))[-1:]
    if phrases:
        said = _sentence(text[phrases[0].end() :])
        if not marked or re.match(r"[-+−$\\(\s]*\.?\d", said):
            content = said
    if not marked and not phrases:
        content = text
    if content is not None and (inner := _PHRASE.search(content)):
        content = content[inner.end() :]
    return content.strip() if content and content.strip() else None


def _last(pattern: re.Pattern, text: str) -> list[re.Match]:
    return list(pattern.finditer(text))[-1:]


def _box_content(text: str, start: int) -> tuple[int, str | None]:
    """Returns where the box ends and what is in it, None if its brace is never closed."""
    if not text.startswith("{", start):
        bare = re.compile(r"[\w.]+").match(text, start)
        return (bare.end(), bare.group()) if bare else (start, None)
    depth = 0
    for i in range(start, len(text)):
        if text[i] in "{}" and text[i - 1] != "\\":
            depth += 1 if text[i] == "{" else -1
            if depth == 0:
                return i + 1, text[start + 1 : i]
    return len(text), None


def _sentence(text: str) -> str:
    """Returns the first sentence of `text`; a display formula is a sentence."""
    text = text.lstrip()
    for opening, closing in (("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("$", "$")):
        if text.startswith(opening) and (end := text.find(closing, len(opening))) > 0:
            text_end = _SENTENCE_END.search(text, end + len(closing))
            return text[: text_end.start() if text_end else len(text)]
    end = _SENTENCE_END.search(text)
    return text[: end.start() if end else len(text)]


_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_VULGAR = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅛": "1/8"}
_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"[\u2212\u2013]", "-"),
        (r"[\u00a0\u2009\u202f]", r"\\,"),
        (r"(?<![\w)}])\*\*|\*\*(?![\w({\\-])", ""),  # Markdown emphasis; 2**3 stays
        (r"\$\$|\\[()]|(?<!\\)\\\[|(?<!\\)\\\]", " "),  # formula delimiters
        (r"(?<!\\)\$([^$]+)(?<!\\)\$", r" \1 "),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-z])\.?", ""),
        (r"\\(?:displaystyle|textstyle|limits|nolimits)(?![A-Za-z])", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\frac\s*(\d)\s*(?=[\d{\\a-zA-Z])", r"\\frac{\1}"),  # one-digit arguments without braces
        (r"(\\frac\s*\{[^{}]*\})\s*(\d|[a-zA-Z])", r"\1{\2}"),
        (r"\\sqrt\s*(\d|[a-zA-Z])", r"\\sqrt{\1}"),
        (r",\\!|\{,\}", "{,}"),
        (r"(?<=\d)(?:\{,\}|\\[,;: ])(?=\d{3}(?!\d))", ""),  # thousands, as LaTeX writes them
        (r"\\!", ""),
        (r"(?<!\\)\\(?:[,;: ]|q?quad(?![A-Za-z]))|~", " "),
        (r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}", r" \1 "),
        (r"\\(?:cdot|times|ast)(?![A-Za-z])|[×·⋅]", "*"),
        (r"(?<=\d)\s*x\s*(?=10\s*\^)", "*"),  # 1.5 x 10^3
        (r"\\div(?![A-Za-z])|÷", "/"),
        (r"\\(?:leqslant|leq|le)(?![A-Za-z])|<=", "≤"),
        (r"\\(?:geqslant|geq|ge)(?![A-Za-z])|>=", "≥"),
        (r"\\(?:neq|ne)(?![A-Za-z])|!=", "≠"),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\pm(?![A-Za-z])|\+/-", "±"),
        (r"\\cup(?![A-Za-z])", "∪"),
        (r"\\in(?![A-Za-z])", "∈"),
        (r"\\(?:emptyset|varnothing)(?![A-Za-z])|Ø", "∅"),
        (r"∞|\b(?:infinity|inf)\b", r"\\infty"),
        (r"π", r"\\pi "),
        (r"√\s*(\d+|[a-zA-Z])", r"\\sqrt{\1}"),
        (r"√", r"\\sqrt"),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])", "°"),
        (r"^\s*\](.*)\[\s*$", r"(\1)"),  # ]0, 1[ is open
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\%", "%"),
        (r"\\\$", "$"),
        (r"\\[lc]?dots(?![A-Za-z])|…", "..."),
        (r"\*\*", "^"),
    )
)


def clean(answer: str) -> str:
    """Returns `answer` without markup, in one spelling for each symbol."""
    for symbol, plain in _VULGAR.items():
        answer = re.sub(rf"(?<=\d){symbol}", " " + plain, answer).replace(symbol, plain)
    answer = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda m: "^{" + m.group().translate(_SUPERSCRIPTS) + "}", answer)
    for pattern, replacement in _REWRITES:
        answer = pattern.sub(replacement, answer)
    answer = re.sub(r"\s+", " ", answer).strip()
    answer = re.sub(r"^([*_`\"'])(.+)\1$", r"\2", answer)
    return answer.rstrip(".,;:!" if not re.search(r"\d!$", answer) else ".,;:").strip()
