"""Greedy search in steps of identical shapes, so that a GPU can run a step as one CUDA graph.

Launching the hundreds of small kernels of a step takes longer than running them; a CUDA graph is one launch. So
nothing in a step may depend on the host: tokens, counters and caches are arrays of fixed shape, updated in place, and
the host checks only every few steps whether all outputs have ended. Capturing a graph takes longer than many steps, so
the programs of a model are kept for later inputs of the same shapes, which are copied into their arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

from xformer.backends import (
    Array,
    accumulation_dtype,
    array_namespace,
    assign,
    dtype_name,
    index_dtype,
    is_writable,
    to_host,
)
from xformer.generation.batch import GenerationBatch
from xformer.generation.greedy_sampling import Sample, start_samples
from xformer.generation.hypothesis import Hypothesis, best_first
from xformer.generation.kept_programs import KeptPrograms
from xformer.generation.logits_processors import MinLength, SuppressTokens, log_sum_exp
from xformer.generation.scoring import score

_CHECK_INTERVAL = 16  # steps between checks; steps after the end of all outputs are wasted


def is_supported(batch: GenerationBatch) -> bool:
    """Return whether this is greedy search whose steps depend neither on earlier tokens nor on the host."""
    return (
        batch.config.method == "greedy"
        and all(isinstance(each, SuppressTokens | MinLength) for each in batch.logits_processors)
        and not batch.stopping_criteria
        and batch.lengths.unit_ranges is None
        and len(batch.suppress_tokens | batch.end_ids) < batch.model.vocab_size
    )


def static_greedy(batch: GenerationBatch, new_program: Callable[..., Any]) -> list[list[Hypothesis]]:
    """Choose the most probable token at each step, as greedy_or_sample does.

    Args:
        batch: Inputs that `is_supported`.
        new_program: `new_program(function, args, keywords)` calls a function and returns an object whose `run(())`
            repeats it, such as a `CudaProgram`.
    """
    steps, logits = batch.prefill()
    cache = steps.cache
    # If outputs can end, the token after the last allowed one shows whether they do.
    limits = [limits.maximum + int(bool(batch.end_ids)) for limits in batch.new_tokens]
    num_steps = max(1, *limits)
    state = _State(batch, batch.model.to_static(cache, cache.length + num_steps - 1), limits)
    key, program = state.key(), None
    kept = _kept.take(batch.model, key)
    if kept is not None:
        inputs, (state, program) = state, kept
        state.load(inputs)
    state.choose(logits)
    for number in range(1, num_steps):
        if number % _CHECK_INTERVAL == 0 and bool(to_host(state.ended).all()):
            break
        if program is None:
            program = new_program(_step, (batch.model, state), {})
        else:
            program.run(())
    results = [best_first(score(batch, [sample.hypothesis])) for sample in state.samples(batch)]
    if program is not None and is_writable(state.token):  # later inputs can be copied into the state
        _kept.keep(batch.model, key, (state, program), state.nbytes)
    return results


# Programs of steps, and the states that they change.
_kept: KeptPrograms[tuple[_State, Any]] = KeptPrograms(max_entries=8, max_bytes=2**30)


def _step(model: Any, state: _State) -> None:
    state.choose(model.decode_step(state.token, state.cache))


class _State:
    """The arrays that change from step to step, on the device.

    Attributes:
        token: Last token of each output, (inputs, 1).
        ended: Whether an output has ended, by eos or by its limit, (inputs,).
        tokens, log_probs: Tokens of all steps so far and their log-probabilities, (inputs, steps).
    """

    def __init__(self, batch: GenerationBatch, cache: Any, limits: list[int]) -> None:
        self.cache, xp = cache, batch.xp
        integers, steps, to_device = index_dtype(xp), max(1, *limits), batch.to_device
        self.token = to_device([[0]] * batch.num_inputs, integers)
        self.ended = to_device([False] * batch.num_inputs)
        self.tokens = to_device([[0] * steps] * batch.num_inputs, integers)
        self.log_probs = to_device([[0.0] * steps] * batch.num_inputs, accumulation_dtype(xp, batch.parameter.dtype))
        self._step = to_device([0], integers)
        self._numbers = to_device(list(range(steps)), integers)
        # Output i cannot end before step _min_steps[i].
        minimums = [max(0, limits.minimum) for limits in batch.new_tokens]
        self._min_steps = to_device(minimums, integers)
        self._last_step = to_device([limit - 1 for limit in limits], integers)
        vocabulary = range(batch.model.vocab_size)
        self._is_end = to_device([token in batch.end_ids for token in vocabulary])
        self._is_suppressed = to_device([token in batch.suppress_tokens for token in vocabulary])

    def arrays(self) -> list[Any]:
        """Return the arrays, None for those that are absent."""
        own = (value for name, value in vars(self).items() if name != "cache")
        return [*own, *self.cache.arrays()]

    def key(self) -> Hashable:
        """Return a key that states with the same steps share."""
        arrays = (None if array is None else (tuple(array.shape), dtype_name(array.dtype)) for array in self.arrays())
        return self.cache.length, *arrays

    @property
    def nbytes(self) -> int:
        """Size of the arrays."""
        return sum(array.nbytes for array in self.arrays() if array is not None)

    def load(self, other: _State) -> None:
        """Copy the arrays of a state with the same key."""
        for target, source in zip(self.arrays(), other.arrays(), strict=True):
            if target is not None and source is not None:
                assign(target, source)

    def choose(self, logits: Array) -> None:
        """Choose the next token of each output."""
        xp = array_namespace(logits)
        logits = xp.astype(logits, accumulation_dtype(xp, logits.dtype), copy=False)
        early = xp.expand_dims(self._step < self._min_steps, axis=1)
        masked = xp.logical_or(self._is_suppressed, xp.logical_and(early, self._is_end))
        logits = xp.where(masked, -math.inf, logits)
        chosen = xp.argmax(logits, axis=-1, keepdims=True)
        chosen_log_probs = xp.take_along_axis(logits, chosen, axis=-1) - log_sum_exp(logits)
        is_now = self._numbers == self._step
        self.tokens = assign(self.tokens, xp.where(is_now, chosen, self.tokens))
        self.log_probs = assign(self.log_probs, xp.where(is_now, chosen_log_probs, self.log_probs))
        ended = xp.logical_or(self.ended, self._step >= self._last_step)
        self.ended = assign(self.ended, xp.logical_or(ended, xp.take(self._is_end, chosen[:, 0])))
        self.token = assign(self.token, xp.astype(chosen, self.token.dtype, copy=False))
        self._step = assign(self._step, self._step + 1)

    def samples(self, batch: GenerationBatch) -> list[Sample]:
        """Return the outputs, rebuilt on the host token by token."""
        steps = int(to_host(self._step)[0])
        samples = [sample for (sample,) in start_samples(batch)]
        columns = to_host(self.tokens)[:, :steps].tolist(), to_host(self.log_probs)[:, :steps].tolist()
        for sample, tokens, log_probs in zip(samples, *columns, strict=True):
            for token, log_prob in zip(tokens, log_probs, strict=True):
                sample.append(token, log_prob, batch)
        return samples
