"""Beam search, batched over inputs.

Rows of the cache are beams, num_beams per input; keys and values of an encoded source exist once per input. The beams
of an input have the same number of tokens at any time. Finished inputs leave the batch.

Each step reads the best few tokens of each beam; everything else happens on the host. That includes diverse groups,
which depend on each other: the earlier groups of an input choose at most as many tokens as they have beams, and only
these are penalized, so the 2 * size best candidates after the penalty are among the 2 * size + chosen best of their
rows before it.

A hypothesis may end if eos is among the `size` best candidates, as in other implementations. Near a target length that
is not enough: few beams end exactly there. Within the range every beam therefore also yields a finished hypothesis,
with its true log-probability, and the result is the best complete output of such a length in the beam, never the
beginning of a longer one.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xformer.backends import Array
from xformer.generation.batch import GenerationBatch, NextTokens, Steps
from xformer.generation.config import DEFAULT_DIVERSITY_PENALTY
from xformer.generation.processors import Rows, TopTokens, top_tokens
from xformer.generation.results import BeamCandidate, Hypothesis, UnscoredHypothesis, best_first


@dataclass
class Beam:
    """A hypothesis: what a row holds, and one more token. Once a step has been made, a row of its own holds all of it.

    Attributes:
        log_probability: Log-probability of all tokens.
        row: The row.
        token: Last token; -1 before the first one.
        is_greedy: Whether greedy search would have chosen the same tokens.
        position: Index among the candidates of its step; None: they are not recorded.
    """

    log_probability: float
    row: int
    token: int = -1
    is_greedy: bool = False
    position: int | None = None


Beams = Sequence[Beam]


def rank_candidates(top: TopTokens, groups: Sequence[Beams], count: int) -> list[list[Beam]]:
    """Return the `count` best candidates of each group, best first; ties are ordered by beam, then by token rank.

    Args:
        top: Best tokens of each row.
        groups: Beams of each group, which may differ in number.
        count: Candidates per group.
    """
    width, num_tokens = max(map(len, groups)), top.tokens.shape[1]
    padded = [[*((beam.row, beam.log_probability) for beam in group), *[(0, -math.inf)] * width] for group in groups]
    rows = np.asarray([[row for row, _ in group[:width]] for group in padded], dtype=np.int64)
    totals = np.asarray([[total for _, total in group[:width]] for group in padded], dtype=np.float64)
    scores = totals[:, :, None] + top.log_probs[rows]  # (groups, beams, n)
    scores = np.reshape(scores, (len(groups), width * num_tokens))
    order = np.argsort(-scores, axis=-1, stable=True)[:, :count]
    best, parents = np.take_along_axis(scores, order, axis=-1), np.take_along_axis(rows, order // num_tokens, axis=-1)
    tokens = np.take_along_axis(np.reshape(top.tokens[rows], scores.shape), order, axis=-1)
    return [
        [Beam(total, row, token) for total, row, token in zip(*columns, strict=True) if total > -math.inf]
        for columns in zip(best.tolist(), parents.tolist(), tokens.tolist(), strict=True)
    ]


@dataclass
class BeamGroup:
    """A beam search of `size` beams for one input.

    Attributes:
        size: Number of beams.
        num_outputs: Number of finished hypotheses to keep.
        max_length_penalty: lp of the longest possible hypothesis: its output tokens and eos.
        beams: Unfinished hypotheses.
        early_stopping: Whether the search ends as soon as `size` hypotheses have finished.
        finished: Best finished hypotheses, best first; of equal scores, the one that finished first.
        truncated: Hypotheses of the maximum length.
        num_finished: Hypotheses that have finished, kept or not.
    """

    size: int
    num_outputs: int
    max_length_penalty: float
    beams: list[Beam]
    early_stopping: bool = False
    finished: list[Hypothesis] = field(default_factory=list)
    truncated: list[UnscoredHypothesis] = field(default_factory=list)
    num_finished: int = 0

    @property
    def worst_score(self) -> float:
        """Score that a hypothesis has to exceed to be kept."""
        return self.finished[-1].score if len(self.finished) == self.num_outputs else -math.inf

    def add(self, hypothesis: Hypothesis) -> None:
        """Keep a finished hypothesis if it is good enough."""
        if hypothesis.score > self.worst_score or len(self.finished) < self.num_outputs:
            bisect.insort_right(self.finished, hypothesis, key=lambda each: -each.score)
            del self.finished[self.num_outputs :]

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
        if not self.beams or (self.early_stopping and self.num_finished >= self.size):
            return True
        best = max(beam.log_probability for beam in self.beams)
        return best / self.max_length_penalty <= self.worst_score

    def advance(
        self,
        candidates: Beams,
        eos_id: int | None,
        greedy: Beam | None,
        *,
        is_last: bool = False,
        is_too_long: Any = None,
    ) -> tuple[list[Beam], list[Beam]]:
        """Extend the beams by one token; return the hypotheses that ended, with eos, and the beams that were truncated.

        A hypothesis ends if eos is among the `size` best candidates; with one beam this is greedy search, which then
        ends.

        Args:
            candidates: Best first, enough for `size` beams to continue: at least 2 * size, since each beam has one eos
                only, and all of them if some may be too long.
            eos_id: Token that ends a hypothesis.
            greedy: Candidate of greedy search, which is kept even if others are better.
            is_last: Whether the beams have the maximum length, so that none continues.
            is_too_long: Function that returns whether a candidate exceeds the limit in another unit than tokens.
        """
        ended = [each for each in candidates[: self.size] if each.token == eos_id]
        valid = (each for each in candidates if each.token != eos_id and not (is_too_long and is_too_long(each)))
        chosen = list(itertools.islice(valid, self.size))
        if greedy is not None and greedy.token == eos_id:
            ended += [greedy] if greedy not in ended else []
        elif greedy is not None:
            if greedy not in chosen and not (is_too_long and is_too_long(greedy)):
                chosen = [*chosen[: self.size - 1], greedy]
            for each in chosen:
                each.is_greedy = each == greedy
        truncated = self.beams if is_last or not chosen else []
        self.beams = [] if truncated or (self.size == 1 and ended) else chosen
        return ended, truncated


class InputBeams:
    """The groups of beams of one input."""

    def __init__(self, batch: GenerationBatch, index: int) -> None:
        config, self.maximum = batch.config, batch.lengths.ranges[index].maximum
        self.batch, self.index = batch, index
        settings = config.group_size, config.num_return_sequences, batch.length_penalty(index, self.maximum + 1)
        # The first group is free of the diversity penalty, so it contains greedy search.
        first = [Beam(0.0, index, is_greedy=config.keep_greedy and i == 0) for i in range(config.num_beam_groups)]
        self.groups = [BeamGroup(*settings, [beam], config.early_stopping) for beam in first]

    @property
    def is_done(self) -> bool:
        """True if further steps cannot change the result."""
        return all(group.is_done for group in self.groups)

    def advance(
        self, candidates: Iterator[list[Beam]], top: TopTokens, rows: Rows
    ) -> list[tuple[BeamGroup, UnscoredHypothesis]]:
        """Extend the beams of each open group by one token; return the hypotheses that ended.

        Args:
            candidates: Candidates of the open groups of this and further inputs, in order.
            top: Best tokens of each row.
            rows: Rows of the beams.
        """
        batch, config, ended, step = self.batch, self.batch.config, [], list[BeamCandidate]()
        penalty = DEFAULT_DIVERSITY_PENALTY if config.diversity_penalty is None else config.diversity_penalty
        is_open = [number for number, group in enumerate(self.groups) if group.beams]
        length = int(rows.lengths[self.groups[is_open[0]].beams[0].row])
        num_chosen: Counter[int] = Counter()

        def is_too_long(beam: Beam) -> bool:
            return batch.lengths.exceeds_units(self.index, [*rows.history(beam.row), beam.token])

        has_units = batch.lengths.unit_ranges is not None
        limits: Any = {"is_last": length == self.maximum, "is_too_long": is_too_long if has_units else None}
        for number, ranked in zip(is_open, candidates, strict=False):
            group = self.groups[number]
            parents = group.beams
            if num_chosen:
                ranked = sorted(ranked, key=lambda each: penalty * num_chosen[each.token] - each.log_probability)
            ends, cut = group.advance(ranked, batch.eos_id, _greedy_candidate(parents, top), **limits)
            num_chosen.update(beam.token for beam in group.beams)
            if batch.lengths.near_targets and batch.eos_id is not None:
                ends = _end_all(parents, top, batch.eos_id)
            ended += [(group, self._hypothesis(rows.history(beam.row), beam)) for beam in ends]
            no_end: Any = {"finished": False, "has_eos": False}
            group.truncated = [self._hypothesis(rows.history(beam.row), beam, **no_end) for beam in cut]
            if batch.beam_history is not None:
                divisor = batch.length_penalty(self.index, length + 1)
                step += _candidates(number, divisor, len(step), parents, ranked[: 2 * group.size], group.beams, ends)
        if batch.beam_history is not None:
            kept = [beam for number in is_open for beam in self.groups[number].beams]
            best = max(kept, key=lambda beam: beam.log_probability, default=None)
            tokens = [] if best is None else [*rows.history(best.row), best.token]
            batch.beam_history.add(batch.indices[self.index], step, tokens)
        return ended

    def stop(self, rows: Rows, flags: Iterator[bool]) -> list[tuple[BeamGroup, UnscoredHypothesis]]:
        """Remove the beams that a stopping criterion ends; return them. `rows` are those before the step."""
        ended = []
        for group in self.groups:
            stops = [(beam, next(flags)) for beam in group.beams]
            group.beams = [beam for beam, stop in stops if not stop]
            for beam in (beam for beam, stop in stops if stop):
                tokens = [*rows.history(beam.row), beam.token]
                ended.append((group, self._hypothesis(tokens, beam, has_eos=False)))
        return ended

    def _hypothesis(
        self, tokens: list[int], beam: Beam, *, finished: bool = True, has_eos: bool = True
    ) -> UnscoredHypothesis:
        return UnscoredHypothesis(self.index, tokens, beam.log_probability, finished, has_eos)

    def results(self) -> list[Hypothesis]:
        """Return the best distinct hypotheses; truncated ones only if none finished.

        Each group contributes at most its share of the beams, without what an earlier group found.
        """
        chosen: dict[tuple[int, ...], Hypothesis] = {}
        for group in self.groups:
            new = [each for each in group.finished if tuple(each.tokens) not in chosen]
            chosen.update((tuple(each.tokens), each) for each in new[: group.size])
        if not chosen:
            truncated = [each for group in self.groups for each in group.truncated]
            chosen = {tuple(each.tokens): each for each in self.batch.score(truncated)}
        return best_first(list(chosen.values()))[: self.batch.config.num_return_sequences]

    def rows(self, count: int) -> list[Beam]:
        """Return one beam per row; copies of the first, which are ignored, fill the remaining rows.

        The first child of each beam takes its row, so that little of the cache has to move.
        """
        beams = [beam for group in self.groups for beam in group.beams]
        spare = [dataclasses.replace(beams[0]) for _ in range(count - len(beams))]
        by_row: dict[int, Beam] = {}
        for beam in beams:
            if by_row.setdefault(beam.row % count, beam) is not beam:
                spare.append(beam)
        return [by_row[row] if row in by_row else spare.pop() for row in range(count)]


def beam_search(batch: GenerationBatch, logits: Array) -> Steps:
    """Keep the num_beams most probable hypotheses at each step; return the best finished ones of each input."""
    config = batch.config
    inputs = [InputBeams(batch, index) for index in batch.inputs]
    num_chosen = config.num_beams - config.group_size  # tokens that earlier groups may have chosen
    num_tokens = 2 * config.group_size + num_chosen
    num_candidates = config.group_size * (2 + num_chosen if batch.lengths.unit_ranges is None else num_tokens)
    active, rows = inputs, batch.rows()
    while True:
        logits = batch.process(logits, rows)
        top = top_tokens(logits, num_tokens, batch.eos_id)
        for row in np.flatnonzero(~np.isfinite(top.log_probs[:, 0]))[:1]:
            raise batch.no_token_error(int(rows.inputs[row]), int(rows.lengths[row]))
        groups = [group.beams for each in active for group in each.groups if group.beams]
        candidates = iter(rank_candidates(top, groups, num_candidates))
        ended = [hypothesis for each in active for hypothesis in each.advance(candidates, top, rows)]
        if batch.stopping_criteria:
            beams = [beam for each in active for group in each.groups for beam in group.beams]
            extended = rows.extend([beam.token for beam in beams], [beam.row for beam in beams])
            flags = iter(batch.should_stop(extended))
            ended += [hypothesis for each in active for hypothesis in each.stop(rows, flags)]
        _keep_best(batch, ended)
        staying = [slot for slot, each in enumerate(active) if not each.is_done]
        if not staying:
            return [each.results() for each in inputs]
        remaining = staying if len(staying) < len(active) else None
        active = [active[slot] for slot in staying]
        beams = [beam for each in active for beam in each.rows(config.num_beams)]
        rows = rows.extend([beam.token for beam in beams], [beam.row for beam in beams])
        for row, beam in enumerate(beams):
            beam.row = row
        logits = yield NextTokens(rows, remaining)


def _keep_best(batch: GenerationBatch, ended: Sequence[tuple[BeamGroup, UnscoredHypothesis]]) -> None:
    """Score the hypotheses that ended and keep the best."""
    # Coverage costs a pass of the model, so only hypotheses that may be kept are scored in full.
    possible = [(group, each) for group, each in ended if batch.score_bound(each) > group.worst_score]
    for group, _ in ended:
        group.num_finished += 1
    for (group, _), hypothesis in zip(possible, batch.score([each for _, each in possible]), strict=True):
        group.add(hypothesis)


def _end_all(parents: Beams, top: TopTokens, eos_id: int) -> list[Beam]:
    """Return every beam with eos appended, if it may end."""
    return [
        Beam(beam.log_probability + float(top.eos_log_probs[beam.row]), beam.row, eos_id)
        for beam in parents
        if top.eos_log_probs[beam.row] > -math.inf
    ]


def _greedy_candidate(parents: Beams, top: TopTokens) -> Beam | None:
    """Return the continuation of the greedy beam, or None without one."""
    for beam in parents:
        if beam.is_greedy:
            total = beam.log_probability + float(top.log_probs[beam.row, 0])
            return Beam(total, beam.row, int(top.tokens[beam.row, 0]))
    return None


def _candidates(
    group: int, divisor: float, first: int, parents: Beams, ranked: Beams, kept: Beams, ended: Beams
) -> list[BeamCandidate]:
    """Return what a step of a group considered, best first, and note the positions of its beams, from `first` on."""
    positions = {beam.row: beam.position for beam in parents}
    beams, ends = ({(beam.row, beam.token): beam for beam in each} for each in (kept, ended))
    considered = {(beam.row, beam.token): beam for beam in (*ranked, *kept, *ended)}
    step: list[BeamCandidate] = []
    for key, beam in sorted(considered.items(), key=lambda item: -item[1].log_probability):
        status = "kept" if key in beams else "finished" if key in ends else "pruned"
        if key in beams:
            beams[key].position = first + len(step)
        total = beam.log_probability
        step.append(BeamCandidate(beam.token, group, positions[beam.row], total, total / divisor, status))
    return step
