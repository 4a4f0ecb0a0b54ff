"""What a reward function may say about itself and about its number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from jaxrl_llm.rewards.verify import Verdict

F = TypeVar("F", bound=Callable[..., Any])


def declares(**facts: Any) -> Callable[[F], F]:
    """Declares properties of a reward function, read with `jaxrl_llm.signature.fact`.

    Args:
      **facts: `batched=True`: it scores a whole list, `f(completions, examples) -> list`;
        `self_check=True`: it gives 1 to a gold answer as completion, which is checked at start;
        `imports=("sympy", ...)`: modules to load before the first call, so that no call pays for it.
    """

    def mark(fn: F) -> F:
        fn.facts = {**getattr(fn, "facts", {}), **facts}
        return fn

    return mark


batched = declares(batched=True)


class Judged(float):
    """A reward of 1 (correct) or 0 that says whether 0 means wrong or unparsed, to count them apart."""

    def __new__(cls, verdict: Verdict) -> Judged:
        judged = super().__new__(cls, verdict is Verdict.CORRECT)
        judged.verdict = verdict
        return judged

    def __reduce__(self):
        return Judged, (self.verdict,)
