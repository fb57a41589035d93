"""Greedy search and sampling: one token per row and step.

Sampling divides logits by the temperature, truncates them, and inverts the cumulative distribution at uniform random
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from xformer.backends import Array, array_namespace, device, from_host, to_host_together
from xformer.generation.batch import Choice, GenerationBatch, Move
from xformer.generation.config import GenerationConfig
from xformer.generation.processors import Rows
from xformer.generation.results import Hypothesis, UnscoredHypothesis, best_first
from xformer.ops.decoding import log_softmax, top_k
from xformer.ops.softmax import softmax
from xformer.random import Rng

_MIN_TEMPERATURE = 1e-6  # smaller ones would make logits infinite


@dataclass
class Sample:
    """One output during generation.

    Attributes:
        index: Index of its input.
        number: Index among the samples of its input.
        tokens: Prompt or prefix, and what followed.
        log_probability: Log-probability of the tokens so far, and of eos.
        status: "running", "eos", "stopped" by a stopping criterion, or "truncated" at the maximum length.
    """

    index: int
    number: int
    tokens: list[int]
    log_probability: float = 0.0
    status: str = "running"

    def append(self, token: int, log_probability: float, batch: GenerationBatch) -> None:
        """Append a token, or end the output; at the maximum length only a token that ends it counts."""
        if self.status != "running":
            return
        if math.isnan(log_probability):
            raise batch.no_token_error(self.index, len(self.tokens))
        maximum = batch.lengths.ranges[self.index].maximum
        if token in batch.end_ids:
            self.status = "eos"
        elif len(self.tokens) == maximum or batch.lengths.exceeds_units(self.index, [*self.tokens, token]):
            self.status = "truncated"
            return
        else:
            self.tokens.append(token)
            if not batch.end_ids and len(self.tokens) == maximum:
                self.status = "truncated"  # the next token cannot end it
        self.log_probability += log_probability

    @property
    def hypothesis(self) -> UnscoredHypothesis:
        """The output as a hypothesis to be scored."""
        finished, has_eos = self.status in ("eos", "stopped"), self.status == "eos"
        return UnscoredHypothesis(self.index, self.tokens, self.log_probability, finished, has_eos)


def greedy_or_sample(batch: GenerationBatch, logits: Array) -> Generator[Move | Choice, Any, list[list[Hypothesis]]]:
    """Choose the most probable token at each step, or draw one; config.num_return_sequences samples per input.

    Samples are independent, so they may be equal. The best score comes first.
    """
    samples = start_samples(batch)
    yield from extend_samples(samples, batch, logits)
    return [best_first(batch.score([sample.hypothesis for sample in samples[index]])) for index in batch.inputs]


def start_samples(batch: GenerationBatch) -> list[list[Sample]]:
    """Return the samples of each input, which begin with its prefix."""
    count = batch.config.num_return_sequences if batch.uniforms is not None else 1
    return [
        [Sample(index, number, list(prefix)) for number in range(count)] for index, prefix in enumerate(batch.prefixes)
    ]


def extend_samples(
    samples: list[list[Sample]], batch: GenerationBatch, logits: Array
) -> Generator[Move | Choice, Any, None]:
    """Extend the samples of the batch by one token per step until all have ended; finished inputs leave it."""
    count, active = len(samples[0]), [samples[index] for index in batch.inputs]
    rows = batch.rows(count)
    parents: Sequence[int] | None = None
    if count > 1:
        parents = rows.inputs.tolist()
        logits = batch.take(logits, rows.inputs.tolist())
    while True:
        rows = yield from _advance(batch, logits, [sample for group in active for sample in group], rows)
        running = [row for row, group in enumerate(active) if any(sample.status == "running" for sample in group)]
        if not running:
            return
        staying = None
        if len(running) < len(active):
            staying, kept = running, [row * count + number for row in running for number in range(count)]
            parents = kept if parents is None else [parents[row] for row in kept]
            active, rows = [active[row] for row in running], rows.take(kept)
        logits = yield Move(rows.tokens[:, -1].tolist(), parents, staying)
        parents = None


def _advance(batch: GenerationBatch, logits: Array, samples: list[Sample], rows: Rows) -> Generator[Choice, Any, Rows]:
    """Choose the next token of each row and append it; return the longer rows."""
    logits = batch.process(logits, rows)
    uniforms = None
    if batch.uniforms is not None:
        uniforms = [batch.uniforms[sample.index][sample.number][len(sample.tokens)] for sample in samples]
    tokens, log_probs = yield Choice(logits, batch.config, uniforms)
    rows, extended = rows.extend(tokens), []
    for row, (sample, token, log_prob) in enumerate(zip(samples, tokens, log_probs, strict=True)):
        length = len(sample.tokens)
        sample.append(token, log_prob, batch)
        extended += [row] if len(sample.tokens) > length else []
    if batch.stopping_criteria and extended:
        chosen = rows if len(extended) == len(samples) else rows.take(extended)
        for row, stop in zip(extended, batch.should_stop(chosen), strict=True):
            samples[row].status = "stopped" if stop else samples[row].status
    return rows


# --- From logits to tokens --------------------------------------------------------------------------------------------


def choose(choices: Sequence[Choice]) -> tuple[list[int], list[float]]:
    """Return the next token of each row and its log-probability, on the host."""
    first = choices[0]
    xp = array_namespace(first.logits)
    logits = first.logits if len(choices) == 1 else xp.concat([choice.logits for choice in choices], axis=0)
    if first.uniforms is None:
        chosen, scores = xp.argmax(logits, axis=-1), xp.max(logits, axis=-1, keepdims=True)
    else:
        uniforms = [uniform for choice in choices for uniform in choice.uniforms or ()]
        chosen = draw(truncate(logits, first.config), uniforms)
        scores = xp.take_along_axis(logits, xp.expand_dims(chosen, axis=-1), axis=-1)
    log_probs = log_softmax(logits, scores)
    host_tokens, host_log_probs = to_host_together(chosen, log_probs)
    return host_tokens.tolist(), host_log_probs[:, 0].tolist()


def truncate(logits: Array, config: GenerationConfig) -> Array:
    """Divide logits (rows, vocabulary) by the temperature, then apply top_k, top_p and min_p, in this order.

    Other tokens get -inf. The most probable token always stays.
    """
    if config.temperature is not None:
        logits = logits / max(config.temperature, _MIN_TEMPERATURE)
    if config.top_k:
        logits = keep_top_k(logits, config.top_k)
    if config.top_p is not None and config.top_p < 1.0:
        logits = keep_top_p(logits, config.top_p)
    return keep_min_p(logits, config.min_p) if config.min_p else logits


def keep_top_k(logits: Array, k: int) -> Array:
    """Keep the k largest logits of each row, and those equal to the smallest of them."""
    values, _ = top_k(logits, min(k, int(logits.shape[-1])))
    return array_namespace(logits).where(logits >= values[:, -1:], logits, -math.inf)


def keep_top_p(logits: Array, p: float) -> Array:
    """Keep the smallest set of tokens with at least probability p (nucleus sampling, Holtzman et al., 2020).

    The most probable token is always one of them. Tokens as probable as the least probable one of the set stay, too.
    """
    xp = array_namespace(logits)
    probabilities = softmax(logits)
    ordered = xp.sort(probabilities, axis=-1, descending=True)
    before = xp.cumulative_sum(ordered, axis=-1) - ordered
    smallest = xp.min(xp.where(before < p, ordered, ordered[:, :1]), axis=-1, keepdims=True)
    return xp.where(probabilities >= smallest, logits, -math.inf)


def keep_min_p(logits: Array, p: float) -> Array:
    """Keep the tokens with at least p times the highest probability (Nguyen et al., 2024)."""
    xp = array_namespace(logits)
    return xp.where(logits >= xp.max(logits, axis=-1, keepdims=True) + math.log(p), logits, -math.inf)


def draw(logits: Array, uniforms: Sequence[float]) -> Array:
    """Draw one token per row, by inverting the cumulative distribution at that row's uniform number in [0, 1).

    Args:
        logits: (rows, vocabulary).
        uniforms: (rows,).

    Returns:
        Token ids (rows,). Tokens of probability zero are never drawn, whatever the rounding.
    """
    xp = array_namespace(logits)
    probabilities = softmax(logits)
    # Parallel sums may be uneven by a rounding error, so a token's own probability has to be above zero as well.
    cumulative = xp.where(probabilities > 0.0, xp.cumulative_sum(probabilities, axis=-1), -1.0)
    largest = 1.0 - 0.5 * float(xp.finfo(logits.dtype).eps)  # below 1 in this dtype too
    thresholds = from_host(
        xp, [[min(uniform, largest)] for uniform in uniforms], dtype=logits.dtype, device=device(logits)
    )
    reached = cumulative > thresholds * xp.max(cumulative, axis=-1, keepdims=True)
    return xp.argmax(xp.astype(reached, xp.int32), axis=-1)  # the first


def uniform_streams(rng: Rng, indices: Sequence[int], samples: int, lengths: Sequence[int]) -> list[list[list[float]]]:
    """Return uniform numbers in [0, 1) by input, sample and position.

    Args:
        rng: Source of all streams.
        indices: Index of each input; an index has the same stream in any batch and for any length.
        samples: Samples per input.
        lengths: Numbers needed for each input.
    """
    return [
        [rng.fold_in("input", index, "sample", sample).uniform((length,)).tolist() for sample in range(samples)]
        for index, length in zip(indices, lengths, strict=True)
    ]
