"""Keys and values of prompt prefixes, reused by later prompts."""

from __future__ import annotations

import hashlib
import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xformer.backends import Array, array_namespace
from xformer.config import check_count
from xformer.layers.cache import DecodingCache
from xformer.models import LanguageModel
from xformer.tracing.activations import is_observing

CHUNK = 64
"""Tokens that enter the model together. Every prompt enters it in the same chunks, cached or not, so that each product
has the same shape, and a cached prompt gives bit-identical results."""

_Block = list[tuple[Array, Array]]  # keys and values of each layer, (1, heads, CHUNK, head_dim)


class PrefixCache:
    """Keys and values of prompts of one model, so that a system prompt or the turns of a chat are computed once.

    Pass it to `generate(..., prefix_cache=...)`; a `TextGenerator` has one. It serves calls with a single prompt of
    more than 64 tokens, of one or several samples, and threads may share it. The least recently used blocks are evicted
    first. Call `clear` after changing weights in place; the blocks of another model are dropped anyway.

    Args:
        max_bytes: Maximum size of the keys and values.
    """

    def __init__(self, max_bytes: int = 2**28) -> None:
        check_count("max_bytes", max_bytes)
        self.max_bytes = max_bytes
        self._blocks: OrderedDict[bytes, tuple[_Block, int]] = OrderedDict()
        self._model: Any = None
        self._lock = threading.Lock()
        self.num_reused = 0  # tokens

    def __reduce__(self) -> Any:
        return PrefixCache, (self.max_bytes,)  # copies are empty

    @property
    def num_bytes(self) -> int:
        """Size of the keys and values."""
        return sum(size for _, size in list(self._blocks.values()))

    def clear(self) -> None:
        """Drop all blocks."""
        with self._lock:
            self._blocks.clear()

    def serves(self, model: Any, prompts: Sequence[Sequence[int]]) -> bool:
        """Return whether the cache can be used for these prompts."""
        if len(prompts) != 1 or len(prompts[0]) <= CHUNK or not isinstance(model, LanguageModel) or is_observing():
            return False
        scaling = model.config.rope_scaling or {}
        # The rotations of a long text differ from those of its beginning.
        return scaling.get("rope_type") != "longrope" or len(prompts[0]) <= scaling["original_max_position_embeddings"]

    def prefill(
        self, model: Any, prompt: Sequence[int], cache: DecodingCache, to_device: Callable[[Any], Array]
    ) -> int:
        """Enter the beginning of a prompt into an empty cache, and return its number of tokens.

        Args:
            model: The model.
            prompt: Ids; at least one of them is left.
            cache: Cache with one row.
            to_device: Moves nested lists of ids to the device of the model.
        """
        end = (len(prompt) - 1) // CHUNK * CHUNK
        chunks = [list(prompt[start : start + CHUNK]) for start in range(0, end, CHUNK)]
        keys, digest = [], b""
        for chunk in chunks:
            digest = hashlib.sha256(digest + np.asarray(chunk, dtype=np.int64).tobytes()).digest()
            keys.append(digest)
        known = self._find(model, keys)
        if known:
            for layer, pairs in zip(cache.layers, zip(*known, strict=True), strict=True):
                xp = array_namespace(pairs[0][0])
                layer.self_attention.append(*(xp.concat(list(arrays), axis=2) for arrays in zip(*pairs, strict=True)))
            cache.advance(len(known) * CHUNK)
            self.num_reused += len(known) * CHUNK
        new = []
        for chunk in chunks[len(known) :]:
            model.decode_step(to_device([chunk]), cache)
            new.append([_last(layer.self_attention) for layer in cache.layers])
        self._keep(model, keys, new)
        return end

    def _find(self, model: Any, keys: Sequence[bytes]) -> list[_Block]:
        """Return the blocks of the longest known beginning."""
        with self._lock:
            if self._model is None or self._model() is not model:
                self._blocks.clear()
                self._model = weakref.ref(model)
            count = next((count for count, key in enumerate(keys) if key not in self._blocks), len(keys))
            return [self._blocks[key][0] for key in keys[:count]]

    def _keep(self, model: Any, keys: Sequence[bytes], new: Sequence[_Block]) -> None:
        """Keep the new blocks of a prompt, and evict the least recently used."""
        with self._lock:
            if self._model() is not model:
                return
            for key, block in zip(keys[len(keys) - len(new) :], new, strict=True):
                self._blocks[key] = block, sum(_nbytes(array) for pair in block for array in pair)
            for key in reversed(keys):  # evict suffixes first: a block is useless without those before it
                if key in self._blocks:
                    self._blocks.move_to_end(key)
            while self.num_bytes > self.max_bytes:
                self._blocks.popitem(last=False)


def _last(cache: Any) -> tuple[Array, Array]:
    """Return copies of the keys and values of the last chunk."""
    xp = array_namespace(cache.key)
    key, value = (xp.asarray(x[:, :, x.shape[2] - CHUNK :, :], copy=True) for x in (cache.key, cache.value))
    return key, value


def _nbytes(array: Array) -> int:
    return math.prod(array.shape) * array_namespace(array).finfo(array.dtype).bits // 8
