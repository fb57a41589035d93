"""A record of the probabilities of generated tokens and of their alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from xformer.backends import Array, to_host
from xformer.generation.candidates import top_tokens
from xformer.generation.logits_processors import Histories, log_sum_exp


class TokenAlternatives(NamedTuple):
    """A generated token.

    Attributes:
        token: Its id.
        log_probability: Its log-probability.
        alternatives: The most probable tokens at this step with their log-probabilities, best first.
    """

    token: int
    log_probability: float
    alternatives: list[tuple[int, float]]


class TokenRecord:
    """The log-probability of each generated token, and the most probable alternatives at each step.

    It changes nothing. Log-probabilities are those that scores are made of: after the logits processors of the config,
    before temperature, top_k, top_p and min_p. On a GPU every step waits for the device.

    Args:
        num_alternatives: Alternatives per step.

    Example:
        >>> from xformer import LanguageModel, LanguageModelConfig, generate
        >>> config = LanguageModelConfig(vocab_size=13, d_model=8, num_heads=2, d_ff=16, num_layers=1)
        >>> record = TokenRecord(3)
        >>> options = {"logits_processors": [record], "stopping_criteria": [record.observe], "max_new_tokens": 4}
        >>> ((output,),) = generate(LanguageModel(config), [[5, 4]], **options)
        >>> steps = record.steps(0, [5, 4], output.tokens)
        >>> [step.token for step in steps] == output.tokens, len(steps[0].alternatives)
        (True, 3)
    """

    def __init__(self, num_alternatives: int = 10) -> None:
        self.num_alternatives = num_alternatives
        self._alternatives: dict[tuple[int, tuple[int, ...]], list[tuple[int, float]]] = {}
        self._log_probs: dict[tuple[int, tuple[int, ...]], float] = {}
        self._latest: dict[int, dict[tuple[int, ...], Array]] = {}  # log-probabilities of the last step by history

    def __call__(self, histories: Histories, logits: Array) -> Array:
        """Record the alternatives of a step; a logits processor."""
        log_probs = logits - log_sum_exp(logits)
        top = top_tokens(logits, max(1, self.num_alternatives), None)
        self._latest.update({index: {} for index in histories.indices})
        rows = zip(histories.indices, histories, top.tokens.tolist(), top.log_probs.tolist(), strict=True)
        for row, (index, tokens, best, values) in enumerate(rows):
            history = tuple(tokens)
            # The row of a sample that has ended stays in the batch while others of its input continue.
            alternatives = list(zip(best, values, strict=True))[: self.num_alternatives]
            self._alternatives.setdefault((index, history), alternatives)
            self._latest[index][history] = log_probs[row]
        return logits

    def observe(self, histories: Histories) -> list[bool]:
        """Record the tokens that a step chose; a stopping criterion that never ends a row."""
        for index, tokens in zip(histories.indices, histories, strict=True):
            log_probs = self._latest.get(index, {}).get(tuple(tokens[:-1]))
            if log_probs is not None:
                self._log_probs[index, tuple(tokens)] = float(to_host(log_probs[tokens[-1]]))
        return [False] * len(histories)

    def steps(self, index: int, prompt: Sequence[int], tokens: Sequence[int]) -> list[TokenAlternatives]:
        """Return the record of an output.

        Args:
            index: Index of its input.
            prompt: Prompt of a language model; empty for an encoder-decoder.
            tokens: Tokens of the output. Those of a forced prefix are left out if they entered the model in one step.
        """
        recorded, history = [], (*prompt, *tokens)
        for end in range(len(prompt), len(history)):
            key, parent = (index, history[: end + 1]), (index, history[:end])
            if key in self._log_probs:
                recorded.append(TokenAlternatives(history[end], self._log_probs[key], self._alternatives[parent]))
        return recorded
