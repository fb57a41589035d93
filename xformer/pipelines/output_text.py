"""The text of an output while its tokens arrive: whole characters, stop strings, and the bytes of each token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from xformer.errors import DataError
from xformer.generation import GenerationConfig, Hypothesis, length_penalty
from xformer.generation.processors import Rows, TokenAlternatives, TokenRecord
from xformer.pipelines.options import SearchArguments
from xformer.tokenizers.streaming import DecodeStream, text_after

_MAX_STOP_STRINGS = 16


class Token(NamedTuple):
    """A token of a text.

    Attributes:
        id: Its id.
        piece: Its entry in the vocabulary.
        text: Its text after the tokens before it; empty for a part of a character that later tokens complete. Texts of
            successive tokens concatenate to the whole text.
        bytes: Its bytes, also those of a part of a character.
        log_probability: Its log-probability; None if it is not known.
        alternatives: The most probable tokens in its place, best first.
    """

    id: int
    piece: str
    text: str
    bytes: bytes
    log_probability: float | None = None
    alternatives: Sequence[Token] = ()


class Output(NamedTuple):
    """One output for one text.

    Attributes:
        text: The text; for a language model without the prompt.
        tokens: Its token ids.
        log_probability: See `generation.Hypothesis`.
        score: See `generation.Hypothesis`.
        finished: See `generation.Hypothesis`.
        alignment: For each token the index of the source token (eos included) that it attends to most, if requested;
            see `generation.alignments`.
        logprobs: The tokens of the text with their log-probabilities and alternatives, if requested.
        logits_sha256: Hash of the logits that the tokens were chosen from, if the server requests it.
    """

    text: str
    tokens: list[int]
    log_probability: float
    score: float
    finished: bool
    alignment: list[int] | None = None
    logprobs: list[Token] | None = None
    logits_sha256: str | None = None

    @property
    def finish_reason(self) -> str:
        """The reason why the text ended: "stop", or "length" if it was truncated at the maximum length."""
        return "stop" if self.finished else "length"


Outputs = list[list[Output]]  # of each text
OnText = Callable[[int, str, list[Token]], None]
"""Function of the index of a text, a new part of it, and the tokens of that part if they are recorded."""


class OutputText:
    """The text of an output, which ends before the first stop string.

    Args:
        tokenizer: Tokenizer of the output.
        prompt: Ids before the output.
        stop: Stop strings.

    Attributes:
        text: The text so far, without an end that may begin a stop string.
        is_stopped: True once a stop string has been generated.
        is_finished: True after `finish`.

    Examples:
        >>> class Characters:
        ...     decode = staticmethod(lambda ids: "".join(map(chr, ids)))
        >>> output = OutputText(Characters, stop=["END"])
        >>> [output.push([ord(each)]) for each in "an ENtry END."], output.is_stopped
        (['a', 'n', ' ', '', '', 'ENt', 'r', 'y', ' ', '', '', '', ''], True)
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        self.text, self.is_stopped, self.is_finished = "", False, False
        self._tokenizer, self._prompt, self._stop = tokenizer, list(prompt), stop
        cleans_up_spaces = getattr(tokenizer, "cleans_up_spaces", False)
        self._decoder = DecodeStream(tokenizer.decode, prompt, cleans_up_spaces=cleans_up_spaces)
        self._ids: list[int] = []
        self._texts: list[str] = []  # of each token
        self._pending = ""  # may begin a stop string
        self._num_described = self._num_characters = 0  # of the tokens that `tokens` has returned

    def __len__(self) -> int:
        return len(self._ids)

    def push(self, ids: Sequence[int]) -> str:
        """Append ids and return the new text."""
        new = [self._decoder.step(index) for index in ids]
        self._ids += ids
        self._texts += new
        return self._emit("".join(new))

    def finish(self) -> str:
        """Return the rest of the text, such as an incomplete character."""
        self.is_finished, rest = True, self._decoder.finish()
        if self._texts:
            self._texts[-1] += rest
        return self._emit(rest)

    def _emit(self, new: str) -> str:
        if self.is_stopped:
            return ""
        text = self._pending + new
        ends = [position for each in self._stop if (position := text.find(each)) >= 0]
        held = 0
        if ends:
            self.is_stopped, text = True, text[: min(ends)]
        elif not self.is_finished:
            held = max((overlap(text, each) for each in self._stop), default=0)
        self._pending = text[len(text) - held :]
        text = text[: len(text) - held]
        self.text += text
        return text

    def tokens(self, steps: Sequence[TokenAlternatives]) -> list[Token]:
        """Return the tokens whose text is complete, without those of the last call.

        Args:
            steps: Log-probabilities of all tokens so far, those of the last call included; a forced prefix has none.
        """
        found: list[Token] = []
        first, end, length = len(self._ids) - len(steps), self._num_described, self._num_characters
        for position in range(end, len(self._ids)):
            is_last = self.is_stopped and length >= len(self.text)
            length += len(self._texts[position])
            is_complete = bool(self._texts[position]) and (length <= len(self.text) or self.is_stopped)
            if not is_last and (is_complete or (self.is_finished and not self.is_stopped)):
                end = position + 1  # tokens without text wait for the next one
        for position in range(self._num_described, end):
            text = self._texts[position][: len(self.text) - self._num_characters]
            self._num_characters += len(text)
            token = self._token(position, text, steps[position - first] if position >= first else None)
            if len(text) < len(self._texts[position]):  # cut before a stop string; bytes of earlier tokens come first
                token = token._replace(bytes=text.lstrip("\ufffd").encode())
            found.append(token)
        self._num_described = end
        return found

    def _token(self, position: int, text: str, step: TokenAlternatives | None) -> Token:
        tokenizer, token = self._tokenizer, self._ids[position]
        alternatives = [] if step is None else step.alternatives
        before = [*self._prompt, *self._ids[:position]][-4:] if position < 4 else self._ids[position - 4 : position]
        start, *texts = tokenizer.decode_batch([before, *([*before, other] for other, _ in alternatives)])
        piece, *pieces = pieces_of(tokenizer, [token, *(other for other, _ in alternatives)])
        others = []
        for (other, value), each, name in zip(alternatives, texts, pieces, strict=True):
            shown = text if other == token else text_after(start, each)
            others.append(Token(other, name, shown, bytes_of_token(tokenizer, other, shown), value))
        data = bytes_of_token(tokenizer, token, text)
        return Token(token, piece, text, data, None if step is None else step.log_probability, others)


