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
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from xformer.backends import Array
from xformer.generation.batch import GenerationBatch, Move
from xformer.generation.config import DEFAULT_DIVERSITY_PENALTY
from xformer.generation.processors import Rows, TopTokens, top_tokens
from xformer.generation.results import Hypothesis, UnscoredHypothesis, best_first, length_penalty


class Candidate(NamedTuple):
    """A beam extended by one token."""

    log_probability: float  # of the whole hypothesis, this token included
    beam: int  # index among the beams of its group
    token: int


def rank_candidates(
    top: TopTokens, totals: Sequence[Sequence[float]], rows: Sequence[Sequence[int]], count: int
) -> list[list[Candidate]]:
    """Return the `count` best candidates of each group, best first; ties are ordered by beam, then by token rank.

    Args:
        top: Best tokens of each row.
        totals: Log-probability of each beam of each group; groups may differ in size.
        rows: Row of each beam of each group.
        count: Candidates per group.
    """
    width, num_tokens = max(map(len, rows)), top.tokens.shape[1]
    padded_rows = np.asarray([[*group, *[0] * (width - len(group))] for group in rows], dtype=np.int64)
    padded = [[*group, *[-math.inf] * (width - len(group))] for group in totals]
    scores = np.asarray(padded, dtype=np.float64)[:, :, None] + top.log_probs[padded_rows]  # (groups, beams, n)
    scores = np.reshape(scores, (len(rows), width * num_tokens))
    order = np.argsort(-scores, axis=-1, stable=True)[:, :count]
    best = np.take_along_axis(scores, order, axis=-1)
    tokens = np.take_along_axis(np.reshape(top.tokens[padded_rows], scores.shape), order, axis=-1)
    return [
        [
            Candidate(total, position // num_tokens, token)
            for total, position, token in zip(*columns, strict=True)
            if total > -math.inf
        ]
        for columns in zip(best.tolist(), order.tolist(), tokens.tolist(), strict=True)
    ]


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
        early_stopping: Whether the search ends as soon as `size` hypotheses have finished.
        num_finished: Hypotheses that have finished, kept or not.
    """

    size: int
    max_length: int
    max_length_penalty: float
    beams: list[Beam]
    finished: BeamHypotheses
    is_too_long: Callable[[list[int]], bool] | None = None
    truncated: list[Beam] = field(default_factory=list)
    early_stopping: bool = False
    num_finished: int = 0

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


class BeamCandidate(NamedTuple):
    """A hypothesis that a step of beam search considered.

    Attributes:
        token: Its last token.
        group: Index of its group (diverse beam search).
        parent: Index of the candidate that it extends, among those of the step before; None at the first step.
        log_probability: Log-probability of the whole hypothesis.
        score: log_probability divided by the length penalty.
        status: "kept" in the beam, "finished" by eos, or "pruned".
    """

    token: int
    group: int
    parent: int | None
    log_probability: float
    score: float
    status: str


class BeamHistory:
    """The candidates of a beam search, for `generate(..., beam_history=BeamHistory())`.

    Args:
        on_step: Function (index of the input, candidates, tokens of the best beam) that is called after each step.

    Attributes:
        steps: By the index of the input: for each step the candidates of all groups, best first in each group.

    Examples:
        >>> from xformer import Transformer, TransformerConfig, generate
        >>> sizes = {"d_model": 8, "num_heads": 2, "d_ff": 16, "num_encoder_layers": 1, "num_decoder_layers": 1}
        >>> config = TransformerConfig(source_vocab_size=9, target_vocab_size=9, **sizes)
        >>> history = BeamHistory()
        >>> outputs = generate(Transformer(config), [[5, 6]], num_beams=2, beam_history=history)
        >>> first, *_ = history.steps[0]
        >>> sum(candidate.status == "kept" for candidate in first)
        2
    """

    def __init__(self, on_step: Callable[[int, list[BeamCandidate], list[int]], object] | None = None) -> None:
        self.on_step = on_step
        self.steps: dict[int, list[list[BeamCandidate]]] = {}
        self._positions: dict[tuple[int, int], dict[tuple[int, ...], int]] = {}

    def add(self, index: int, groups: Iterable[_GroupStep]) -> None:
        """Append one step of the groups of an input."""
        step: list[BeamCandidate] = []
        kept: list[Beam] = []
        for group in groups:
            before = self._positions.get((index, group.number), {})
            after: dict[tuple[int, ...], int] = {}
            for tokens, token, log_probability, status in group.candidates():
                if status == "kept":
                    after[(*tokens, token)] = len(step)
                score = log_probability / group.length_penalty
                step.append(BeamCandidate(token, group.number, before.get(tokens), log_probability, score, status))
            self._positions[index, group.number] = after
            kept += group.kept
        self.steps.setdefault(index, []).append(step)
        if self.on_step is not None:
            best = max(kept, key=lambda beam: beam.log_probability, default=None)
            self.on_step(index, step, best.tokens if best else [])


class _GroupStep(NamedTuple):
    """One step of a group: its beams before and after it, its candidates, and hypotheses that ended, without eos."""

    number: int
    parents: Sequence[Beam]
    ranked: Sequence[Candidate]
    kept: Sequence[Beam]
    ended: Sequence[Beam]
    eos_id: int | None
    length_penalty: float

    def candidates(self) -> list[tuple[tuple[int, ...], int, float, str]]:
        """Return (tokens of the parent, token, log-probability, status), best first."""
        kept = {tuple(beam.tokens): beam.log_probability for beam in self.kept}
        ended = {tuple(beam.tokens): beam.log_probability for beam in self.ended}
        rows: list[tuple[tuple[int, ...], int, float, str]] = []
        for candidate in self.ranked:
            parent, token = tuple(self.parents[candidate.beam].tokens), candidate.token
            if token != self.eos_id and kept.pop((*parent, token), None) is not None:
                status = "kept"
            elif token == self.eos_id and ended.pop(parent, None) is not None:
                status = "finished"
            else:
                status = "pruned"
            rows.append((parent, token, candidate.log_probability, status))
        rows += [(tokens[:-1], tokens[-1], log_probability, "kept") for tokens, log_probability in kept.items()]
        if self.eos_id is not None:
            rows += [(tokens, self.eos_id, total, "finished") for tokens, total in ended.items()]
        return sorted(rows, key=lambda row: -row[2])


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
                    batch.lengths.output_length(index, maximum) + 1, config.length_penalty, config.length_penalty_base
                ),
                # The first group is free of the diversity penalty, so it contains greedy search.
                beams=[Beam(prefix, 0.0, index, is_greedy=config.keep_greedy and number == 0)],
                finished=BeamHypotheses(config.num_return_sequences),
                early_stopping=config.early_stopping,
                is_too_long=functools.partial(batch.lengths.exceeds_units, index)
                if batch.lengths.unit_ranges
                else None,
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
        steps: list[_GroupStep] = []
        num_chosen: Counter[int] = Counter()
        config = self.batch.config
        penalty = DEFAULT_DIVERSITY_PENALTY if config.diversity_penalty is None else config.diversity_penalty
        eos_id = self.batch.eos_id
        is_open = [number for number, group in enumerate(self.groups) if group.beams]
        length = self.batch.lengths.output_length(self.index, len(self.groups[is_open[0]].beams[0].tokens)) + 1
        divisor = length_penalty(length, config.length_penalty, config.length_penalty_base)
        for number, ranked in zip(is_open, candidates, strict=False):
            group = self.groups[number]
            if num_chosen:
                ranked = sorted(ranked, key=lambda c: penalty * num_chosen[c.token] - c.log_probability)
            parents = group.beams
            ends = group.advance(ranked, eos_id, _greedy_candidate(parents, top))
            num_chosen.update(beam.tokens[-1] for beam in group.beams)
            if self.batch.lengths.near_targets and eos_id is not None:
                ends = _end_all(parents, top)
            ended += [(group, self.hypothesis(beam, finished=True, has_eos=True)) for beam in ends]
            best = ranked[: 2 * group.size]
            steps.append(_GroupStep(number, parents, best, group.beams, ends, eos_id, divisor))
        if self.batch.beam_history is not None:
            self.batch.beam_history.add(self.batch.indices[self.index], steps)
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
                self.hypothesis(beam, finished=False, has_eos=False)
                for group in self.groups
                for beam in group.truncated
            ]
            chosen = {tuple(each.tokens): each for each in self.batch.score(truncated)}
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

    def hypothesis(self, beam: Beam, *, finished: bool, has_eos: bool) -> UnscoredHypothesis:
        """Return a beam as a hypothesis to be scored."""
        return UnscoredHypothesis(self.index, beam.tokens, beam.log_probability, finished, has_eos)


def beam_search(batch: GenerationBatch, logits: Array) -> Generator[Move, Array, list[list[Hypothesis]]]:
    """Keep the num_beams most probable hypotheses at each step; return the best finished ones of each input."""
    config = batch.config
    inputs = [InputBeams(batch, index) for index in range(batch.num_inputs)]
    num_chosen = config.num_beams - config.group_size  # tokens that earlier groups may have chosen
    num_tokens = 2 * config.group_size + num_chosen
    num_candidates = config.group_size * (2 + num_chosen if batch.lengths.unit_ranges is None else num_tokens)
    active, rows = inputs, batch.rows(1)
    while True:
        logits = batch.process(logits, rows)
        top = top_tokens(logits, num_tokens, batch.eos_id)
        for row in np.flatnonzero(~np.isfinite(top.log_probs[:, 0]))[:1]:
            raise batch.no_token_error(int(rows.inputs[row]), int(rows.lengths[row]))
        groups = [group for each in active for group in each.open_groups()]
        totals = [[beam.log_probability for beam in group.beams] for group in groups]
        beam_rows = [[beam.row for beam in group.beams] for group in groups]
        candidates = iter(rank_candidates(top, totals, beam_rows, num_candidates))
        ended = [hypothesis for each in active for hypothesis in each.advance(candidates, top)]
        if batch.stopping_criteria:
            ended += _stop(batch, active, rows)
        _keep_best(batch, ended)
        open_inputs = [position for position, each in enumerate(active) if not each.is_done]
        if not open_inputs:
            return [each.results() for each in inputs]
        staying = open_inputs if len(open_inputs) < len(active) else None
        active = [active[position] for position in open_inputs]
        beams = [beam for each in active for beam in each.rows(config.num_beams)]
        tokens, parents = [beam.tokens[-1] for beam in beams], [beam.row for beam in beams]
        rows = rows.extend(tokens, parents)
        for row, beam in enumerate(beams):
            beam.row = row
        logits = yield Move(tokens, parents, staying)


def _stop(
    batch: GenerationBatch, inputs: Sequence[InputBeams], rows: Rows
) -> list[tuple[BeamGroup, UnscoredHypothesis]]:
    """Remove the beams that a stopping criterion ends; return them. `rows` are those before the step."""
    groups = [(each, group) for each in inputs for group in each.open_groups()]
    beams = [beam for _, group in groups for beam in group.beams]
    flags = iter(batch.should_stop(rows.extend([beam.tokens[-1] for beam in beams], [beam.row for beam in beams])))
    ended = []
    for each, group in groups:
        stops = [(beam, next(flags)) for beam in group.beams]
        ended += [(group, each.hypothesis(beam, finished=True, has_eos=False)) for beam, stop in stops if stop]
        group.beams = [beam for beam, stop in stops if not stop]
    return ended


def _keep_best(batch: GenerationBatch, ended: Sequence[tuple[BeamGroup, UnscoredHypothesis]]) -> None:
    """Score the hypotheses that ended and keep the best."""
    # Coverage costs a pass of the model, so only hypotheses that may be kept are scored in full.
    possible = [(group, each) for group, each in ended if batch.score_bound(each) > group.finished.worst_score]
    for group, _ in ended:
        group.num_finished += 1
    for (group, _), hypothesis in zip(possible, batch.score([each for _, each in possible]), strict=True):
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
