"""Beam search, batched over sentences.

Rows of the cache are hypotheses, as many for each sentence; what belongs to the sentence alone, the keys and values of
its encoding, is there once. All hypotheses have the same number of tokens at any time. Sentences that are finished
leave the batch.

One step reads, of each hypothesis, the few best tokens; everything else happens on the host. That includes the choice
of diverse groups, which look at each other: earlier groups of a sentence take at most as many tokens as they have
hypotheses, and only these are taxed, so the 2 * size candidates that are best after the tax are among the
2 * size + taken best of their rows before it.

A hypothesis may end when eos is among the best `size` candidates, as everywhere. With a desired length that would
leave too much to chance: few hypotheses want to end just there. Within the range every hypothesis therefore gives
a finished one (`end_anywhere`), with its true log-probability, and the scores decide: what comes back is the best whole
sentence of such a length that the beam has, never the beginning of a longer one.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence

from xformer.generation.candidates import Candidate, Continuations, continuations, ranked
from xformer.generation.group import Finished, Group, Live
from xformer.generation.hypothesis import Hypothesis, best_first
from xformer.generation.logits_processors import process
from xformer.generation.scoring import Path, score, score_bound
from xformer.generation.task import DecodingTask


class SentenceBeam:
    """The groups of one sentence."""

    def __init__(self, task: DecodingTask, sentence: int) -> None:
        options, limits = task.options, task.ranges[sentence]
        self.task, self.sentence = task, sentence
        begun = task.prefixes[sentence][: task.lead]
        self.groups = [
            Group(
                size=options.group_size,
                limit=limits.maximum,
                fits=functools.partial(task.fits, sentence),
                longest=task.counted(sentence, limits.maximum) + 1,
                alpha=options.length_penalty,
                # Diversity does not touch the first group, so greedy search lives there.
                live=[Live(begun, 0.0, sentence, greedy=options.keep_greedy and number == 0)],
                finished=Finished(options.num_return_sequences),
            )
            for number in range(options.num_beam_groups)
        ]

    @property
    def needs_more(self) -> bool:
        """Whether going on could change the result."""
        return any(group.needs_more for group in self.groups)

    def advance(self, candidates: Sequence[list[Candidate]], found: Continuations) -> list[tuple[Group, Live]]:
        """Let each group with live hypotheses take a token; return what ended."""
        ended: list[tuple[Group, Live]] = []
        taken: Counter[int] = Counter()
        diversity = self.task.options.diversity
        for group, own in zip(self.open_groups(), candidates, strict=True):
            if taken:
                own = sorted(own, key=lambda c: diversity * taken[c.token] - c.log_probability)
            parents = group.live
            ends = group.advance(own, self.task.eos_id, _greedy(parents, found))
            taken.update(live.tokens[-1] for live in group.live)
            if self.task.end_anywhere:
                ends = self._all_ends(parents, found)
            ended += [(group, live) for live in ends]
        return ended

    def open_groups(self) -> list[Group]:
        """The groups that have live hypotheses."""
        return [group for group in self.groups if group.live]

    def _all_ends(self, parents: Sequence[Live], found: Continuations) -> list[Live]:
        """Every hypothesis with its end, where that is allowed."""
        return [
            Live(live.tokens, live.log_probability + float(found.ends[live.row]), live.row)
            for live in parents
            if found.ends is not None and found.ends[live.row] > -math.inf
        ]

    def results(self) -> list[Hypothesis]:
        """The n best distinct hypotheses; those cut at the limit only if none ended.

        Each group gives its share of the beam, as far as no earlier one found the same.
        """
        num_return_sequences = self.task.options.num_return_sequences
        chosen: dict[tuple[int, ...], Hypothesis] = {}
        for group in self.groups:
            new = [found for found in group.finished.hypotheses if tuple(found.tokens) not in chosen]
            chosen.update((tuple(found.tokens), found) for found in new[: group.size])
        if not chosen:
            paths = [
                Path(self.sentence, live.tokens, live.log_probability, False)
                for group in self.groups
                for live in group.cut
            ]
            chosen = {tuple(found.tokens): found for found in score(self.task, paths)}
        return best_first(list(chosen.values()))[:num_return_sequences]


def search_beams(task: DecodingTask) -> list[list[Hypothesis]]:
    """Keep the num_beams most probable hypotheses at each step; the n best that ended, of each sentence."""
    options = task.options
    beams = [SentenceBeam(task, sentence) for sentence in range(task.sentences)]
    cache, logits = task.start()
    active, rows = beams, _first_rows(beams)
    while True:
        logits = process(task, logits, [live.tokens for live, _ in rows], [sentence for _, sentence in rows])
        others = options.num_beams - options.group_size  # tokens that earlier groups may have taken
        found = continuations(logits, 2 * options.group_size + others, task.eos_id)
        wanted = 2 + others if task.measured is None else 2 * options.group_size + others
        _enter(task, _advance(active, found, wanted * options.group_size))
        going = [place for place, beam in enumerate(active) if beam.needs_more]
        if not going:
            return [beam.results() for beam in beams]
        staying = going if len(going) < len(active) else None
        active = [active[place] for place in going]
        rows = [row for beam in active for row in _rows(beam, options.num_beams)]
        parents = [live.row for live, _ in rows]
        if parents != list(range(logits.shape[0])):
            cache.reorder(parents, staying)
        for place, (live, _) in enumerate(rows):
            live.row = place
        logits = task.step([[live.tokens[-1]] for live, _ in rows], cache)


def _advance(beams: Sequence[SentenceBeam], found: Continuations, count: int) -> list[tuple[SentenceBeam, Group, Live]]:
    """Take one token more everywhere; return what ended."""
    groups = [group for beam in beams for group in beam.open_groups()]
    candidates = iter(
        ranked(
            found,
            [[live.log_probability for live in group.live] for group in groups],
            [[live.row for live in group.live] for group in groups],
            count,
        )
    )
    return [
        (beam, group, live)
        for beam in beams
        for group, live in beam.advance([next(candidates) for _ in beam.open_groups()], found)
    ]


def _enter(task: DecodingTask, ended: Sequence[tuple[SentenceBeam, Group, Live]]) -> None:
    """Score what ended, and keep the best."""
    paths = [(group, Path(beam.sentence, live.tokens, live.log_probability, True)) for beam, group, live in ended]
    # Coverage takes a pass of the model, so only what may get in is scored in full.
    hopeful = [(group, path) for group, path in paths if score_bound(task, path) > group.finished.worst]
    for (group, _), hypothesis in zip(hopeful, score(task, [path for _, path in hopeful]), strict=True):
        group.finished.add(hypothesis)


def _greedy(parents: Sequence[Live], found: Continuations) -> Candidate | None:
    """How greedy search goes on, if it is among the hypotheses."""
    for place, live in enumerate(parents):
        if live.greedy:
            total = live.log_probability + float(found.gains[live.row, 0])
            return Candidate(total, place, int(found.tokens[live.row, 0]))
    return None


def _first_rows(beams: Sequence[SentenceBeam]) -> list[tuple[Live, int]]:
    """One row a sentence, which all its groups begin from."""
    return [(beam.groups[0].live[0], beam.sentence) for beam in beams]


def _rows(beam: SentenceBeam, count: int) -> list[tuple[Live, int]]:
    """The rows of a sentence: its live hypotheses; copies of the first, which nobody looks at, make up the number.

    The first child of each hypothesis takes its row, so that the cache has little to move.
    """
    live = [live for group in beam.groups for live in group.live]
    others = [Live(live[0].tokens, live[0].log_probability, live[0].row) for _ in range(count - len(live))]
    rows: dict[int, Live] = {}
    for each in live:
        if rows.setdefault(each.row % count, each) is not each:
            others.append(each)
    return [(rows[place] if place in rows else others.pop(), beam.sentence) for place in range(count)]
