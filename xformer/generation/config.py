"""Configuration of generation, and the length limits of outputs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, NamedTuple

from xformer import hints
from xformer.config import Config, contradiction, option
from xformer.errors import ConfigError
from xformer.models.token_ids import check_one_each

DEFAULT_DIVERSITY_PENALTY = 0.5  # Vijayakumar et al. (2016) recommend 0.2 to 0.8
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p")


class GenerationConfig(Config):
    """Settings of `generate`; the default is greedy search.

    A hypothesis Y with log-probability log P scores log P / lp(Y) + cp(Y) (Wu et al., 2016, section 7), where
    lp(Y) = ((5 + |Y|) / 6)^length_penalty (or |Y|^length_penalty, see length_penalty_base), |Y| counts eos, and
    cp(Y) = coverage_penalty * sum over source tokens of log(min(attention received, 1)), with attention averaged over
    heads and layers.

    Lengths are in tokens of the output, eos excluded. The output of an encoder-decoder includes its forced prefix; that
    of a language model excludes the prompt. The default limit is twice the input plus 20 tokens.

    Args:
        num_beams: Beams of beam search; 1 is greedy search.
        num_return_sequences: Outputs per input: the best ones of a beam search, or independent samples.
        num_beam_groups: Groups of diverse beam search (Vijayakumar et al., 2016); must divide num_beams.
        diversity_penalty: Penalty of a token per beam of an earlier group that chose it at the same step (default 0.5).
            Scores of hypotheses do not include it.
        keep_greedy: Always keep the greedy hypothesis in the beam, so that beam search is never worse than greedy
            search.
        early_stopping: End the beam search of an input as soon as num_beams hypotheses have finished. Default, as
            'never' of Hugging Face: as soon as no better output is possible.
        length_penalty: Exponent alpha of the length penalty (Wu et al., 2016); values above 0 favor longer outputs.
        length_penalty_base: Base of the length penalty: (5 + length) / 6 as in Wu et al. (2016), or the length as in
            Hugging Face.
        coverage_penalty: Weight beta of the coverage penalty (Wu et al., 2016); favors outputs that attend to the whole
            source.
        min_new_tokens: Minimum length. If minimum > maximum for an input, the maximum takes precedence.
        max_new_tokens: Maximum length. If minimum > maximum for an input, the maximum takes precedence.
        min_length_ratio: Minimum length as a multiple of the input's. If minimum > maximum for an input, the maximum
            takes precedence.
        max_length_ratio: Maximum length as a multiple of the input's. If minimum > maximum for an input, the maximum
            takes precedence.
        length_tolerance: Allowed deviation from the target length, as a fraction of it.
        no_repeat_ngram_size: No n-gram of this size may repeat (Paulus et al., 2018); 0 is off.
        repetition_penalty: Penalty of tokens that have occurred (Keskar et al., 2019); 1 is off, larger values
            penalize.
        frequency_penalty: Penalty of a token for each time that it was generated, as in OpenAI's API; negative values
            favor it.
        presence_penalty: Penalty of a token that was generated, as in OpenAI's API; negative values favor it.
        logit_bias: Number that is added to the logit of each token id, as in OpenAI's API.
        sequence_bias_strength: Bias of the logit of a token that begins a favored phrase; twice that for one that
            continues it.
        suppress_tokens: Ids of tokens that are never generated.
        begin_suppress_tokens: Ids not allowed as the first new token.
        stop_token_ids: Ids of tokens that end an output, in addition to eos_id.
        prompt_lookup_num_tokens: Number of draft tokens per step, copied from after the last occurrence of the current
            n-gram (prompt lookup decoding; Saxena, 2023). The outputs are the same, up to rounding; faster where they
            repeat the prompt. Default: off.
        max_matching_ngram_size: Largest number of last tokens that prompt lookup searches for. Only with
            prompt_lookup_num_tokens.
        num_draft_tokens: Tokens that a draft model proposes at a time; default 5. Only with draft_model.
        do_sample: Sample; false is greedy or beam search. Default: sample if temperature, top_k, top_p or min_p is set.
        temperature: Sampling temperature; 0 is greedy search.
        top_k: Sample from the k most probable tokens; 0 is off.
        top_p: Sample from the smallest set of tokens with at least this probability (Holtzman et al., 2020); 1 is off,
            0 is greedy search.
        min_p: Sample from tokens with at least this fraction of the highest probability (Nguyen et al., 2024); 0 is
            off.

    Raises:
        ConfigError: For an invalid value, naming the field, and for settings that contradict each other.
    """

    _hints: ClassVar = hints.GENERATION

    num_beams: int = option(default=1, within=(1, 10_000), panel="Search")
    num_return_sequences: int = option(default=1, within=(1, 10_000))
    num_beam_groups: int = option(default=1, within=(1, 10_000))
    diversity_penalty: float | None = option(default=None, within=(1e-6, 1000.0))
    keep_greedy: bool = option(default=True)
    early_stopping: bool = option(default=False)
    length_penalty: float = option(default=0.0, within=(0.0, 100.0))
    length_penalty_base: str = option(default="wu", choices=("wu", "length"))
    coverage_penalty: float = option(default=0.0, within=(0.0, 1000.0))

    min_new_tokens: int = option(default=0, within=(0, 100_000), panel="Length of the output")
    max_new_tokens: int | None = option(default=None, within=(1, 100_000))
    min_length_ratio: float = option(default=0.0, within=(0.0, 1000.0))
    max_length_ratio: float | None = option(default=None, within=(1e-3, 1000.0))
    length_tolerance: float = option(default=0.1, within=(0.0, 1.0))

    no_repeat_ngram_size: int = option(default=0, within=(0, 10_000), panel="Steering")
    repetition_penalty: float = option(default=1.0, within=(1e-3, 1000.0))
    frequency_penalty: float = option(default=0.0, within=(-100.0, 100.0))
    presence_penalty: float = option(default=0.0, within=(-100.0, 100.0))
    logit_bias: dict[str, Any] | None = option(default=None)
    sequence_bias_strength: float = option(default=2.0, within=(0.0, 1000.0))
    suppress_tokens: tuple[int, ...] = option(default=())
    begin_suppress_tokens: tuple[int, ...] = option(default=())
    stop_token_ids: tuple[int, ...] = option(default=())

    prompt_lookup_num_tokens: int | None = option(default=None, within=(1, 256), panel="Speed")
    max_matching_ngram_size: int = option(default=2, within=(1, 256))
    num_draft_tokens: int | None = option(default=None, within=(1, 256))

    do_sample: bool | None = option(default=None, panel="Sampling")
    temperature: float | None = option(default=None, within=(0.0, 1000.0))
    top_k: int | None = option(default=None, within=(0, 10_000_000))
    top_p: float | None = option(default=None, within=(0.0, 1.0))
    min_p: float | None = option(default=None, within=(0.0, 1.0))

    def __post_init__(self) -> None:
        if isinstance(self.early_stopping, str) and self.early_stopping == "never":
            object.__setattr__(self, "early_stopping", False)
        super().__post_init__()
        for name in ("suppress_tokens", "begin_suppress_tokens", "stop_token_ids"):
            object.__setattr__(self, name, _token_ids(name, getattr(self, name)))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        self._check_beams()
        self._check_lengths()
        if self.prompt_lookup_num_tokens is not None:
            self.check_assisted("prompt_lookup_num_tokens")

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
        for name in overrides.keys() & cls._hints.keys():
            raise ConfigError(f"unknown argument {name!r}; {cls._hints[name]}")
        if config is None:
            return cls(**overrides)
        if not isinstance(config, GenerationConfig):
            raise ConfigError(f"config is {config!r}; expected a GenerationConfig")
        if not overrides:
            return config
        if _samples(**{name: overrides[name] for name in _SAMPLING if name in overrides}):
            no_beams = {"do_sample": None, "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": None}
            overrides = {**no_beams, **overrides}
        elif overrides.get("num_beams", 1) != 1 and config.method == "sampling":
            overrides = {"do_sample": False, **overrides}
        return dataclasses.replace(config, **overrides)

    @property
    def method(self) -> str:
        """Search method: "greedy", "sampling" or "beam"."""
        if _samples(self.do_sample, self.temperature, self.top_k, self.top_p, self.min_p):
            return "sampling"
        return "greedy" if self.num_beams == 1 else "beam"

    @property
    def draft_length(self) -> int:
        """Largest number of tokens that a draft model or prompt lookup proposes at a time."""
        return self.prompt_lookup_num_tokens or self.num_draft_tokens or 5

    @property
    def group_size(self) -> int:
        """Beams per group."""
        return self.num_beams // self.num_beam_groups

    def check_assisted(self, name: str) -> None:
        """Raise ConfigError unless assisted search applies; `name` is the argument that asks for it."""
        if self.method == "beam" or self.num_return_sequences > 1:
            raise ConfigError(
                f"{name} is given, num_beams is {self.num_beams} and num_return_sequences {self.num_return_sequences}; "
                "expected 1 of each: it applies to greedy search and sampling"
            )

    def _check_beams(self) -> None:
        if self.method == "sampling":
            if self.num_beams > 1:
                received = f"num_beams is {self.num_beams} and sampling is requested"
                raise ConfigError(f"{received}; expected one or the other: omit num_beams, or set do_sample=False")
        elif self.num_return_sequences > self.num_beams and not (self.do_sample and self.num_beams == 1):
            problem = f"num_return_sequences {self.num_return_sequences} is above num_beams {self.num_beams}"
            expected = f"expected at most one output per beam, e.g. num_beams={self.num_return_sequences}"
            raise ConfigError(f"{problem}; {expected}")
        if self.num_beams % self.num_beam_groups:
            multiple = self.num_beam_groups * math.ceil(self.num_beams / self.num_beam_groups)
            received = f"num_beam_groups {self.num_beam_groups} does not divide num_beams {self.num_beams}"
            raise ConfigError(f"{received}; expected groups of equal size, e.g. num_beams={multiple}")
        if self.diversity_penalty is not None and self.num_beam_groups == 1:
            raise contradiction(self, "diversity_penalty num_beam_groups", "at least 2 groups, e.g. num_beam_groups=2")

    def _check_lengths(self) -> None:
        for low, high in (("min_new_tokens", "max_new_tokens"), ("min_length_ratio", "max_length_ratio")):
            minimum, maximum = getattr(self, low), getattr(self, high)
            if maximum is not None and minimum > maximum:
                received = f"{low} {minimum} is above {high} {maximum}"
                raise ConfigError(f"{received}; expected a minimum of at most the maximum")


def _samples(
    do_sample: Any = None, temperature: Any = None, top_k: Any = None, top_p: Any = None, min_p: Any = None
) -> bool:
    """Return whether settings ask for sampling that can draw another token than the most probable one."""
    if do_sample is None:
        do_sample = any((temperature, top_k, top_p not in (None, 1), min_p))
    return bool(do_sample and temperature != 0 and top_p != 0)


def _token_ids(name: str, tokens: Any) -> tuple[int, ...]:
    ids = tuple(sorted(tokens) if isinstance(tokens, Set) else tokens) if isinstance(tokens, Collection) else (tokens,)
    if not all(isinstance(token, Integral) and not isinstance(token, bool) and int(token) >= 0 for token in ids):
        raise ConfigError(f"{name} is {tokens!r}; expected token ids")
    return tuple(map(int, ids))


def _biases(biases: Any) -> dict[int, float] | None:
    """Return biases by token id; in JSON, ids are strings."""
    if biases is None:
        return None
    checked = {}
    for key, value in biases.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        is_number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
        if not isinstance(token, Integral) or isinstance(token, bool) or token < 0 or not is_number:
            raise ConfigError(f"logit_bias has {key!r}: {value!r}; expected finite numbers by token id")
        checked[int(token)] = float(value)
    return checked


# --- Lengths ----------------------------------------------------------------------------------------------------------

MAX_TARGET_LENGTH = 100_000
# Token limit per unit of length_fn. The limit in units ends outputs; this one only stops a unit that never ends.
_TOKENS_PER_UNIT = 12
_ROUNDING = 1e-9  # 1.1 * 10 is 11.000000000000002; it should count as 11


class LengthRange(NamedTuple):
    """Minimum and maximum length, eos excluded."""

    minimum: int
    maximum: int


@dataclass(frozen=True)
class LengthLimits:
    """Length limits of the outputs of a batch.

    Attributes:
        ranges: Range of each output in tokens, prompt included.
        prompt_lengths: Tokens of each prompt, which are not part of the output; None without prompts.
        length_fn: Function of token ids that returns a length in another unit, e.g. words; None: only tokens count.
        unit_ranges: Range of each output in units of length_fn.
        near_targets: The ranges surround target lengths, so a beam may end anywhere inside (see beams.py).
    """

    ranges: list[LengthRange]
    prompt_lengths: Sequence[int] | None = None
    length_fn: Callable[[Sequence[int]], int] | None = None
    unit_ranges: list[LengthRange] | None = None
    near_targets: bool = False

    def exceeds_units(self, index: int, tokens: Sequence[int]) -> bool:
        """Return whether output `index` is longer than its limit in units of length_fn."""
        return self.unit_ranges is not None and self.units(tokens) > self.unit_ranges[index].maximum

    def output_length(self, index: int, num_tokens: int) -> int:
        """Return the length without the prompt."""
        return num_tokens - self.prompt_lengths[index] if self.prompt_lengths else num_tokens

    def check_prefix(self, index: int, prefix: Sequence[int], number: int) -> None:
        """Raise ConfigError for a prefix that exceeds the limits of output `index`, naming it by `number`."""
        for length, ranges in ((len(prefix), self.ranges), (self.units(prefix), self.unit_ranges)):
            if ranges is not None and length > (most := ranges[index].maximum):
                expected = f"at most {most}, the maximum length of the output"
                raise ConfigError(f"prefix {number} has length {length}; expected {expected}")

    def units(self, tokens: Sequence[int]) -> int:
        """Return the length of an output in units of length_fn."""
        return len(tokens) if self.length_fn is None else self.length_fn(tokens)


def default_max_length(source_length: int) -> int:
    """Return the default maximum length of an output, in tokens: twice the source plus 20."""
    return 2 * source_length + 20


def length_ranges(config: GenerationConfig, source_lengths: Sequence[int]) -> list[LengthRange]:
    """Return the configured range of each output, for inputs of these lengths (tokens, eos excluded)."""
    ranges = []
    for length in source_lengths:
        minimum = max(config.min_new_tokens, math.ceil(config.min_length_ratio * length - _ROUNDING))
        limits = [] if config.max_new_tokens is None else [config.max_new_tokens]
        if config.max_length_ratio is not None:
            limits.append(math.floor(config.max_length_ratio * length + _ROUNDING))
        maximum = max(1, min(limits, default=max(minimum, default_max_length(length))))
        ranges.append(LengthRange(min(minimum, maximum), maximum))
    return ranges


def target_ranges(config: GenerationConfig, target_lengths: Sequence[Any], num_inputs: int) -> list[LengthRange]:
    """Return ranges around target lengths, for the method fixRng of Kikuchi et al. (2016, section 3.2).

    Below the range eos is masked; above it hypotheses are truncated. A range extends config.length_tolerance to either
    side, in whole units, and always contains the target itself.

    Raises:
        DataError: For a wrong number of lengths.
        ConfigError: For an invalid length, and for a config that limits lengths as well.
    """
    check_one_each("target_lengths", target_lengths, num_inputs)
    for name in ("min_new_tokens", "max_new_tokens", "min_length_ratio", "max_length_ratio"):
        if getattr(config, name) != getattr(GenerationConfig, name):
            raise ConfigError(f"both a target length and {name} are set; expected one or the other: omit {name}")
    ranges = []
    for number, length in enumerate(target_lengths, start=1):
        if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= MAX_TARGET_LENGTH:
            raise ConfigError(f"target length {number} is {length!r}; expected 1 to {MAX_TARGET_LENGTH}")
        slack = config.length_tolerance * length
        minimum, maximum = math.ceil(length - slack - _ROUNDING), math.floor(length + slack + _ROUNDING)
        ranges.append(LengthRange(max(1, minimum), maximum))
    return ranges


def length_limits(
    config: GenerationConfig,
    sizes: Sequence[int],
    max_length: float = math.inf,
    *,
    are_prompts: bool = False,
    target_lengths: Sequence[int] | None = None,
    length_fn: Callable[[Sequence[int]], int] | None = None,
) -> LengthLimits:
    """Return the limits of outputs.

    Args:
        config: Settings.
        sizes: Tokens of each input, eos excluded.
        max_length: Number of positions that the model has.
        are_prompts: Whether the inputs are prompts, which count for the positions.
        target_lengths: Length of each output, in units of length_fn.
        length_fn: See `LengthLimits`.

    Raises:
        ConfigError: If a prompt fills the positions, or a minimum exceeds them; and as `target_ranges`.
    """
    unit_ranges = None
    if target_lengths is None:
        ranges = length_ranges(config, sizes)
    else:
        ranges = target_ranges(config, target_lengths, len(sizes))
        if length_fn is not None:  # with limits in tokens that leave enough for those in units
            unit_ranges = ranges
            pairs = zip(map(default_max_length, sizes), ranges, strict=True)
            ranges = [LengthRange(r.minimum, max(most, _TOKENS_PER_UNIT * r.maximum)) for most, r in pairs]
    prompts = list(sizes) if are_prompts else [0] * len(sizes)
    positions = f"this model has learned positions for {max_length}"
    ranges = [LengthRange(size + r.minimum, size + r.maximum) for size, r in zip(prompts, ranges, strict=True)]
    for number, size in enumerate(prompts, start=1):
        if size >= max_length:
            raise ConfigError(f"prompt {number} has {size} tokens; expected at most {max_length - 1}: {positions}")
    if (longest := max((r.minimum for r in ranges), default=0)) > max_length:
        received = f"the output needs {longest} tokens, prompt included"
        raise ConfigError(f"{received}; {positions}: lower the minimum length or shorten the prompt")
    ranges = [LengthRange(each.minimum, int(min(each.maximum, max_length))) for each in ranges]
    length_fn, prompts_of = None if unit_ranges is None else length_fn, sizes if are_prompts else None
    return LengthLimits(ranges, prompts_of, length_fn, unit_ranges, target_lengths is not None)
