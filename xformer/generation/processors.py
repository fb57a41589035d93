"""Logits processors change the logits before a token is chosen; stopping criteria end rows after that.

Both are functions of arrays on the device of the model. As in Hugging Face, greedy search and sampling normalize the
logits after the processors; beam search normalizes them before, so the processors get log-probabilities and their
results are added up.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from xformer.backends import Array, array_namespace, device, extra, to_host, to_host_together
from xformer.errors import ConfigError, DataError, ShapeError
from xformer.generation.config import LengthLimits
from xformer.models.token_ids import check_one_each, check_tokens
from xformer.ops.decoding import log_softmax, top_k

Tokens = Sequence[int]
Phrase = Sequence[Tokens]
"""Alternative tokenizations of one phrase: at the start of a text, after a space, capitalized, ..."""

LogitsProcessor = Callable[..., Array]
"""Function (tokens, lengths, logits) -> logits, called at each step with the samples or beams of all inputs as rows.

tokens: Integers (rows, longest): the ids of each row so far, prompt and forced prefix included, bos excluded. Rows end
at the last column; shorter ones begin with -1. lengths: Integers (rows,), the number of ids of each row. logits:
(rows, vocabulary), at least float32. -inf masks a token; at least one token of each row must stay finite.

In beam search the logits are log-probabilities. If a processor raises one above zero, the row is shifted so that its
largest is zero: scores never increase. A function with a parameter `rows` receives the `Rows` of the step, too.
"""

StoppingCriteria = Callable[..., Any]
"""Function (tokens, lengths) -> one bool per row, called after each step with the rows that got a token; True ends one.