def tokens_of(
    tokenizer: Any, ids: Sequence[int], prompt: Sequence[int] = (), steps: Sequence[TokenAlternatives] = ()
) -> list[Token]:
    """Return the tokens of ids, after those of a prompt."""
    output = OutputText(tokenizer, prompt)
    output.push(ids)
    output.finish()
    return output.tokens(steps)


def pieces_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the entries of ids in the vocabulary; those of unused rows of an embedding are empty."""
    return [piece or "" for piece in tokenizer.tokens(ids)]


def bytes_of_token(tokenizer: Any, token: int, text: str) -> bytes:
    """Return the bytes of a token: those of its text, unless it is, or ends, a part of a character."""
    if "\ufffd" not in text + tokenizer.decode([token]):
        return text.encode()
    return bytes(tokenizer.token_bytes(token))


def stop_strings(stop: str | Sequence[str] | None) -> list[str]:
    """Return stop strings as a list; raise DataError for empty ones and too many."""
    strings = [stop] if isinstance(stop, str) else list(stop or ())
    if len(strings) > _MAX_STOP_STRINGS or not all(isinstance(each, str) and each for each in strings):
        raise DataError(f"stop is {stop!r:.80}; expected up to {_MAX_STOP_STRINGS} texts that are not empty")
    return strings


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest beginning of `stop`, but not all of it, that the text ends with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


@dataclass
class GeneratedText:
    """A text during generation.

    Attributes:
        tokenizer: Tokenizer of the text.
        index: Index of its prompt or source.
        stream: Index of its random stream.
        stop: Stop strings.
        on_text: Receives its parts.
        prompt: Token ids of the prompt.
        limit: Number of new tokens that complete it.
        phrases: Favored phrases.
        context: What the model sees at the start of a chunk.
        record: The record of a chunk.
        tokens: Tokens of the chunks that have ended.
        steps: Their record.
        log_probability: Their log-probability.
        outputs: The results; none until the text is complete.
    """

    tokenizer: Any
    index: int
    stream: int
    stop: list[str]
    on_text: OnText | None
    prompt: list[int] = field(default_factory=list)
    limit: int = 0
    phrases: list[list[list[int]]] | None = None
    context: list[int] = field(default_factory=list)
    record: TokenRecord | None = None
    tokens: list[int] = field(default_factory=list)
    steps: list[TokenAlternatives] = field(default_factory=list)
    log_probability: float = 0.0
    outputs: list[Output] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.text, self.described = OutputText(self.tokenizer, self.prompt, self.stop), list[Token]()

    def begin_chunk(self, window: int) -> int:
        """Set the context that the model sees; return the number of tokens to generate after it."""
        tokens = [*self.prompt, *self.tokens]
        self.context = tokens if len(tokens) < window else tokens[-(window // 2) :]
        return min(self.limit - len(self.tokens), window - len(self.context))

    @property
    def is_observed(self) -> bool:
        """True if each new token matters."""
        return bool(self.stop or self.on_text or self.record)

    def observe(self, rows: Rows, row: int) -> bool:
        """Emit the text of new tokens; return True if a stop string ends the text."""
        count = int(rows.lengths[row]) - len(self.context) - (len(self.text) - len(self.tokens))
        shown = self.text.push(rows.tokens[row, -count:].tolist())
        self._emit(shown, rows.history(row)[len(self.context) :] if self.record else [])
        return self.text.is_stopped

    def has_stop_string(self, rows: Rows, row: int) -> bool:
        """Return True if the last tokens of a beam have a stop string."""
        if not self.stop:
            return False
        count = 4 * max(map(len, self.stop)) + 4  # a character has at most 4 tokens
        new = rows.tokens[row, -min(count, int(rows.lengths[row]) - len(self.prompt)) :].tolist()
        return any(each in self.tokenizer.decode(new) for each in self.stop)

    def extend(self, hypotheses: Sequence[Hypothesis], config: GenerationConfig) -> None:
        """Append the tokens of a chunk; beam search gives several hypotheses for its only chunk."""
        others = [dataclasses.replace(self, on_text=None, outputs=[]) for _ in hypotheses[1:]]
        for text, hypothesis in zip([self, *others], hypotheses, strict=True):
            text._append(hypothesis, config)
        self.outputs += [output for text in others for output in text.outputs]

    def _append(self, new: Hypothesis, config: GenerationConfig) -> None:
        if self.is_observed:
            shown = self.text.push(new.tokens[len(self.text) - len(self.tokens) :])
        finished = new.finished or self.text.is_stopped
        is_done = finished or len(self.tokens) + len(new.tokens) >= self.limit
        if self.is_observed:
            self._emit(shown + (self.text.finish() if is_done else ""), new.tokens)
        is_first, score = not self.tokens, new.score
        self.tokens, self.log_probability = [*self.tokens, *new.tokens], self.log_probability + new.log_probability
        if self.record is not None:
            self.steps = [*self.steps, *self.record.steps(self.stream, self.context, new.tokens)]
        if is_done:
            if not is_first:
                length = len(self.tokens) + new.finished
                score = self.log_probability / length_penalty(length, config.length_penalty, config.length_penalty_base)
            logprobs = None if self.record is None else self.described
            text = self.text.text if self.is_observed else self._decode()
            self.outputs.append(Output(text, self.tokens, self.log_probability, score, finished, logprobs=logprobs))

    def _decode(self) -> str:
        # The space before a word belongs to its token, and the first one of a text is dropped: decode both.
        before, text = self.tokenizer.decode_batch([self.prompt, [*self.prompt, *self.tokens]])
        return text_after(before, text)

    def _emit(self, text: str, new: list[int]) -> None:
        described = []
        if self.record is not None and (self.on_text is not None or self.text.is_finished):
            described = self.text.tokens([*self.steps, *self.record.steps(self.stream, self.context, new)])
            self.described += described
        if self.on_text is not None and (text or described):
            self.on_text(self.index, text, described)


def hooks(texts: Sequence[GeneratedText], config: GenerationConfig, arguments: SearchArguments) -> dict[str, Any]:
    """Return the arguments of a search that concern its texts: it passes new tokens to them, and ends them.

    Args:
        texts: Texts that the search continues, with the same stop strings.
        config: Settings of the search.
        arguments: Arguments of the caller.
    """
    logits_processors, stopping_criteria = arguments.logits_processors, arguments.stopping_criteria
    if arguments.logprobs is not None:
        record = TokenRecord(arguments.logprobs)
        logits_processors, stopping_criteria = [*logits_processors, record], [*stopping_criteria, record.observe]
        for text in texts:
            text.record = record
    by_stream = {text.stream: text for text in texts}
    is_single = config.method != "beam" and config.num_return_sequences == 1
    observe = GeneratedText.observe if is_single else GeneratedText.has_stop_string

    def criterion(tokens: Any, lengths: Any, rows: Rows) -> list[bool]:
        return [observe(by_stream[stream], rows, row) for row, stream in enumerate(rows.indices.tolist())]

    if any(text.is_observed for text in texts):
        stopping_criteria = [*stopping_criteria, criterion]
    own = {"indices": [text.stream for text in texts], "beam_history": arguments.beam_history}
    return {**own, "logits_processors": logits_processors, "stopping_criteria": stopping_criteria}
