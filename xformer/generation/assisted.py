"""Assisted generation (speculative decoding): the model checks several draft tokens in one step.

A step takes the next token and the draft tokens after it, and its logits tell which of them the search would have
chosen. Outputs are those of the search alone, sampling included; steps of several tokens round differently.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Sequence
from typing import Any, Protocol

from xformer.backends import Array, array_namespace, device, from_host, index_dtype, to_host
from xformer.generation.batch import GenerationBatch, NextTokens, SampleRequest
from xformer.generation.results import Hypothesis
from xformer.generation.sampling import greedy_or_sample
from xformer.generation.steps import DecodingSteps
from xformer.models import LanguageModel


class Drafter(Protocol):
    """Proposes the next tokens of one output."""

    def __call__(self, tokens: Sequence[int]) -> list[int]:
        """Return draft tokens, any number, for what follows the prompt and the output so far."""
        ...

    def close(self) -> None:
        """Free what the output needed."""
        ...


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
        return from_host(xp, [list(tokens)], dtype=index_dtype(xp), device=device(like))


def assisted_search(
    batch: GenerationBatch, logits: Array
) -> Generator[NextTokens | SampleRequest, Any, list[list[Hypothesis]]]:
    """Run greedy search or sampling of one input, with draft tokens in its steps.

    Args:
        batch: Its input.
        logits: First logits, (1, vocabulary).
    """
    config, (index,) = batch.config, batch.inputs
    drafter: Drafter = PromptLookup(config.draft_length, config.max_matching_ngram_size)
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
