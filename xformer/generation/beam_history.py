"""A record of beam search: the candidates of each step, and which of them were kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from xformer.generation.beam_group import Beam
from xformer.generation.candidates import Candidate


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

    Example:
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

    def add(self, index: int, groups: Iterable[GroupStep]) -> None:
        """Append one step of the groups of an input."""
        step: list[BeamCandidate] = []
        best: Beam | None = None
        for group in groups:
            before = self._positions.get((index, group.number), {})
            after: dict[tuple[int, ...], int] = {}
            for tokens, token, log_probability, status in group.candidates():
                if status == "kept":
                    after[(*tokens, token)] = len(step)
                score = log_probability / group.length_penalty
                step.append(BeamCandidate(token, group.number, before.get(tokens), log_probability, score, status))
            self._positions[index, group.number] = after
            best = max([*group.kept, *([best] if best else [])], key=lambda beam: beam.log_probability, default=best)
        self.steps.setdefault(index, []).append(step)
        if self.on_step is not None:
            self.on_step(index, step, best.tokens if best else [])


class GroupStep(NamedTuple):
    """One step of a group.

    Attributes:
        number: Index of the group.
        parents: Beams before the step.
        ranked: Candidates, best first.
        kept: Beams after the step.
        ended: Hypotheses that ended, without eos.
        eos_id: Token that ends a hypothesis.
        length_penalty: Divisor of the scores.
    """

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
