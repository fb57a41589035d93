"""What decoding finds, and how it is scored."""

from __future__ import annotations

from typing import NamedTuple


class Hypothesis(NamedTuple):
    """One output of a model for one sentence.

    tokens: without bos and eos, a forced prefix included
    log_probability: of the tokens and of eos, where it ended, under the distribution that was decoded from: the
    model's, after forbidden tokens, repetition penalty and topics, before temperature and truncation. Forced tokens
    have probability one.
    score: what outputs are ranked by: log_probability / lp + cp, see DecodingOptions
    finished: it ended by itself; False: it was cut at the length limit
    """

    tokens: list[int]
    log_probability: float
    score: float
    finished: bool


def length_penalty(length: int, alpha: float) -> float:
    """lp of Wu et al. (2016, equation 14): ((5 + length) / 6)^alpha; the length counts eos.

    >>> length_penalty(7, 1.0)
    2.0
    """
    return float(((5.0 + length) / 6.0) ** alpha)


def best_first(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    """Sort by score; a hypothesis that ended comes before any that was cut."""
    return sorted(hypotheses, key=lambda hypothesis: (not hypothesis.finished, -hypothesis.score))
