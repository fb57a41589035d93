"""Everything about decoding that a user can set."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from xformer.errors import ConfigError

# What values may be, from and to. Greater ones have no use, and some no meaning in float32.
_WHOLE_NUMBERS = {
    "num_beams": (1, 10_000), "num_return_sequences": (1, 10_000), "num_beam_groups": (1, 10_000), "no_repeat_ngram_size": (0, 10_000),
    "min_length": (0, 100_000), "max_length": (1, 100_000), "top_k": (1, 10_000_000),
}  # fmt: skip
_NUMBERS = {
    "length_penalty": (0.0, 100.0), "coverage_penalty": (0.0, 1000.0), "topic_strength": (0.0, 1000.0),
    "diversity_penalty": (1e-6, 1000.0), "repetition_penalty": (1e-3, 1000.0), "temperature": (1e-6, 1000.0),
    "min_length_ratio": (0.0, 1000.0), "max_length_ratio": (1e-3, 1000.0), "length_tolerance": (0.0, 1.0),
    "top_p": (1e-9, 1.0), "min_p": (1e-6, 1.0),
}  # fmt: skip
DEFAULT_DIVERSITY = 0.5  # within the 0.2 to 0.8 that Vijayakumar et al. found good on several tasks


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """How to find the output of a model; without any setting, greedy search.

    Search:
    num_beams: hypotheses kept at each step; 1 is greedy search
    num_return_sequences: outputs a sentence: the best ones of a beam, or so many independent samples
    num_beam_groups, diversity_penalty: diverse beam search with Hamming diversity (Vijayakumar et al., 2016): the beam in
    groups of equal size; a token costs a group the strength times the number of earlier groups' hypotheses that took
    it at the same step (default 0.5). Scores of hypotheses are free of that cost
    keep_greedy: the greedy hypothesis keeps a place in the beam, so that the result is never worse than greedy search

    Scores (Wu et al., 2016, section 7): a hypothesis Y of log-probability log P scores log P / lp(Y) + cp(Y)
    length_penalty: alpha of lp(Y) = ((5 + |Y|) / 6)^alpha, where |Y| counts eos
    coverage_penalty: beta of cp(Y) = beta * sum over the source of log(min(attention received, 1)), attention being
    the mean over heads and layers

    Distribution:
    no_repeat_ngram_size: no n-gram of this size comes twice (0: any may)
    repetition_penalty: theta of Keskar et al. (2019): logits of tokens that are there already are divided by it where
    positive, multiplied where negative (1: none)
    topic_strength: added to the logit of a token that begins a wanted phrase; twice that continues one

    Lengths, in tokens without eos:
    min_length, max_length: absolute; min_length_ratio, max_length_ratio: times the tokens of the source. Where both
    are given, both hold, and the maximum wins. The default limit is twice the source plus 20
    length_tolerance: how far an output may be from its desired length, as a fraction of it

    Sampling, which any of these asks for:
    temperature: logits are divided by it; top_k: only the k best tokens; top_p: only the smallest set of tokens with
    that much probability (Holtzman et al., 2020); min_p: only tokens with at least that fraction of the best one's
    probability (Nguyen et al., 2024)

    Raises ConfigError, naming the field, for values that cannot be, and for settings that contradict each other.
    """

    num_beams: int = 1
    num_return_sequences: int = 1
    num_beam_groups: int = 1
    diversity_penalty: float | None = None
    keep_greedy: bool = True
    length_penalty: float = 0.0
    coverage_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    repetition_penalty: float = 1.0
    topic_strength: float = 2.0
    min_length: int = 0
    max_length: int | None = None
    min_length_ratio: float = 0.0
    max_length_ratio: float | None = None
    length_tolerance: float = 0.1
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        self._check_values()
        self._check_beams()
        self._check_lengths()

    @property
    def method(self) -> str:
        """What the settings amount to: "greedy", "sampling" or "beam"."""
        if any(value is not None for value in (self.temperature, self.top_k, self.top_p, self.min_p)):
            return "sampling"
        return "greedy" if self.num_beams == 1 else "beam"

    @property
    def group_size(self) -> int:
        """Beams in a group."""
        return self.num_beams // self.num_beam_groups

    @property
    def diversity(self) -> float:
        """What a token costs a group for each earlier hypothesis that took it."""
        return DEFAULT_DIVERSITY if self.diversity_penalty is None else self.diversity_penalty

    def _check_values(self) -> None:
        for name, (least, most) in _WHOLE_NUMBERS.items():
            _check_whole(name, getattr(self, name), least, most)
        for name, (low, high) in _NUMBERS.items():
            _check_number(name, getattr(self, name), low, high)
        if not isinstance(self.keep_greedy, bool):
            raise ConfigError(f"keep_greedy is {self.keep_greedy!r}; expected true or false")

    def _check_beams(self) -> None:
        if self.method == "sampling":
            if self.num_beams > 1:
                raise ConfigError(
                    f"num_beams is {self.num_beams} and a setting of sampling is given; expected one or the other: "
                    "leave out num_beams, or temperature, top_k, top_p and min_p"
                )
        elif self.num_return_sequences > self.num_beams:
            raise ConfigError(
                f"num_return_sequences {self.num_return_sequences} is above num_beams {self.num_beams}; expected at most as many outputs as beams, "
                f"e.g. num_beams {self.num_return_sequences}"
            )
        if self.num_beams % self.num_beam_groups:
            raise ConfigError(
                f"num_beam_groups {self.num_beam_groups} does not divide num_beams {self.num_beams}; expected groups of equal "
                f"size, e.g. num_beams {self.num_beam_groups * math.ceil(self.num_beams / self.num_beam_groups)}"
            )
        if self.diversity_penalty is not None and self.num_beam_groups == 1:
            raise ConfigError(
                f"diversity_penalty is {self.diversity_penalty} and num_beam_groups is 1; expected at least 2 groups to "
                "tell apart, e.g. num_beam_groups 2"
            )

    def _check_lengths(self) -> None:
        for low, high in (("min_length", "max_length"), ("min_length_ratio", "max_length_ratio")):
            least, most = getattr(self, low), getattr(self, high)
            if most is not None and least > most:
                raise ConfigError(
                    f"{low} {least} is above {high} {most}; expected a minimum of at most the maximum: "
                    f"lower {low} or raise {high}"
                )


def _check_whole(name: str, value: Any, least: int, most: int) -> None:
    if value is None and getattr(DecodingOptions, name) is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} is {value!r}; expected a whole number of at least {least}")
    if value > most:
        raise ConfigError(f"{name} is {value!r}; expected at most {most}")


def _check_number(name: str, value: Any, least: float, most: float) -> None:
    if value is None and getattr(DecodingOptions, name) is None:
        return
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not math.isfinite(value)
        or not least <= value <= most
    ):
        hint = "; for the most probable token take top_k 1" if name == "temperature" else ""
        raise ConfigError(f"{name} is {value!r}; expected a number from {least:g} to {most:g}{hint}")