Arguments are those of `LogitsProcessor`; the result may be an array or a list. A row that it ends counts as finished;
it has no eos.
"""

Processor = Callable[[Array, "Rows"], Array]
"""Function (logits, rows) -> logits, as which every logits processor is called."""

Criterion = Callable[[Array, "Rows"], list[bool]]
"""Function of an array of the model and rows, as which every stopping criterion is called."""

_MAX_ROWS = 256  # of an array as large as the vocabulary


@dataclass(frozen=True)
class Rows:
    """The rows of a step, as NumPy arrays, for a processor or criterion with a parameter `rows`.

    Attributes:
        tokens: Ids of each row, (rows, longest); shorter rows begin with -1.
        lengths: Number of ids of each row, (rows,).
        inputs: Index of the input of each row, (rows,); rows of finished inputs leave the batch.
        indices: Index of that input in the list that the pipeline received, or `indices` of `generate`, (rows,).
        starts: Number of ids of the prompt or prefix of each row, (rows,).
        parents: Row of the step before that each row continues, (rows,).
        is_normalized: Whether the logits are log-probabilities, as in beam search.
        state: Values that a processor keeps during a search.
    """

    tokens: Any
    lengths: Any
    inputs: Any
    indices: Any
    starts: Any
    parents: Any
    is_normalized: bool = False
    state: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def first(cls, prefixes: Sequence[Tokens], indices: Sequence[int], *, is_normalized: bool) -> Rows:
        """Return the first rows, one for each prefix."""
        lengths = np.asarray([len(prefix) for prefix in prefixes], dtype=np.int64)
        tokens = np.full((len(prefixes), max(lengths, default=0)), -1, dtype=np.int64)
        for row, prefix in enumerate(prefixes):
            tokens[row, tokens.shape[1] - len(prefix) :] = prefix
        inputs = np.arange(len(prefixes))
        return cls(tokens, lengths, inputs, np.asarray(indices, dtype=np.int64), lengths, inputs, is_normalized)

    def extend(self, tokens: Any, parents: Sequence[int] | None = None) -> Rows:
        """Return rows with further tokens, (rows,) or (rows, steps), after the rows `parents` (default: all)."""
        rows = self if parents is None else self.take(parents)
        order = np.arange(len(tokens)) if parents is None else np.asarray(parents, dtype=np.int64)
        new = np.asarray(tokens, dtype=np.int64)
        new = new if new.ndim == 2 else new[:, None]
        extended, lengths = np.concatenate([rows.tokens, new], axis=1), rows.lengths + new.shape[1]
        return dataclasses.replace(rows, tokens=extended, lengths=lengths, parents=order)

    def take(self, rows: Any) -> Rows:
        """Return some of the rows, by their indices."""
        names = ("tokens", "lengths", "inputs", "indices", "starts", "parents")
        return dataclasses.replace(self, **{name: getattr(self, name)[list(rows)] for name in names})

    def on_device(self, like: Array) -> tuple[Array, Array]:
        """Return tokens and lengths in the library and on the device of an array."""
        if "_arrays" not in self.__dict__:
            xp = array_namespace(like)
            options: Any = {"dtype": xp.index_dtype, "device": device(like)}
            self.__dict__["_arrays"] = tuple(xp.from_host(x, **options) for x in (self.tokens, self.lengths))
        return self.__dict__["_arrays"]

    def history(self, row: int) -> list[int]:
        """Return the ids of a row as a list."""
        return self.tokens[row, self.tokens.shape[1] - self.lengths[row] :].tolist()


def processor_of(function: Any) -> Processor:
    """Return a function of logits and rows that calls a `LogitsProcessor`, and checks what it returns."""
    options = _check_function(function, "logits processor", "tokens", "lengths", "logits")

    def processor(logits: Array, rows: Rows) -> Array:
        shape, logits = logits.shape, function(*rows.on_device(logits), logits, **options(rows))
        if getattr(logits, "shape", None) != shape:
            returned = f"shape {tuple(logits.shape)}" if hasattr(logits, "shape") else repr(logits)
            received = f"logits processor {_name_of(function)} returned {returned}"
            raise ShapeError(f"{received}; expected logits {tuple(shape)}")
        return logits

    return processor


def criterion_of(function: Any) -> Criterion:
    """Return a function of an array of the model and rows that calls a `StoppingCriteria`; see `processor_of`."""
    options = _check_function(function, "stopping criterion", "tokens", "lengths")

    def criterion(like: Array, rows: Rows) -> list[bool]:
        flags, num_rows = function(*rows.on_device(like), **options(rows)), len(rows.lengths)
        found = to_host(flags).tolist() if hasattr(flags, "shape") else flags
        if not isinstance(found, list) or len(found) != num_rows or any(isinstance(x, list) for x in found):
            received = f"stopping criterion {_name_of(function)} returned {flags!r}"
            raise ShapeError(f"{received}; expected one bool per row ({num_rows})")
        return list(map(bool, found))

    return criterion


def _check_function(function: Any, subject: str, *names: str) -> Callable[[Rows], dict[str, Rows]]:
    """Check that a function takes these arguments; return what makes its further ones, `rows` if it has that parameter.

    Raises:
        ConfigError: For another function.
    """
    if not callable(function):
        raise ConfigError(f"{subject} is {function!r:.100}; expected a function ({', '.join(names)})")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions of C have none
        return lambda rows: {}
    takes_rows = "rows" in signature.parameters
    try:
        signature.bind(*names, **({"rows": None} if takes_rows else {}))
    except TypeError as error:
        received = f"{subject} {_name_of(function)} has the parameters {signature}"
        raise ConfigError(f"{received}; expected ({', '.join(names)})") from error
    return lambda rows: {"rows": rows} if takes_rows else {}


def _name_of(function: Any) -> str:
    """Return the name of a function or of the class of a callable object."""
    return getattr(function, "__name__", type(function).__name__)


# --- Tokens that have occurred ----------------------------------------------------------------------------------------


def penalize_repetition(penalty: float, start: SuppressTokens, logits: Array, rows: Rows) -> Array:
    """Lower the logits of tokens in the history (Keskar et al., 2019, section 4.1).

    Positive logits are divided by the penalty. Negative ones are multiplied, since dividing would raise them; the paper
    leaves that case open. The start tokens of an encoder-decoder count as earlier tokens, as in Hugging Face.
    """
    xp, (tokens, _) = array_namespace(logits), rows.on_device(logits)
    seen = count_tokens(tokens, tokens >= 0, logits) > 0.0
    seen = seen | start.mask(logits) if start.tokens else seen
    return xp.where(seen, xp.where(logits > 0.0, logits / penalty, logits * penalty), logits)


def penalize_frequency(frequency: float, presence: float, logits: Array, rows: Rows) -> Array:
    """Lower the logits of generated tokens as in OpenAI's API: frequency * count + presence * (count > 0)."""
    xp, (tokens, _) = array_namespace(logits), rows.on_device(logits)
    longest, dtype = tokens.shape[1], tokens.dtype
    starts = xp.from_host(longest - rows.lengths + rows.starts, dtype=dtype, device=device(logits))
    columns = xp.arange(longest, dtype=dtype, device=device(logits))
    counts = count_tokens(tokens, columns[None, :] >= starts[:, None], logits)
    return logits - frequency * counts - presence * xp.astype(counts > 0.0, logits.dtype)


