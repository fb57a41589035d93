"""Results of generation: hypotheses, their scores, and their alignment with the source."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from xformer.backends import array_namespace, device, to_host
from xformer.errors import ConfigError, DataError
from xformer.models import Transformer
from xformer.models.token_ids import ids_of, pad, padding_mask

_MIN_ATTENTION = 1e-30  # for weights that underflowed: keeps the logarithm finite


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

    Examples:
        >>> length_penalty(7, 1.0)
        2.0
    """
    return float((length if base == "length" else (5.0 + length) / 6.0) ** alpha)


Scored = TypeVar("Scored", bound=Any)


def best_first(hypotheses: list[Scored]) -> list[Scored]:
    """Sort by score, finished hypotheses before truncated ones."""
    return sorted(hypotheses, key=lambda hypothesis: (not hypothesis.finished, -hypothesis.score))


class UnscoredHypothesis(NamedTuple):
    """A hypothesis before scoring; tokens include a prompt, has_eos says whether eos followed them."""

    input_index: int
    tokens: list[int]
    log_probability: float
    finished: bool
    has_eos: bool


class BeamCandidate(NamedTuple):
    """A hypothesis that a step of beam search considered.

    Attributes:
        token: Its last token.
        group: Index of its group (diverse beam search).
        parent: Index of the candidate that it extends, among those of the step before; None at the first step.
        log_probability: Log-probability of the whole hypothesis.
        score: log_probability divided by the length penalty.
        status: "kept" in the beam, "finished" by eos, or "pruned".
    """

    token: int
    group: int
    parent: int | None
    log_probability: float
    score: float
    status: str


class BeamHistory:
    """The candidates of a beam search, for `generate(..., beam_history=BeamHistory())`.

    Args:
        on_step: Function (index of the input, candidates, tokens of the best beam) that is called after each step.

    Attributes:
        steps: By the index of the input: for each step the candidates of all groups, best first in each group.

    Examples:
        >>> from xformer import Transformer, TransformerConfig, generate
        >>> sizes = {"d_model": 8, "num_heads": 2, "d_ff": 16, "num_encoder_layers": 1, "num_decoder_layers": 1}
        >>> config = TransformerConfig(source_vocab_size=9, target_vocab_size=9, **sizes)
        >>> history = BeamHistory()
        >>> outputs = generate(Transformer(config), [[5, 6]], num_beams=2, beam_history=history)
        >>> first, *_ = history.steps[0]
        >>> sum(candidate.status == "kept" for candidate in first)
        2
    """

    def __init__(self, on_step: Callable[[int, list[BeamCandidate], list[int]], object] | None = None) -> None:
        self.on_step = on_step
        self.steps: dict[int, list[list[BeamCandidate]]] = {}

    def add(self, index: int, step: list[BeamCandidate], tokens: list[int]) -> None:
        """Append a step of an input, after which its best beam has these tokens."""
        self.steps.setdefault(index, []).append(step)
        if self.on_step is not None:
            self.on_step(index, step, tokens)


def coverage_penalties(model: Any, sources: Any, targets: Sequence[Sequence[int]], weight: float) -> list[float]:
    """Return the coverage penalty of each output, at most zero: weight * sum_i log(min(sum_j p_ij, 1)).

    i is a source token, j an output token, and p the attention of one teacher-forced pass, averaged over heads and
    layers.

    Args:
        model: Encoder-decoder.
        sources: `Sources` of the outputs.
        targets: Inputs of the decoder for each output.
        weight: Weight of the penalty.
    """
    config, xp, options = model.config, array_namespace(sources.ids), {}
    mask = padding_mask(sources.ids, config.source_padding_id)
    if sources.mask is not None:
        mask = options["source_mask"] = sources.mask
    padded = pad(targets, config.pad_id)
    weights = model.cross_attention_weights(sources.ids, padded, lengths=sources.lengths, **options)
    weights = xp.mean(xp.stack([xp.mean(each, axis=1) for each in weights]), axis=0)  # over heads and layers
    if mask is not None:  # padding has received enough attention
        weights = xp.where(mask[:, 0, :, :], weights, 1.0)
    is_token = xp.from_host(pad([[1] * len(target) for target in targets], 0), device=device(weights)) == 1
    received = to_host(xp.sum(xp.where(xp.expand_dims(is_token, axis=-1), weights, 0.0), axis=1)).tolist()
    return [
        weight * sum(math.log(max(min(attention, 1.0), _MIN_ATTENTION)) for attention in attentions)
        for attentions in received
    ]


def alignments(
    model: Transformer,
    source: Any,
    outputs: Sequence[Sequence[int]],
    *,
    layer: int | None = None,
    lengths: Sequence[int] | None = None,
) -> list[Any]:
    """Return the attention of each output token over the source tokens, from one teacher-forced pass.

    Args:
        model: Encoder-decoder.
        source: Source ids (inputs, source length), padded with pad_id.
        outputs: Output ids of each input without bos and eos, such as `Hypothesis.tokens`.
        layer: Decoder layer whose attention is averaged over heads. Default: the last but one, whose attention is
            closest to word alignments (Garg et al., 2019).
        lengths: Output lengths for a model with a length encoding, eos included. Default: lengths of the outputs.

    Returns:
        One NumPy array (output tokens, source tokens) per input; padding is left out, rows sum to one.

    Raises:
        ConfigError: For a layer that the model does not have.
        DataError: If the number of outputs differs from the number of inputs.
    """
    source, config = ids_of(model.source_ids(source)), model.config
    if len(outputs) != source.shape[0]:
        raise DataError(f"got {len(outputs)} outputs for {source.shape[0]} inputs; expected one each")
    depth = config.num_decoder_layers
    layer = max(0, depth - 2) if layer is None else layer
    if not 0 <= layer < depth:
        raise ConfigError(f"layer is {layer}; expected 0 to {depth - 1} for a decoder of {depth} layers")
    if not outputs:
        return []
    # A token is predicted by the query of the token before it.
    inputs = [[config.bos_id, *output[:-1]] for output in outputs]
    weights = model.cross_attention_weights(source, pad(inputs, config.pad_id), lengths=lengths)[layer]
    attention = to_host(array_namespace(weights).mean(weights, axis=1))  # (inputs, target, source)
    return [
        attention[row, : len(output)][:, [token != config.source_padding_id for token in ids]]
        for row, (output, ids) in enumerate(zip(outputs, to_host(source).tolist(), strict=True))
    ]
