"""Greedy search and sampling: one token per row and step."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from xformer.backends import Array
from xformer.generation.batch import GenerationBatch
from xformer.generation.engine import Choice, Move
from xformer.generation.hypothesis import Hypothesis, best_first
from xformer.generation.scoring import UnscoredHypothesis, score


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
            raise batch.no_token_error(self.index, self.tokens)
        maximum = batch.lengths.ranges[self.index].maximum
        if token in batch.end_ids:
            self.status = "eos"
        elif len(self.tokens) == maximum or batch.is_too_long(self.index, [*self.tokens, token]):
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
    return [best_first(score(batch, [sample.hypothesis for sample in group])) for group in samples]


def start_samples(batch: GenerationBatch) -> list[list[Sample]]:
    """Return the samples of each input, which begin with its prefix."""
    count = batch.config.num_return_sequences if batch.uniforms is not None else 1
    return [
        [Sample(index, number, list(prefix)) for number in range(count)] for index, prefix in enumerate(batch.prefixes)
    ]


def extend_samples(
    samples: list[list[Sample]], batch: GenerationBatch, logits: Array
) -> Generator[Move | Choice, Any, None]:
    """Extend samples by one token per step until all have ended; finished inputs leave the batch."""
    count = len(samples[0])
    parents: list[int] | None = None
    if count > 1:
        parents = [index for index in range(batch.num_inputs) for _ in range(count)]
        logits = batch.take(logits, parents)
    active = list(samples)
    while True:
        tokens = yield from _advance(batch, logits, [sample for group in active for sample in group])
        running = [row for row, group in enumerate(active) if any(sample.status == "running" for sample in group)]
        if not running:
            return
        staying = None
        if len(running) < len(active):
            staying, rows = running, [row * count + number for row in running for number in range(count)]
            parents = rows if parents is None else [parents[row] for row in rows]
            active, tokens = [active[row] for row in running], [tokens[row] for row in rows]
        logits = yield Move(tokens, parents, staying)
        parents = None


def _advance(batch: GenerationBatch, logits: Array, samples: list[Sample]) -> Generator[Choice, Any, list[int]]:
    """Choose the next token of each row and append it."""
    logits = batch.process(logits, [sample.tokens for sample in samples], [sample.index for sample in samples])
    uniforms = None
    if batch.uniforms is not None:
        uniforms = [batch.uniforms[sample.index][sample.number][len(sample.tokens)] for sample in samples]
    tokens, log_probs = yield Choice(logits, batch.config, uniforms)
    extended = []
    for sample, token, log_prob in zip(samples, tokens, log_probs, strict=True):
        length = len(sample.tokens)
        sample.append(token, log_prob, batch)
        extended += [sample] if len(sample.tokens) > length else []
    stops = batch.should_stop([sample.tokens for sample in extended], [sample.index for sample in extended])
    for sample in (sample for sample, stop in zip(extended, stops, strict=True) if stop):
        sample.status = "stopped"
    return tokens