def mask_repeated(size: int, logits: Array, rows: Rows) -> Array:
    """Mask tokens that would repeat an n-gram of some size of the history (Paulus et al., 2018).

    Rows in which no token would be left stay as they are.
    """
    xp, last, (tokens, _) = array_namespace(logits), size - 1, rows.on_device(logits)
    count = tokens.shape[1] - last  # of n-grams
    if count < 1:
        return logits
    repeats = tokens[:, :count] >= 0
    for column in range(last):  # the beginning of each n-gram, compared with the last tokens
        end = count + column
        repeats = repeats & (tokens[:, column : column + count] == tokens[:, end : end + 1])
    masked = xp.where(count_tokens(tokens[:, last:], repeats, logits) > 0.0, -math.inf, logits)
    return xp.where(xp.max(masked, axis=-1, keepdims=True) > -math.inf, masked, logits)


def count_tokens(tokens: Array, is_counted: Array, logits: Array) -> Array:
    """Count the tokens of each row.

    Args:
        tokens: Ids (rows, tokens).
        is_counted: Boolean of the same shape.
        logits: (rows, vocabulary), for the size and dtype of the result.

    Returns:
        Counts (rows, vocabulary).
    """
    xp, (num_rows, vocabulary) = array_namespace(logits), logits.shape
    counts = xp.zeros((num_rows * vocabulary,), dtype=logits.dtype, device=device(logits))
    if not tokens.shape[1]:
        return xp.reshape(counts, (num_rows, vocabulary))
    starts = xp.arange(num_rows, dtype=tokens.dtype, device=device(logits))[:, None] * vocabulary
    at = xp.reshape(starts + xp.where(is_counted, tokens, 0), (-1,))
    counts = extra.scatter_add(counts, at, xp.reshape(xp.astype(is_counted, logits.dtype), (-1,)))
    return xp.reshape(counts, (num_rows, vocabulary))


# --- Favored and masked tokens ----------------------------------------------------------------------------------------


class SuppressTokens:
    """Mask tokens; the mask (1, vocabulary) is made once.

    Args:
        tokens: Token ids.
        selects: Function of rows that returns in which of them, as booleans (rows,) of NumPy. Default: in all.
    """

    def __init__(self, tokens: Iterable[int], selects: Callable[[Rows], Any] | None = None) -> None:
        self.tokens, self.selects = sorted(tokens), selects
        self._mask: Any = None

    def mask(self, logits: Array) -> Any:
        """Return which tokens are masked, as booleans (1, vocabulary) on the device of the logits."""
        if self._mask is None:
            mask = np.zeros((1, logits.shape[-1]), dtype=np.bool_)
            mask[0, self.tokens] = True
            self._mask = array_namespace(logits).from_host(mask, device=device(logits))
        return self._mask

    def __call__(self, logits: Array, rows: Rows) -> Array:
        """Return the changed logits."""
        xp, mask = array_namespace(logits), self.mask(logits)
        if self.selects is not None and not (selected := self.selects(rows)).all():
            if not selected.any():
                return logits
            mask = mask & xp.from_host(selected[:, None], device=device(logits))
        return xp.where(mask, -math.inf, logits)


def at_begin(rows: Rows) -> Any:
    """Return which rows are at the first position after the prompt or prefix."""
    return rows.lengths == rows.starts


def below_minimum(lengths: LengthLimits) -> Callable[[Rows], Any]:
    """Return a function that returns which rows are shorter than their minimum length."""
    minima = np.asarray([limits.minimum for limits in lengths.ranges])

    def selects(rows: Rows) -> Any:
        is_short = rows.lengths < minima[rows.inputs]
        if lengths.unit_ranges is not None:
            fewest = [lengths.unit_ranges[index].minimum for index in rows.inputs.tolist()]
            is_short |= [lengths.units(rows.history(row)) < minimum for row, minimum in enumerate(fewest)]
        return is_short

    return selects


class StopTokens(SuppressTokens):
    """Treat additional tokens as end-of-sequence in beam search: eos gets their best score, and they are masked."""

    def __init__(self, tokens: Iterable[int], eos_id: int) -> None:
        super().__init__(tokens)
        self.eos = SuppressTokens([eos_id])

    def __call__(self, logits: Array, rows: Rows) -> Array:
        """Return the changed logits."""
        xp, is_eos = array_namespace(logits), self.eos.mask(logits)
        ends = xp.where(self.mask(logits) | is_eos, logits, -math.inf)
        return xp.where(is_eos, xp.max(ends, axis=-1, keepdims=True), super().__call__(logits, rows))


