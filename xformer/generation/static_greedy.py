"""Greedy search in steps that are all alike, so that a GPU can record one and repeat it (CUDA graphs).

Launching the hundreds of small kernels of a step takes longer than they run; a recorded step is launched as one. So
nothing of a step may depend on the host: tokens, counters and caches are arrays of one shape, written in place, and the
host looks only now and then whether all sentences have ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from xformer.backends import Array, accumulation_dtype, array_namespace, assign, index_dtype, to_host
from xformer.generation.greedy_sampling import Walk
from xformer.generation.hypothesis import Hypothesis, best_first
from xformer.generation.logits_processors import log_sum_exp
from xformer.generation.scoring import score
from xformer.generation.task import DecodingTask

_BETWEEN_LOOKS = 16  # steps; those beyond the end of all sentences are for nothing

Step = Callable[[], None]


def can_be_fixed(task: DecodingTask) -> bool:
    """Whether steps can be all alike: greedy, and nothing that they do depends on the tokens so far or on the host."""
    options, config = task.options, task.model.config
    return (
        options.method == "greedy"
        and options.repetition_penalty == 1.0
        and not options.no_repeat_ngram_size
        and task.foci is None
        and task.measured is None
        and all(len(prefix) == task.lead for prefix in task.prefixes)  # none is forced later
        and config.window is None
        and len(task.closed) < task.model.vocab_size
    )


def search_fixed(task: DecodingTask, record: Callable[[Step], Step]) -> list[list[Hypothesis]]:
    """At each step take the most probable token, as search_stepwise does.

    record: makes of a step one that does the same again; the arrays that it writes stay where they are.
    """
    cache, logits = task.start()
    # Where outputs can end, the token after the last one that is allowed shows whether they would.
    limits = [limits.maximum - task.lead + int(task.eos_id is not None) for limits in task.ranges]
    most = max(1, *limits)
    state = _State(task, task.model.to_static(cache, cache.length + most - 1), limits)
    state.choose(logits)

    def step() -> None:
        state.choose(task.model.decode_step(state.token, state.cache))

    again = record(step) if most > 1 else step
    for number in range(1, most):
        if number % _BETWEEN_LOOKS == 0 and bool(to_host(state.ended).all()):
            break
        again()
    return [best_first(score(task, [walk.path])) for walk in state.walks()]


class _State:
    """What changes from step to step, on the device.

    limits: how many tokens each sentence may take. token: the last one of each, (sentences, 1). ended: where that was
    eos or the last that is allowed, (sentences,). tokens, gains: of every step so far, (sentences, steps).
    """

    def __init__(self, task: DecodingTask, cache: Any, limits: list[int]) -> None:
        self.task, self.cache, xp = task, cache, task.xp
        integers, steps = index_dtype(xp), max(1, *limits)
        self.token = task.place([[0]] * task.sentences, integers)
        self.ended = task.place([False] * task.sentences)
        self.tokens = task.place([[0] * steps] * task.sentences, integers)
        self.gains = task.place([[0.0] * steps] * task.sentences, accumulation_dtype(xp, task.home.dtype))
        self._step = task.place([0], integers)
        self._numbers = task.place(list(range(steps)), integers)
        # Of sentence i, no eos before step _least[i].
        self._least = task.place([max(0, limits.minimum - task.lead) for limits in task.ranges], integers)
        vocabulary = range(task.model.vocab_size)
        self._last = task.place([limit - 1 for limit in limits], integers)
        self._eos = task.place([token == task.eos_id for token in vocabulary])
        self._never = task.place([token in task.never for token in vocabulary])

    def choose(self, logits: Array) -> None:
        """Take each sentence's next token."""
        xp = array_namespace(logits)
        logits = xp.astype(logits, accumulation_dtype(xp, logits.dtype), copy=False)
        early = xp.expand_dims(self._step < self._least, axis=1)
        logits = xp.where(xp.logical_or(self._never, xp.logical_and(early, self._eos)), -math.inf, logits)
        chosen = xp.argmax(logits, axis=-1, keepdims=True)
        gained = xp.take_along_axis(logits, chosen, axis=-1) - log_sum_exp(logits)
        here = self._numbers == self._step
        self.tokens = assign(self.tokens, xp.where(here, chosen, self.tokens))
        self.gains = assign(self.gains, xp.where(here, gained, self.gains))
        ended = xp.logical_or(self.ended, self._step >= self._last)
        if self.task.eos_id is not None:
            ended = xp.logical_or(ended, chosen[:, 0] == self.task.eos_id)
        self.ended = assign(self.ended, ended)
        self.token = assign(self.token, xp.astype(chosen, self.token.dtype, copy=False))
        self._step = assign(self._step, self._step + 1)

    def walks(self) -> list[Walk]:
        """What the sentences became, followed on the host token by token."""
        taken = int(to_host(self._step)[0])
        walks = [Walk(sentence, 0, list(prefix)) for sentence, prefix in enumerate(self.task.prefixes)]
        histories = to_host(self.tokens)[:, :taken].tolist(), to_host(self.gains)[:, :taken].tolist()
        for walk, tokens, gains in zip(walks, *histories, strict=True):
            for token, gain in zip(tokens, gains, strict=True):
                walk.follow(token, gain, self.task)
        return walks
