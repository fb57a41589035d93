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

import functools
import math
from collections import Counter
from collections.abc import Generator, Iterator, Sequence

import numpy as np

from xformer.backends import Array
from xformer.generation.batch import GenerationBatch
from xformer.generation.beam_group import Beam, BeamGroup, BeamHypotheses
from xformer.generation.beam_history import GroupStep
from xformer.generation.candidates import Candidate, TopTokens, rank_candidates, top_tokens
from xformer.generation.config import DEFAULT_DIVERSITY_PENALTY
from xformer.generation.engine import Move
from xformer.generation.hypothesis import Hypothesis, best_first, length_penalty
from xformer.generation.scoring import UnscoredHypothesis, score, score_bound


class InputBeams:
    """The groups of beams of one input."""

    def __init__(self, batch: GenerationBatch, index: int) -> None:
        config, maximum = batch.config, batch.lengths.ranges[index].maximum
        self.batch, self.index = batch, index
        prefix = batch.prefixes[index]
        self.groups = [
            BeamGroup(
                size=config.group_size,
                max_length=maximum,
                max_length_penalty=length_penalty(
                    batch.lengths.output_length(index, maximum) + 1,
                    config.length_penalty,
                    config.length_penalty_base,
                ),
                # The first group is free of the diversity penalty, so it contains greedy search.
                beams=[Beam(prefix, 0.0, index, is_greedy=config.keep_greedy and number == 0)],
                finished=BeamHypotheses(config.num_return_sequences),
                is_too_long=functools.partial(batch.is_too_long, index) if batch.lengths.unit_ranges else None,
            )
            for number in range(config.num_beam_groups)
        ]

    @property
    def is_done(self) -> bool:
        """True if further steps cannot change the result."""
        return all(group.is_done for group in self.groups)

    def advance(
        self, candidates: Iterator[list[Candidate]], top: TopTokens
    ) -> list[tuple[BeamGroup, UnscoredHypothesis]]:
        """Extend the beams of each open group by one token; return the hypotheses that ended.

        Args:
            candidates: Candidates of the open groups of this and further inputs, in order.
            top: Best tokens of each row.
        """
        ended: list[tuple[BeamGroup, UnscoredHypothesis]] = []
        steps: list[GroupStep] = []
        num_chosen: Counter[int] = Counter()
        penalty = self.batch.config.diversity_penalty
        penalty = DEFAULT_DIVERSITY_PENALTY if penalty is None else penalty
        eos_id = self.batch.eos_id
        for group, ranked in zip(self.open_groups(), candidates, strict=False):
            if num_chosen:
                ranked = sorted(ranked, key=lambda c: penalty * num_chosen[c.token] - c.log_probability)
            parents = group.beams
            ends = group.advance(ranked, eos_id, _greedy_candidate(parents, top))
            num_chosen.update(beam.tokens[-1] for beam in group.beams)
            if self.batch.lengths.near_targets and eos_id is not None:
                ends = _end_all(parents, top)
            ended += [(group, self._hypothesis(beam, finished=True, has_eos=True)) for beam in ends]
            if self.batch.beam_history is not None:
                steps.append(self._group_step(group, parents, ranked, ends, eos_id))
        if self.batch.beam_history is not None:
            self.batch.beam_history.add(self.batch.indices[self.index], steps)
        return ended

    def stop(self) -> list[tuple[BeamGroup, UnscoredHypothesis]]:
        """Remove the beams that a stopping criterion ends; return them."""
        ended: list[tuple[BeamGroup, UnscoredHypothesis]] = []
        for group in self.groups if self.batch.stopping_criteria else ():
            flags = self.batch.should_stop([beam.tokens for beam in group.beams], [self.index] * len(group.beams))
            for beam in (beam for beam, stops in zip(group.beams, flags, strict=True) if stops):
                ended.append((group, self._hypothesis(beam, finished=True, has_eos=False)))
            group.beams = [beam for beam, stops in zip(group.beams, flags, strict=True) if not stops]
        return ended

    def open_groups(self) -> list[BeamGroup]:
        """Return the groups that still have beams."""
        return [group for group in self.groups if group.beams]

    def results(self) -> list[Hypothesis]:
        """Return the best distinct hypotheses; truncated ones only if none finished.

        Each group contributes at most its share of the beams, without what an earlier group found.
        """
        chosen: dict[tuple[int, ...], Hypothesis] = {}
        for group in self.groups:
            new = [each for each in group.finished.hypotheses if tuple(each.tokens) not in chosen]
            chosen.update((tuple(each.tokens), each) for each in new[: group.size])
        if not chosen:
            truncated = [
                self._hypothesis(beam, finished=False, has_eos=False)
                for group in self.groups
                for beam in group.truncated
            ]
            chosen = {tuple(each.tokens): each for each in score(self.batch, truncated)}
        return best_first(list(chosen.values()))[: self.batch.config.num_return_sequences]

    def rows(self, count: int) -> list[Beam]:
        """Return one beam per row; copies of the first, which are ignored, fill the remaining rows.

        The first child of each beam takes its row, so that little of the cache has to move.
        """
        beams = [beam for group in self.groups for beam in group.beams]
        first = beams[0]
        spare = [Beam(first.tokens, first.log_probability, first.row) for _ in range(count - len(beams))]
        by_row: dict[int, Beam] = {}
        for beam in beams:
            if by_row.setdefault(beam.row % count, beam) is not beam:
                spare.append(beam)
        return [by_row[row] if row in by_row else spare.pop() for row in range(count)]

    def _group_step(
        self, group: BeamGroup, parents: list[Beam], ranked: list[Candidate], ended: list[Beam], eos_id: int | None
    ) -> GroupStep:
        config = self.batch.config
        length = self.batch.lengths.output_length(self.index, len(parents[0].tokens)) + 1
        penalty = length_penalty(length, config.length_penalty, config.length_penalty_base)
        number = next(number for number, each in enumerate(self.groups) if each is group)
        return GroupStep(number, parents, ranked[: 2 * group.size], group.beams, ended, eos_id, penalty)

    def _hypothesis(self, beam: Beam, *, finished: bool, has_eos: bool) -> UnscoredHypothesis:
        return UnscoredHypothesis(self.index, beam.tokens, beam.log_probability, finished, has_eos)


