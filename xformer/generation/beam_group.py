"""One group of beams of one input, and the best of its finished hypotheses."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from xformer.generation.candidates import Candidate
from xformer.generation.hypothesis import Hypothesis


@dataclass
class Beam:
    """An unfinished hypothesis.

    Attributes:
        tokens: Prompt or prefix, and what followed.
        log_probability: Log-probability of the tokens.
        row: Its row in the cache.
        is_greedy: Whether greedy search would have chosen the same tokens.
    """

    tokens: list[int]
    log_probability: float
    row: int
    is_greedy: bool = False

    def extend(self, candidate: Candidate, *, is_greedy: bool = False) -> Beam:
        """Return the beam with one more token; its row is still that of its parent."""
        return Beam([*self.tokens, candidate.token], candidate.log_probability, self.row, is_greedy)


@dataclass
class BeamHypotheses:
    """The `size` best finished hypotheses, best first; of equal scores, the one that finished first."""

    size: int
    hypotheses: list[Hypothesis] = field(default_factory=list)

    @property
    def worst_score(self) -> float:
        """Score that a hypothesis has to exceed to be kept."""
        return self.hypotheses[-1].score if len(self.hypotheses) == self.size else -math.inf

    def add(self, hypothesis: Hypothesis) -> None:
        """Add a hypothesis if it is good enough."""
        if hypothesis.score > self.worst_score or len(self.hypotheses) < self.size:
            bisect.insort_right(self.hypotheses, hypothesis, key=lambda each: -each.score)
            del self.hypotheses[self.size :]


@dataclass
class BeamGroup:
    """A beam search of `size` beams for one input.

    Attributes:
        size: Number of beams.
        max_length: Maximum number of tokens, prompt included.
        max_length_penalty: lp of the longest possible hypothesis: its output tokens and eos.
        beams: Unfinished hypotheses.
        finished: Best finished hypotheses.
        is_too_long: Returns whether tokens exceed the limit in another unit than tokens; None without such a limit.
        truncated: Beams that reached the maximum length.
    """

    size: int
    max_length: int
    max_length_penalty: float
    beams: list[Beam]
    finished: BeamHypotheses
    is_too_long: Callable[[list[int]], bool] | None = None
    truncated: list[Beam] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """True if further steps cannot change the result.

        This holds without beams, or if enough hypotheses have finished and no beam can still exceed the worst of them:

        Let X be a beam with log-probability l <= 0, and Y any finished hypothesis that begins with X. Each further
        token has a log-probability of at most zero (see `LogitsProcessor`), so log P(Y) <= l. Since alpha >= 0,
        0 < lp(Y) <= m, where m is max_length_penalty. A number that is at most zero grows when divided by more:
        log P(Y) / lp(Y) <= l / lp(Y) <= l / m. The coverage penalty cp(Y) is at most zero, so score(Y) <= l / m. If
        that is not above the worst score kept, Y will not be kept: of equal scores the earlier one stays. Rounding
        preserves the order, as addition and division do.

        Groups after the first depend on the choices of earlier ones, so a group runs as long as any of its input does.
        """
        if not self.beams:
            return True
        best = max(beam.log_probability for beam in self.beams)
        return best / self.max_length_penalty <= self.finished.worst_score

    def advance(self, candidates: Sequence[Candidate], eos_id: int | None, greedy: Candidate | None) -> list[Beam]:
        """Extend the beams by one token and return the hypotheses that ended, without eos.

        A hypothesis ends if eos is among the `size` best candidates; with one beam this is greedy search, which then
        ends. At the maximum length no beam continues.

        Args:
            candidates: Best first, enough for `size` beams to continue: at least 2 * size, since each beam has one eos
                only, and all of them if some may be too long.
            eos_id: Token that ends a hypothesis.
            greedy: Candidate of greedy search, which is kept even if others are better.
        """
        parents = self.beams
        ended = [c for c in candidates[: self.size] if c.token == eos_id]
        valid: Iterable[Candidate] = (c for c in candidates if c.token != eos_id)
        if self.is_too_long is not None:
            valid = (c for c in valid if not self.is_too_long([*parents[c.beam].tokens, c.token]))
        chosen = list(itertools.islice(valid, self.size))
        if greedy is not None and greedy.token == eos_id:
            ended += [greedy] if greedy not in ended else []
        elif (
            greedy is not None
            and greedy not in chosen
            and (self.is_too_long is None or not self.is_too_long([*parents[greedy.beam].tokens, greedy.token]))
        ):
            chosen = [*chosen[: self.size - 1], greedy]
        if not chosen or len(parents[0].tokens) == self.max_length:
            self.truncated, chosen = parents, []
        if self.size == 1 and ended:
            chosen = []
        self.beams = [parents[c.beam].extend(c, is_greedy=c == greedy) for c in chosen]
        return [Beam(parents[c.beam].tokens, c.log_probability, parents[c.beam].row) for c in ended]
