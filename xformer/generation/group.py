"""One group of beams of one sentence: its live hypotheses, and the best of those that ended."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from xformer.generation.candidates import Candidate
from xformer.generation.hypothesis import Hypothesis, length_penalty


@dataclass
class Live:
    """A hypothesis that goes on. row: its row in the cache; greedy: it is what greedy search has so far."""

    tokens: list[int]
    log_probability: float
    row: int
    greedy: bool = False

    def extend(self, candidate: Candidate, *, greedy: bool = False) -> Live:
        """The hypothesis with one more token; its row is still that of its parent."""
        return Live([*self.tokens, candidate.token], candidate.log_probability, self.row, greedy)


@dataclass
class Finished:
    """The `size` best hypotheses that ended, best first; of equal ones, the one that ended first."""

    size: int
    hypotheses: list[Hypothesis] = field(default_factory=list)

    @property
    def worst(self) -> float:
        """What a score has to be above to get in."""
        return self.hypotheses[-1].score if len(self.hypotheses) == self.size else -math.inf

    def add(self, hypothesis: Hypothesis) -> None:
        """Let a hypothesis in, if it is good enough."""
        if hypothesis.score > self.worst or len(self.hypotheses) < self.size:
            bisect.insort_right(self.hypotheses, hypothesis, key=lambda kept: -kept.score)
            del self.hypotheses[self.size :]


@dataclass
class Group:
    """A beam search of its own, of `size` hypotheses, within a sentence."""

    size: int
    limit: int  # tokens that a hypothesis may have
    fits: Callable[[list[int]], bool]  # whether it may begin with these
    longest: int  # |Y| of the longest hypothesis: its tokens that count, and eos
    alpha: float
    live: list[Live]
    finished: Finished
    cut: list[Live] = field(default_factory=list)  # what the limit stopped

    @property
    def needs_more(self) -> bool:
        """Whether going on could change the result.

        It could not when nothing is live, or when as many hypotheses ended as are wanted and no live one can still
        beat the worst of them:

        Let X be live, with log-probability l <= 0, and Y any hypothesis that ends and begins with X. Each further
        token has a log-probability of at most zero, so log P(Y) <= l. Since |Y| <= longest and alpha >= 0,
        0 < lp(Y) <= lp(longest), and a number that is at most zero grows when divided by more:
        log P(Y) / lp(Y) <= l / lp(Y) <= l / lp(longest). The coverage penalty cp(Y) is at most zero. Therefore
        score(Y) <= l / lp(longest), and if that is not above the worst score kept, Y will not get in: equal scores
        leave those in that came first. Rounding keeps the order, as addition and division do.

        Groups after the first see what earlier ones chose, so a group goes on as long as any of its sentence does.
        """
        if not self.live:
            return False
        best = max(hypothesis.log_probability for hypothesis in self.live)
        return best / length_penalty(self.longest, self.alpha) > self.finished.worst

    def advance(self, candidates: Sequence[Candidate], eos_id: int | None, greedy: Candidate | None) -> list[Live]:
        """Take one token more; return the hypotheses that ended, without their eos.

        candidates: best first, enough that as many as there are beams go on: at least twice as many, since each
        hypothesis can end in one way only, and all of them where some may not fit. A hypothesis ends when eos is among
        the `size` best candidates; a group of one is greedy search, and done with that. At the limit none goes on, and
        none does that no longer fits. greedy: the candidate of greedy search, which is kept even when others are
        better.
        """
        parents = self.live
        ended = [c for c in candidates[: self.size] if c.token == eos_id]
        fitting = (c for c in candidates if c.token != eos_id and self.fits([*parents[c.place].tokens, c.token]))
        going = list(itertools.islice(fitting, self.size))
        if greedy is not None and greedy.token == eos_id:
            ended += [greedy] if greedy not in ended else []
        elif greedy is not None and greedy not in going and self.fits([*parents[greedy.place].tokens, greedy.token]):
            going = [*going[: self.size - 1], greedy]
        if not going or len(parents[0].tokens) == self.limit:
            self.cut, going = parents, []
        if self.size == 1 and ended:
            going = []
        self.live = [parents[c.place].extend(c, greedy=c == greedy) for c in going]
        return [Live(parents[c.place].tokens, c.log_probability, parents[c.place].row) for c in ended]