class LogitBias:
    """Add a bias to the logits of some tokens, as in OpenAI's API."""

    def __init__(self, biases: Mapping[Any, float]) -> None:
        self.biases = biases
        self._array: Any = None

    def __call__(self, logits: Array, rows: Rows) -> Array:
        """Return the changed logits."""
        if self._array is None:
            bias = np.zeros((1, logits.shape[-1]))
            bias[0, list(self.biases)] = list(self.biases.values())
            self._array = array_namespace(logits).from_host(bias, dtype=logits.dtype, device=device(logits))
        return logits + self._array


def favor_phrases(phrases: Sequence[Sequence[Phrase]], strength: float, logits: Array, rows: Rows) -> Array:
    """Raise the logits of tokens that begin or continue a favored phrase."""
    bias = np.zeros(tuple(logits.shape), dtype=np.float32)
    for row, index in enumerate(rows.inputs.tolist()):
        for token, weight in phrase_weights(phrases[index], rows.history(row)).items():
            bias[row, token] = strength * weight
    return logits + array_namespace(logits).from_host(bias, dtype=logits.dtype, device=device(logits))


def check_sequence_bias(
    sequence_bias: Sequence[Sequence[Phrase]] | None, num_inputs: int, vocab_size: int
) -> list[list[Phrase]] | None:
    """Return the phrases of each input, or None; raise DataError for empty ones and for ids outside the vocabulary."""
    if sequence_bias is None:
        return None
    check_one_each("sequence_bias", sequence_bias, num_inputs)
    try:
        rows: list[list[Any]] = [[list(phrase) for phrase in phrases] for phrases in sequence_bias]
    except TypeError as error:
        raise DataError(f"sequence_bias is {sequence_bias!r}; expected a list of phrases for each input") from error
    for phrase in itertools.chain.from_iterable(rows):
        phrase[:] = [tuple(check_tokens("sequence_bias", tokens, vocab_size)) for tokens in phrase]
        if not phrase or not all(phrase):
            raise DataError(f"sequence_bias has the phrase {[*map(list, phrase)]!r}; expected at least one token id")
    return rows


def phrase_weights(phrases: Sequence[Phrase], history: Tokens) -> dict[int, float]:
    """Return the tokens to favor after `history`, with their weights.

    A phrase that is already present has no effect; only tokens are compared, so it counts as present even if later
    tokens turn its last word into a longer one. A token that begins a phrase has weight 1. If the history ends with the
    beginning of a phrase, the token that continues it has weight 2: half a word is useless, and its beginning shows
    that it fits. If several phrases favor a token, it has the largest weight, not the sum.
    """
    weights: dict[int, float] = {}
    for phrase in phrases:
        if any(_contains(history, tokens) for tokens in phrase):
            continue
        for tokens in phrase:
            weights[tokens[0]] = max(weights.get(tokens[0], 0.0), 1.0)
            matched = _matched_length(history, tokens)
            if matched:
                weights[tokens[matched]] = 2.0
    return weights


def _contains(history: Tokens, tokens: Tokens) -> bool:
    size = len(tokens)
    return tokens[0] in history and any(
        tuple(history[start : start + size]) == tokens for start in range(len(history) - size + 1)
    )


def _matched_length(history: Tokens, tokens: Tokens) -> int:
    """Return the length of the longest proper beginning of `tokens` that the history ends with."""
    for size in range(min(len(tokens) - 1, len(history)), 0, -1):
        if tuple(history[len(history) - size :]) == tokens[:size]:
            return size
    return 0


# --- Log-probabilities ------------------------------------------------------------------------------------------------


def normalize(logits: Array, rows: Rows) -> Array:
    """Return log-probabilities."""
    return log_softmax(logits)


def limit_to_zero(log_probs: Array, rows: Rows) -> Array:
    """Shift rows with a log-probability above zero so that their largest is zero."""
    xp = array_namespace(log_probs)
    top = xp.max(log_probs, axis=-1, keepdims=True)
    return log_probs - xp.where(top > 0.0, top, 0.0)


class TopTokens(NamedTuple):
    """The best tokens of each row, as NumPy arrays.

    Attributes:
        tokens: (rows, n), best first.
        log_probs: (rows, n).
        eos_log_probs: (rows,), or None without eos.
    """

    tokens: Any
    log_probs: Any
    eos_log_probs: Any


