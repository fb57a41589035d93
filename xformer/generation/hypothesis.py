"""Results of generation and their order."""

from __future__ import annotations

from typing import NamedTuple


class Hypothesis(NamedTuple):
    """One output of a model for one input.

    Attributes:
        tokens: Token ids without bos and eos; includes a forced prefix, excludes the prompt of a language model.
        log_probability: Log-probability of the tokens, and of eos if the output ended, in nats. Beam search adds up the
            log-probabilities that the logits processors return, which are not normalized again; greedy search and
            sampling normalize after the processors, and before temperature, top_k, top_p and min_p. A forced token
            has probability 1.
        score: Score that outputs are ranked by: log_probability / lp + cp, see `GenerationConfig`.
        finished: Whether the output ended by eos or a stopping criterion; False if it was truncated at the maximum
            length.
    """

    tokens: list[int]
    log_probability: float
    score: float
    finished: bool


def length_penalty(length: int, alpha: float, base: str = "wu") -> float:
    """Return lp of Wu et al. (2016, equation 14): ((5 + length) / 6)^alpha.

    Args:
        length: Tokens of the output, eos included.
        alpha: Exponent.
        base: "wu", or "length" for length^alpha.

    >>> length_penalty(7, 1.0)
    2.0
    """
    return float((length if base == "length" else (5.0 + length) / 6.0) ** alpha)


def best_first(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    """Sort by score, finished hypotheses before truncated ones."""
    return sorted(hypotheses, key=lambda hypothesis: (not hypothesis.finished, -hypothesis.score))
