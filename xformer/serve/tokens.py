"""Token ids as JSON, and text that is sent as it is generated."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from xformer.generation import TokenAlternatives
from xformer.tokenizers import DecodeStream

Json = dict[str, Any]
_LOWEST = -1e9  # JSON has no infinity
# The characters that stand for bytes in the pieces of byte-level tokenizers: printable ones stand for themselves.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTES = {chr(byte): byte for byte in _PRINTABLE}
_BYTES |= {chr(256 + i): byte for i, byte in enumerate(each for each in range(256) if each not in _PRINTABLE)}


def texts_of_tokens(tokenizer: Any, ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    """Return the text of each token, with its leading space; joined they are the text of all tokens."""
    stream = DecodeStream(tokenizer.decode, prompt)
    texts = [stream.step(index) for index in ids]
    if texts:
        texts[-1] += stream.finish()
    return texts


def tokens_json(tokenizer: Any, ids: Sequence[int], prompt: Sequence[int] = ()) -> list[Json]:
    """Return ids as JSON: id, token (the piece of the vocabulary) and text."""
    rows = zip(ids, pieces(tokenizer, ids), texts_of_tokens(tokenizer, ids, prompt), strict=True)
    return [{"id": int(index), "token": token, "text": text} for index, token, text in rows]


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the pieces of the vocabulary; those of unused rows of an embedding are empty."""
    return [token or "" for token in tokenizer.tokens(ids)]


def candidate_text(tokenizer: Any, token: int) -> str:
    """Return the text of a single token, with its leading space."""
    text = str(tokenizer.decode([token]))
    begins_word = pieces(tokenizer, [token])[0].startswith("▁")
    return f" {text}" if begins_word and text and not text.startswith(" ") else text


def bytes_of_token(tokenizer: Any, token: int, text: str) -> bytes:
    """Return the bytes of a token: those of its text, unless it is, or ends, a part of a character."""
    if "\ufffd" not in text + tokenizer.decode([token]):
        return text.encode()
    piece = pieces(tokenizer, [token])[0]
    if re.fullmatch("<0x[0-9A-F]{2}>", piece):
        return bytes.fromhex(piece[3:5])
    return (
        bytes(_BYTES[each] for each in piece)
        if set(piece) <= _BYTES.keys()
        else candidate_text(tokenizer, token).encode()
    )


def finite(value: float) -> float:
    """Return a log-probability that JSON can hold."""
    return max(value, _LOWEST)


class TokenJson:
    """The generated tokens of one output as JSON, with their probabilities and alternatives.

    Args:
        tokenizer: Tokenizer of the output.
        prompt: Prompt of a language model, after which the text of the first token begins.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()) -> None:
        self.tokenizer, self.prompt = tokenizer, list(prompt)
        self._stream = DecodeStream(tokenizer.decode, prompt)
        self._before = list(prompt)[-4:]

    def step(self, step: TokenAlternatives) -> Json:
        """Return the JSON of the next token."""
        before = self.tokenizer.decode(self._before)
        sequences = [[*self._before, token] for token, _ in step.alternatives]
        texts = [text[len(before) :] for text in self.tokenizer.decode_batch(sequences)]
        names = pieces(self.tokenizer, [step.token, *(token for token, _ in step.alternatives)])
        self._before = [*self._before, step.token][-4:]
        return {
            **_probability_json(step.token, names[0], self._stream.step(step.token), step.log_probability),
            "alternatives": [
                _probability_json(token, name, text, value)
                for (token, value), name, text in zip(step.alternatives, names[1:], texts, strict=True)
            ],
        }

    def finish(self) -> str:
        """Return the rest of the text, such as an incomplete character."""
        return self._stream.finish()


def _probability_json(token: int, name: str, text: str, log_probability: float) -> Json:
    value = finite(log_probability)
    return {
        "id": token,
        "token": name,
        "text": text,
        "log_probability": value,
        "probability": math.exp(min(value, 0.0)),
    }


class TextStream:
    """The text of an output, which ends before the first stop text.

    Args:
        decode: Function from ids to text.
        prompt: Ids before the output.
        stop: Texts that end the output.

    Attributes:
        text: The text so far, without an end that may begin a stop text.
        is_stopped: True once a stop text has been generated.

    Example:
        >>> stream = TextStream(lambda ids: "".join(map(chr, ids)), stop=["END"])
        >>> [stream.push([ord(each)]) for each in "an ENtry END."], stream.is_stopped
        (['a', 'n', ' ', '', '', 'ENt', 'r', 'y', ' ', '', '', '', ''], True)
    """

    def __init__(
        self, decode: Callable[[list[int]], str], prompt: Sequence[int] = (), stop: Sequence[str] = ()
    ) -> None:
        self.text, self.is_stopped, self.num_tokens = "", False, 0
        self._stop = [each for each in stop if each]
        self._decoder = DecodeStream(decode, prompt)
        self._pending = ""

    def push(self, ids: Sequence[int]) -> str:
        """Append ids and return the new text."""
        self.num_tokens += len(ids)
        return self._emit(self._decoder.step(*ids), is_last=False) if ids else ""

    def finish(self) -> str:
        """Return the rest of the text."""
        return self._emit(self._decoder.finish(), is_last=True)

    def _emit(self, new: str, *, is_last: bool) -> str:
        if self.is_stopped:
            return ""
        text = self._pending + new
        ends = [position for each in self._stop if (position := text.find(each)) >= 0]
        held = 0
        if ends:
            self.is_stopped, text = True, text[: min(ends)]
        elif not is_last:
            held = max((_overlap(text, each) for each in self._stop), default=0)
        self._pending = text[len(text) - held :]
        text = text[: len(text) - held]
        self.text += text
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest beginning of `stop` that the text ends with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
