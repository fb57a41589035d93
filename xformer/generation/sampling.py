"""Greedy search and sampling: one token per row and step, or several with draft tokens.

With draft tokens (assisted generation, speculative decoding), a step takes the next token and those that may follow,
and its logits tell which of them the search would have chosen. Outputs are those of the search alone, sampling
included; steps of several tokens round differently.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer.backends import Array, array_namespace, device, to_host
from xformer.generation.batch import Chosen, GenerationBatch, NextTokens, SampleRequest, Steps, sampling_settings
from xformer.generation.processors import Rows
from xformer.generation.results import UnscoredHypothesis, best_first
from xformer.generation.steps import DecodingSteps
from xformer.models import LanguageModel
from xformer.ops import decoding


def greedy_or_sample(batch: GenerationBatch, logits: Array) -> Steps:
    """Choose the most probable token at each step, or draw one; config.num_return_sequences samples per input.

    Samples are independent, so they may be equal. The best score comes first.
    """
    count, rows, settings = batch.rows_per_input, batch.rows(), sampling_settings(batch.config)
    parents: Any = None if count == 1 else np.repeat(np.arange(len(batch.inputs)), count)  # of the first step
    outputs: list[UnscoredHypothesis | None] = [None] * (len(batch.inputs) * count)
    # Of each row: its sample, whether that has not ended, and the log-probability of its tokens. Rows of samples that
    # have ended stay as long as others of their input run.
    samples, is_running, totals = np.arange(len(outputs)), np.ones(len(outputs), dtype=np.bool_), np.zeros(len(outputs))
    answer: Any = logits
    while True:
        if not isinstance(answer, Chosen):
            logits = batch.process(answer, rows)
            if parents is not None:
                logits = batch.take(logits, parents)
            uniforms = None
            if batch.uniforms is not None:
                uniforms = batch.draws(rows if parents is None else rows.take(parents), 1)[0].tolist()
            answer = yield SampleRequest(logits, settings, uniforms)
        rows, parents = rows.extend(answer.tokens, parents), None
        totals, ended = _append(batch, rows, answer.log_probs, totals, is_running)
        staying = None
        if ended:
            for row, output in ended.items():
                outputs[samples[row]], is_running[row] = output, False
            inputs = np.flatnonzero(is_running.reshape(-1, count).any(axis=1))
            if not len(inputs):
                found = [output for output in outputs if output is not None]
                return [best_first(batch.score(found[i : i + count])) for i in range(0, len(found), count)]
            if count * len(inputs) < len(samples):  # finished inputs leave the batch
                kept = (inputs[:, None] * count + np.arange(count)).ravel()
                samples, is_running, totals, rows = samples[kept], is_running[kept], totals[kept], rows.take(kept)
                staying = inputs.tolist()
        answer = yield NextTokens(rows, staying)


def _append(
    batch: GenerationBatch, rows: Rows, log_probs: Any, totals: Any, is_running: Any
) -> tuple[Any, dict[int, UnscoredHypothesis]]:
    """Count the last tokens of rows until one ends it; return the log-probabilities of rows and the ended outputs.

    At the maximum length only a token that ends it counts. Units and stopping criteria take one step at a time.
    """
    steps, limits = log_probs.shape[1], batch.lengths
    lengths, maxima = rows.lengths[:, None] + np.arange(1 - steps, 1), batch.maxima[rows.inputs, None]
    has_eos, outputs = batch.is_end[rows.tokens[:, -steps:]], dict[int, UnscoredHypothesis]()
    is_long = ~has_eos & (lengths > maxima)
    if limits.unit_ranges is not None:
        for row in np.flatnonzero(is_running & ~(has_eos | is_long)[:, 0]).tolist():
            is_long[row] = limits.exceeds_units(int(rows.inputs[row]), rows.history(row))
    # Without ends, the token after the maximum length cannot end it.
    ends = has_eos | is_long if batch.end_ids else is_long | (lengths == maxima)
    sums = np.cumsum(np.concatenate([totals[:, None], log_probs], axis=1), axis=1)
    if not (ends.any() or batch.stopping_criteria or np.isnan(sums[:, -1]).any()):  # most steps
        return sums[:, -1], outputs
    last = np.where(ends.any(axis=1), ends.argmax(axis=1), steps)
    is_nan = np.isnan(log_probs) & is_running[:, None] & (np.arange(steps) <= last[:, None])
    if is_nan.any():
        step, row = np.argwhere(is_nan.T)[0]
        raise batch.no_token_error(int(rows.inputs[row]), int(lengths[row, step]) - 1)

    def output(row: int, count: int, *, finished: bool, has_eos: bool = False) -> UnscoredHypothesis:
        tokens, total = rows.history(row), float(sums[row, count + has_eos])
        return UnscoredHypothesis(
            int(rows.inputs[row]), tokens[: len(tokens) - steps + count], total, finished, has_eos
        )

    for row in np.flatnonzero(is_running & (last < steps)).tolist():
        step, eos = int(last[row]), bool(has_eos[row, last[row]])
        outputs[row] = output(row, step + (not eos and not is_long[row, step]), finished=eos, has_eos=eos)
    extended: Any = np.flatnonzero(is_running & ~(has_eos | is_long)[:, 0]) if batch.stopping_criteria else ()
    if len(extended):
        chosen = rows if len(extended) == len(is_running) else rows.take(extended)
        for row, stop in zip(extended.tolist(), batch.should_stop(chosen), strict=True):
            if stop:
                outputs[row] = output(row, 1, finished=True)
    return sums[:, -1], outputs


# --- From logits to tokens --------------------------------------------------------------------------------------------


def choose(requests: Sequence[SampleRequest]) -> Chosen:
    """Return the next token of each row and its log-probability."""
    first, uniforms = requests[0], None
    xp = array_namespace(first.logits)
    logits = first.logits if len(requests) == 1 else xp.concat([each.logits for each in requests], axis=0)
    if first.uniforms is not None:
        numbers = [uniform for each in requests for uniform in each.uniforms or ()]
        uniforms = xp.from_host(numbers, dtype=logits.dtype, device=device(logits))
    return Chosen.of(to_host(decoding.choose(logits, uniforms, **first.settings))[None])


# --- Draft tokens -----------------------------------------------------------------------------------------------------


def assisted_search(batch: GenerationBatch, logits: Array) -> Steps:
    """Run greedy search or sampling of one input, with draft tokens in its steps.

    Args:
        batch: Its input.
        logits: First logits, (1, vocabulary).
    """
    config, (index,) = batch.config, batch.inputs
    drafter: PromptLookup | DraftModel = PromptLookup(config.draft_length, config.max_matching_ngram_size)
    if batch.draft_model is not None:
        drafter = DraftModel(batch.draft_model, config.draft_length)
    search = greedy_or_sample(batch, logits)  # which has one row and one token per step
    maximum, answer = batch.lengths.ranges[index].maximum, None
    draft: list[int] = []
    kept = 1  # tokens of the last step that the search has chosen
    try:
        while True:
            try:
                request = search.send(answer)
            except StopIteration as end:
                return end.value
            if isinstance(request, SampleRequest):
                answer = yield request
                continue
            tokens = request.rows.history(0)
            if draft[kept - 1 : kept] == tokens[-1:]:
                kept += 1
            else:
                draft = drafter(tokens)[: maximum - len(tokens)]
                logits = yield request._replace(draft_tokens=draft, kept=kept)
                kept = 1
            answer = logits[:, kept - 1, :]
    finally:
        drafter.close()


class PromptLookup:
    """Propose what followed the latest earlier occurrence of the last tokens (prompt lookup decoding, Saxena, 2023).

    Longer n-grams come first. Hugging Face takes their earliest occurrence.

    Args:
        num_tokens: Number of draft tokens.
        max_ngram_size: Largest number of last tokens to look up.

    Examples:
        >>> lookup = PromptLookup(num_tokens=3, max_ngram_size=2)
        >>> lookup([7, 8, 9, 4, 5, 7, 8]), lookup([7, 8, 9, 4, 5, 7, 8, 6])
        ([9, 4, 5], [])
    """

    def __init__(self, num_tokens: int, max_ngram_size: int) -> None:
        self.num_tokens, self.max_ngram_size = num_tokens, max_ngram_size
        self._ends: dict[tuple[int, ...], int] = {}  # of the latest occurrence of each n-gram that something follows
        self._num_read = 1

    def __call__(self, tokens: Sequence[int]) -> list[int]:
        """Return the draft tokens, or none if the last token is new."""
        for end in range(self._num_read, len(tokens)):
            for size in range(1, min(self.max_ngram_size, end) + 1):
                self._ends[tuple(tokens[end - size : end])] = end
        self._num_read = max(self._num_read, len(tokens))
        for size in range(min(self.max_ngram_size, len(tokens)), 0, -1):
            end = self._ends.get(tuple(tokens[-size:]), 0)
            if end:  # what follows the end of the tokens may repeat them further
                return list(itertools.islice(itertools.cycle(tokens[end:]), self.num_tokens))
        return []

    def close(self) -> None:
        """Do nothing."""


class DraftModel:
    """Propose what a smaller model generates by greedy search (speculative decoding, Leviathan et al., 2023).

    Args:
        model: The smaller model, on any array library.
        num_tokens: Number of draft tokens.
    """

    def __init__(self, model: LanguageModel, num_tokens: int) -> None:
        self.model, self.num_tokens = model, num_tokens
        learned = model.config.positions == "learned"
        self._max_length = model.config.max_positions if learned else math.inf
        self._tokens: list[int] = []  # in the cache
        self._steps: Any = None

    def __call__(self, tokens: Sequence[int]) -> list[int]:
        """Return the draft tokens; none beyond the learned positions of the model."""
        size = len(tokens) + self.num_tokens
        if size > self._max_length:
            return []
        if self._steps is None:
            self._steps = DecodingSteps(self.model, self.model.init_cache(1), size)
            logits = self._steps.prefill(self._to_device(tokens), [len(tokens)])
        else:
            pairs = enumerate(zip(tokens[:-1], self._tokens, strict=False))  # the last token enters the model anyway
            same = next((index for index, (a, b) in pairs if a != b), min(len(tokens) - 1, len(self._tokens)))
            self._steps.drop([len(self._tokens) - same])
            for token in tokens[same:]:
                logits = self._steps.step(self._to_device([token]))
        draft: list[int] = []
        while True:
            draft.append(int(to_host(array_namespace(logits).argmax(logits, axis=-1))[0]))
            if len(draft) == self.num_tokens:
                self._tokens = [*tokens, *draft[:-1]]
                return draft
            logits = self._steps.step(self._to_device(draft[-1:]))

    def close(self) -> None:
        """Return the compiled steps to the pool."""
        if self._steps is not None:
            self._steps.close()

    def _to_device(self, tokens: Sequence[int]) -> Array:
        like = next(array for _, array in self.model.named_parameters())
        xp = array_namespace(like)
        return xp.from_host([list(tokens)], dtype=xp.index_dtype, device=device(like))
