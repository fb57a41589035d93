"""Decoding of token ids that arrive one by one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

# The end of a text that the next tokens may change if the tokenizer cleans up spaces, as in "do n't".
_UNCLEAN = re.compile(r" (n'?|'[rv]?)?\Z")
_REPLACEMENT = "\ufffd"  # the end of a text whose last character is not complete
_MAX_PENDING = 16  # tokens; a character has at most 4 bytes


class DecodeStream:
    """Decode token ids as they arrive, in time linear in their number.

    The yielded texts concatenate to the text of all ids, without that of the prompt. A character that takes several
    tokens is returned once it is complete. Only the last tokens are decoded again with a new one, since the text of a
    token may depend on the one before it: the spaces between words, and characters of several tokens.

    Args:
        decode: Function from ids to text, such as `tokenizer.decode`.
        prompt: Ids before the first one, whose text is not returned.
        cleans_up_spaces: The function removes spaces before punctuation, as tokenizers with that attribute do.

    Examples:
        >>> stream = DecodeStream(lambda ids: bytes(ids).decode(errors="replace"), prompt=b"in ")
        >>> [stream.step(byte) for byte in "Köln".encode()], stream.finish()
        (['K', '', 'ö', 'l', 'n'], '')
    """

    def __init__(
        self, decode: Callable[[list[int]], str], prompt: Iterable[int] = (), *, cleans_up_spaces: bool = False
    ) -> None:
        self._decode, self._cleans_up_spaces = decode, cleans_up_spaces
        # The text of ids[:end] has been returned; `ids` begins with the tokens that are decoded again.
        self._ids = list(prompt)[-_MAX_PENDING:]
        self._end = len(self._ids)
        self._decoded = decode(self._ids)
        self._pending = ""

    def step(self, *ids: int) -> str:
        """Append ids and return the text that is complete, which may be empty."""
        self._ids += ids
        text = text_after(self._decoded, self._decode(self._ids))
        self._pending = text
        is_open = text.endswith(_REPLACEMENT) or (self._cleans_up_spaces and _UNCLEAN.search(text))
        if not text or (is_open and len(self._ids) - self._end < _MAX_PENDING):
            return ""
        self._ids, self._pending = self._ids[self._end :], ""
        self._end = len(self._ids)
        self._decoded = self._decode(self._ids)
        return text

    def finish(self) -> str:
        """Return the rest of the text, such as an incomplete character."""
        rest, self._pending = self._pending, ""
        return rest


def text_after(before: str, text: str) -> str:
    """Return the rest of a text, with the character that the tokens of its beginning, `before`, end within.

    Examples:
        >>> text_after("caf\ufffd", "café au lait")
        'é au lait'
    """
    while before.endswith(_REPLACEMENT) and not text.startswith(before):
        before = before[:-1]
    return text[len(before) :]
