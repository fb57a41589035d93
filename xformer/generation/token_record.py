"""A record of the probabilities of generated tokens and of their alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
        self._roots: dict[int, _Node] = {}
        # Of each input, by history: the node that it ends at, and the log-probabilities of the next token.
        self._latest: dict[int, dict[tuple[int, ...], tuple[_Node, Array]]] = {}

    def __call__(self, histories: Histories, logits: Array) -> Array:
        """Record the alternatives of a step; a logits processor."""
        log_probs = logits if histories.normalized else logits - log_sum_exp(logits)
        top = top_tokens(log_probs, max(1, self.num_alternatives), None)
        before = {index: self._latest.get(index, {}) for index in histories.indices}
        self._latest.update({index: {} for index in before})  # threads may run batches of other inputs
        rows = zip(histories.indices, histories, top.tokens.tolist(), top.log_probs.tolist(), strict=True)
        for row, (index, tokens, best, values) in enumerate(rows):
            history = tuple(tokens)
            known = before[index].get(history)
            node = self._roots.setdefault(index, _Node(len(tokens))) if known is None else known[0]
            # The row of a sample that has ended stays in the batch while others of its input continue.
            node.alternatives = node.alternatives or list(zip(best, values, strict=True))[: self.num_alternatives]
            self._latest[index][history] = node, log_probs[row]
        return logits

    def observe(self, histories: Histories) -> list[bool]:
        """Record the tokens that a step chose; a stopping criterion that never ends a row."""
        for index, (*parent, token) in zip(histories.indices, histories, strict=True):
            latest = self._latest.get(index, {})
            if tuple(parent) in latest:
                node, log_probs = latest[tuple(parent)]
                child = node.children.setdefault(token, _Node(node.length + 1, float(to_host(log_probs[token]))))
                latest[*parent, token] = child, log_probs
        return [False] * len(histories)

    def steps(self, index: int, prompt: Sequence[int], tokens: Sequence[int]) -> list[TokenAlternatives]:
        """Return the record of an output.

        Args:
            index: Index of its input.
            prompt: Prompt of a language model; empty for an encoder-decoder.
            tokens: Tokens of the output. Those of a forced prefix are left out if they entered the model in one step.
        """
        recorded, history, node = [], [*prompt, *tokens], self._roots.get(index, _Node(0))
        for position, token in enumerate(history[node.length :], start=node.length):
            if token not in node.children:
                break
            parent, node = node, node.children[token]
            if position >= len(prompt):
                recorded.append(TokenAlternatives(token, node.log_probability, parent.alternatives))
        return recorded


@dataclass
class _Node:
    """A token in the tree of the histories of an input, or the tokens that entered the model in one step."""

    length: int
    log_probability: float = 0.0
    alternatives: list[tuple[int, float]] = field(default_factory=list)
    children: dict[int, _Node] = field(default_factory=dict)