def beam_search(batch: GenerationBatch, logits: Array) -> Generator[Move, Array, list[list[Hypothesis]]]:
    """Keep the num_beams most probable hypotheses at each step; return the best finished ones of each input."""
    config = batch.config
    inputs = [InputBeams(batch, index) for index in range(batch.num_inputs)]
    num_chosen = config.num_beams - config.group_size  # tokens that earlier groups may have chosen
    num_tokens = 2 * config.group_size + num_chosen
    num_candidates = config.group_size * (2 + num_chosen if batch.lengths.unit_ranges is None else num_tokens)
    active, rows = inputs, [(each.groups[0].beams[0], each.index) for each in inputs]
    while True:
        logits = batch.process(logits, [beam.tokens for beam, _ in rows], [index for _, index in rows])
        top = top_tokens(logits, num_tokens, batch.eos_id)
        for row in np.flatnonzero(~np.isfinite(top.log_probs[:, 0]))[:1]:
            beam, index = rows[row]
            raise batch.no_token_error(index, beam.tokens)
        _keep_best(batch, _advance(active, top, num_candidates))
        open_inputs = [position for position, each in enumerate(active) if not each.is_done]
        if not open_inputs:
            return [each.results() for each in inputs]
        staying = open_inputs if len(open_inputs) < len(active) else None
        active = [active[position] for position in open_inputs]
        rows = [(beam, each.index) for each in active for beam in each.rows(config.num_beams)]
        parents = [beam.row for beam, _ in rows]
        for row, (beam, _) in enumerate(rows):
            beam.row = row
        logits = yield Move([beam.tokens[-1] for beam, _ in rows], parents, staying)


def _advance(
    inputs: Sequence[InputBeams], top: TopTokens, num_candidates: int
) -> list[tuple[BeamGroup, UnscoredHypothesis]]:
    """Extend all beams by one token; return the hypotheses that ended."""
    groups = [group for each in inputs for group in each.open_groups()]
    totals = [[beam.log_probability for beam in group.beams] for group in groups]
    candidates = iter(
        rank_candidates(top, totals, [[beam.row for beam in group.beams] for group in groups], num_candidates)
    )
    ended = []
    for each in inputs:
        ended += each.advance(candidates, top)
        ended += each.stop()
    return ended


def _keep_best(batch: GenerationBatch, ended: Sequence[tuple[BeamGroup, UnscoredHypothesis]]) -> None:
    """Score the hypotheses that ended and keep the best."""
    # Coverage costs a pass of the model, so only hypotheses that may be kept are scored in full.
    possible = [(group, each) for group, each in ended if score_bound(batch, each) > group.finished.worst_score]
    for (group, _), hypothesis in zip(possible, score(batch, [each for _, each in possible]), strict=True):
        group.finished.add(hypothesis)


def _end_all(parents: Sequence[Beam], top: TopTokens) -> list[Beam]:
    """Return every beam with eos appended, if it may end."""
    return [
        Beam(beam.tokens, beam.log_probability + float(top.eos_log_probs[beam.row]), beam.row)
        for beam in parents
        if top.eos_log_probs is not None and top.eos_log_probs[beam.row] > -math.inf
    ]


def _greedy_candidate(parents: Sequence[Beam], top: TopTokens) -> Candidate | None:
    """Return the continuation of the greedy beam, or None without one."""
    for index, beam in enumerate(parents):
        if beam.is_greedy:
            total = beam.log_probability + float(top.log_probs[beam.row, 0])
            return Candidate(total, index, int(top.tokens[beam.row, 0]))
    return None
