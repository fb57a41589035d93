"""Configuration of generation."""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Integral
from typing import Any

from xformer.config import Config, option
from xformer.errors import ConfigError

DEFAULT_DIVERSITY_PENALTY = 0.5  # Vijayakumar et al. (2016) recommend 0.2 to 0.8
# Arguments of Hugging Face's generate that have another name here.
_HUGGING_FACE = {
    "max_length": "use max_new_tokens, which does not count the prompt",
    "min_length": "use min_new_tokens, which does not count the prompt",
    "early_stopping": "beam search stops as soon as no better output is possible",
    "eos_token_id": "use stop_token_ids, or set eos_id in the configuration of the model",
    "pad_token_id": "set pad_id in the configuration of the model",
    "logits_processor": "use logits_processors",
    "generation_config": "use config",
}
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p")
_CONFLICTS = " If minimum > maximum for an input, the maximum takes precedence."


class GenerationConfig(Config):
    """Settings of `generate`; the default is greedy search.

    A hypothesis Y with log-probability log P scores log P / lp(Y) + cp(Y) (Wu et al., 2016, section 7), where
    lp(Y) = ((5 + |Y|) / 6)^length_penalty (or |Y|^length_penalty, see length_penalty_base), |Y| counts eos, and
    cp(Y) = coverage_penalty * sum over source tokens of log(min(attention received, 1)), with attention averaged over
    heads and layers.

    Lengths are in tokens of the output, eos excluded. The output of an encoder-decoder includes its forced prefix; that
    of a language model excludes the prompt. The default limit is twice the input plus 20 tokens.

    Raises:
        ConfigError: For an invalid value, naming the field, and for settings that contradict each other.
    """

    num_beams: int = option(
        "Beams of beam search; 1 is greedy search.", default=1, at_least=1, at_most=10_000, panel="Search"
    )
    num_return_sequences: int = option(
        "Outputs per input: the best ones of a beam search, or independent samples.",
        default=1,
        at_least=1,
        at_most=10_000,
    )
    num_beam_groups: int = option(
        "Groups of diverse beam search (Vijayakumar et al., 2016); must divide num_beams.",
        default=1,
        at_least=1,
        at_most=10_000,
    )
    diversity_penalty: float | None = option(
        "Penalty of a token per beam of an earlier group that chose it at the same step (default 0.5). Scores of "
        "hypotheses do not include it.",
        default=None,
        at_least=1e-6,
        at_most=1000.0,
    )
    keep_greedy: bool = option(
        "Always keep the greedy hypothesis in the beam, so that beam search is never worse than greedy search.",
        default=True,
    )
    length_penalty: float = option(
        "Exponent alpha of the length penalty (Wu et al., 2016); values above 0 favor longer outputs.",
        default=0.0,
        at_least=0.0,
        at_most=100.0,
    )
    length_penalty_base: str = option(
        "Base of the length penalty: (5 + length) / 6 as in Wu et al. (2016), or the length as in Hugging Face.",
        default="wu",
        choices=("wu", "length"),
    )
    coverage_penalty: float = option(
        "Weight beta of the coverage penalty (Wu et al., 2016); favors outputs that attend to the whole source.",
        default=0.0,
        at_least=0.0,
        at_most=1000.0,
    )

    min_new_tokens: int = option(
        f"Minimum length.{_CONFLICTS}", default=0, at_least=0, at_most=100_000, panel="Length of the output"
    )
    max_new_tokens: int | None = option(f"Maximum length.{_CONFLICTS}", default=None, at_least=1, at_most=100_000)
    min_length_ratio: float = option(
        f"Minimum length as a multiple of the input's.{_CONFLICTS}", default=0.0, at_least=0.0, at_most=1000.0
    )
    max_length_ratio: float | None = option(
        f"Maximum length as a multiple of the input's.{_CONFLICTS}", default=None, at_least=1e-3, at_most=1000.0
    )
    length_tolerance: float = option(
        "Allowed deviation from the target length, as a fraction of it.", default=0.1, at_least=0.0, at_most=1.0
    )

    no_repeat_ngram_size: int = option(
        "No n-gram of this size may repeat (Paulus et al., 2018); 0 is off.",
        default=0,
        at_least=0,
        at_most=10_000,
        panel="Steering",
    )
    repetition_penalty: float = option(
        "Penalty of tokens that have occurred (Keskar et al., 2019); 1 is off, larger values penalize.",
        default=1.0,
        at_least=1e-3,
        at_most=1000.0,
    )
    sequence_bias_strength: float = option(
        "Bias of the logit of a token that begins a favored phrase; twice that for one that continues it.",
        default=2.0,
        at_least=0.0,
        at_most=1000.0,
    )
    suppress_tokens: tuple[int, ...] = option("Ids of tokens that are never generated.", default=())
    begin_suppress_tokens: tuple[int, ...] = option("Ids not allowed as the first new token.", default=())
    stop_token_ids: tuple[int, ...] = option("Ids of tokens that end an output, in addition to eos_id.", default=())

    do_sample: bool | None = option(
        "Sample; false is greedy or beam search. Default: sample if temperature, top_k, top_p or min_p is set.",
        default=None,
        panel="Sampling",
    )
    temperature: float | None = option(
        "Sampling temperature; 0 is greedy search.", default=None, at_least=0.0, at_most=1000.0
    )
    top_k: int | None = option(
        "Sample from the k most probable tokens; 0 is off.", default=None, at_least=0, at_most=10_000_000
    )
    top_p: float | None = option(
        "Sample from the smallest set of tokens with at least this probability (Holtzman et al., 2020); 0 and 1 are "
        "off.",
        default=None,
        at_least=0.0,
        at_most=1.0,
    )
    min_p: float | None = option(
        "Sample from tokens with at least this fraction of the highest probability (Nguyen et al., 2024); 0 is off.",
        default=None,
        at_least=0.0,
        at_most=1.0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("suppress_tokens", "begin_suppress_tokens", "stop_token_ids"):
            object.__setattr__(self, name, _token_ids(name, getattr(self, name)))
        self._check_beams()
        self._check_lengths()

    @classmethod
    def resolve(cls, config: GenerationConfig | None, overrides: dict[str, Any]) -> GenerationConfig:
        """Return the configuration with some fields replaced; the others keep their values.

        Overrides that ask for sampling turn off the beams of the config, and num_beams above 1 its sampling.

        Args:
            config: Default: `GenerationConfig()`.
            overrides: Values by field name.

        Raises:
            ConfigError: For an unknown field (with the nearest known one) or an invalid value.
        """
        for name in overrides.keys() & _HUGGING_FACE.keys():
            raise ConfigError(f"unknown argument {name!r}; {_HUGGING_FACE[name]}")
        if config is None:
            return cls(**overrides)
        if not isinstance(config, GenerationConfig):
            raise ConfigError(f"config is {config!r}; expected a GenerationConfig")
        if cls(**{name: overrides[name] for name in _SAMPLING if name in overrides}).method == "sampling":
            overrides = {
                "do_sample": None,
                "num_beams": 1,
                "num_beam_groups": 1,
                "diversity_penalty": None,
                **overrides,
            }
        elif overrides.get("num_beams", 1) != 1 and config.method == "sampling":
            overrides = {"do_sample": False, **overrides}
        return cls(**{**config.to_dict(), **overrides})

    @property
    def method(self) -> str:
        """Search method: "greedy", "sampling" or "beam"."""
        do_sample = self.do_sample
        if do_sample is None:
            do_sample = any((self.temperature, self.top_k, self.top_p not in (None, 0, 1), self.min_p))
        if do_sample and self.temperature != 0:
            return "sampling"
        return "greedy" if self.num_beams == 1 else "beam"

    @property
    def group_size(self) -> int:
        """Beams per group."""
        return self.num_beams // self.num_beam_groups

    def _check_beams(self) -> None:
        if self.method == "sampling":
            if self.num_beams > 1:
                raise ConfigError(
                    f"num_beams is {self.num_beams} and sampling is requested; expected one or the other: omit "
                    "num_beams, or set do_sample=False"
                )
        elif self.num_return_sequences > self.num_beams:
            raise ConfigError(
                f"num_return_sequences {self.num_return_sequences} is above num_beams {self.num_beams}; expected at "
                f"most one output per beam, e.g. num_beams={self.num_return_sequences}"
            )
        if self.num_beams % self.num_beam_groups:
            multiple = self.num_beam_groups * math.ceil(self.num_beams / self.num_beam_groups)
            raise ConfigError(
                f"num_beam_groups {self.num_beam_groups} does not divide num_beams {self.num_beams}; expected groups "
                f"of equal size, e.g. num_beams={multiple}"
            )
        if self.diversity_penalty is not None and self.num_beam_groups == 1:
            raise ConfigError(
                f"diversity_penalty is {self.diversity_penalty} and num_beam_groups is 1; expected at least 2 groups, "
                "e.g. num_beam_groups=2"
            )

    def _check_lengths(self) -> None:
        for low, high in (("min_new_tokens", "max_new_tokens"), ("min_length_ratio", "max_length_ratio")):
            minimum, maximum = getattr(self, low), getattr(self, high)
            if maximum is not None and minimum > maximum:
                raise ConfigError(
                    f"{low} {minimum} is above {high} {maximum}; expected a minimum of at most the maximum"
                )


def _token_ids(name: str, tokens: Any) -> tuple[int, ...]:
    ids = tuple(tokens) if isinstance(tokens, Collection) else (tokens,)
    if not all(isinstance(token, Integral) and not isinstance(token, bool) and int(token) >= 0 for token in ids):
        raise ConfigError(f"{name} is {tokens!r}; expected token ids")
    return tuple(sorted(map(int, ids)))