def top_tokens(log_probs: Array, count: int, eos_id: int | None) -> TopTokens:
    """Return the `count` best tokens of each row of log-probabilities (rows, vocabulary)."""
    values, tokens = top_k(log_probs, min(count, int(log_probs.shape[-1])))
    if eos_id is not None:
        values = array_namespace(values).concat([values, log_probs[:, eos_id : eos_id + 1]], axis=-1)
    host_tokens, host_log_probs = to_host_together(tokens, values)
    host_log_probs = host_log_probs.astype("float64")
    if eos_id is None:
        return TopTokens(host_tokens, host_log_probs, None)
    return TopTokens(host_tokens, host_log_probs[:, :-1], host_log_probs[:, -1])


# --- Stopping criteria ------------------------------------------------------------------------------------------------


class StopSequences:
    """Stop after any of several token sequences, which stay part of the output.

    Args:
        sequences: Token ids of each sequence.

    Raises:
        ConfigError: For an empty sequence.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self.sequences = [list(sequence) for sequence in sequences]
        if not all(self.sequences):
            raise ConfigError(f"stop sequences are {self.sequences!r}; expected at least one token each")

    def __call__(self, tokens: Array, lengths: Array) -> Array:
        """Return for each row whether it ends with one of the sequences."""
        xp, longest = array_namespace(tokens), tokens.shape[1]
        ends = lengths < 0
        for sequence in (each for each in self.sequences if len(each) <= longest):
            stop = xp.from_host([sequence], dtype=xp.index_dtype, device=device(tokens))
            ends = ends | xp.all(tokens[:, longest - len(sequence) :] == stop, axis=1)
        return ends


# --- A record of what was chosen --------------------------------------------------------------------------------------


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

    Examples:
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

    def __call__(self, tokens: Array, lengths: Array, logits: Array, rows: Rows) -> Array:
        """Record the alternatives of a step; a logits processor."""
        log_probs = logits if rows.is_normalized else log_softmax(logits)
        top = top_tokens(log_probs, max(1, self.num_alternatives), None)
        if self in rows.state:
            nodes = self._children(rows)
        else:
            found = zip(rows.indices.tolist(), rows.lengths.tolist(), strict=True)
            nodes = [self._roots.setdefault(index, _Node(length)) for index, length in found]
        for node, best, scores in zip(nodes, top.tokens.tolist(), top.log_probs.tolist(), strict=True):
            node.alternatives = node.alternatives or list(zip(best, scores, strict=True))[: self.num_alternatives]
        rows.state[self] = nodes, log_probs
        return logits

    def observe(self, tokens: Array, lengths: Array, rows: Rows) -> list[bool]:
        """Record the tokens that a step chose; a stopping criterion that never ends a row."""
        self._children(rows)
        return [False] * len(rows.lengths)

    def _children(self, rows: Rows) -> list[_Node]:
        """Return the nodes of the last tokens of rows."""
        nodes, log_probs = rows.state[self]
        chosen = zip(rows.parents.tolist(), rows.tokens[:, -1].tolist(), strict=True)
        return [nodes[parent].child(token, log_probs, parent) for parent, token in chosen]

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

    def child(self, token: int, log_probs: Array, row: int) -> _Node:
        """Return the node of the next token, whose log-probability is in a row of `log_probs`."""
        if token not in self.children:
            self.children[token] = _Node(self.length + 1, float(to_host(log_probs[row, token])))
        return self.children[token]


def token_alternatives(logits: Array, tokens: Sequence[int], count: int) -> list[TokenAlternatives]:
    """Return tokens with their log-probabilities and `count` alternatives, from logits (tokens, vocabulary)."""
    found: list[TokenAlternatives] = []
    for start in range(0, len(tokens), _MAX_ROWS):
        chosen = tokens[start : start + _MAX_ROWS]
        rows = logits[start : start + len(chosen), :]
        log_probs = log_softmax(rows)
        top = top_tokens(log_probs, max(1, count), None)
        values = to_host(log_probs)[np.arange(len(chosen)), np.asarray(chosen)].tolist()
        others = zip(top.tokens.tolist(), top.log_probs.tolist(), strict=True)
        found += [
            TokenAlternatives(token, value, list(zip(*pair, strict=True))[:count])
            for token, value, pair in zip(chosen, values, others, strict=True)
        ]
    return found
