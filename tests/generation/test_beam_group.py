import math

from xformer.generation.beams import Beam, BeamGroup, BeamHypotheses, Candidate
from xformer.generation.results import Hypothesis, length_penalty

EOS = 2


def hypothesis(score, *tokens):
    return Hypothesis(list(tokens), score, score, True)


def group(size, *beams, limit=9, num_return_sequences=1, alpha=0.0, is_too_long=None):
    return BeamGroup(
        size,
        limit,
        length_penalty(limit + 1, alpha),
        list(beams),
        BeamHypotheses(num_return_sequences),
        is_too_long,
    )


def test_the_best_finished_are_kept_and_of_equal_ones_the_first():
    finished = BeamHypotheses(2)
    assert finished.worst_score == -math.inf
    for score, token in ((-3.0, 3), (-1.0, 4), (-1.0, 5), (-2.0, 6), (-1.0, 7)):
        finished.add(hypothesis(score, token))
    assert [each.tokens for each in finished.hypotheses] == [[4], [5]]
    assert finished.worst_score == -1.0


def test_an_end_counts_only_among_the_best():
    for rank, ends in ((0, True), (1, True), (2, False)):
        tokens = [3, 4, 5]
        tokens.insert(rank, EOS)
        search = group(2, Beam([], 0.0, 0))
        ended = search.advance([Candidate(-rank, 0, token) for rank, token in enumerate(tokens)], EOS, None)
        assert bool(ended) == ends
        assert [beam.tokens for beam in search.beams] == [[3], [4]]


def test_the_greedy_beam_is_kept_as_the_last_or_ends():
    candidates = [Candidate(-1.0, 0, 3), Candidate(-2.0, 0, 4), Candidate(-3.0, 0, 5), Candidate(-9.0, 1, 6)]
    search = group(2, Beam([7], -0.5, 0), Beam([8], -0.6, 1, is_greedy=True))
    assert search.advance(candidates, EOS, candidates[3]) == []
    assert [(beam.tokens, beam.is_greedy, beam.row) for beam in search.beams] == [([7, 3], False, 0), ([8, 6], True, 1)]
    search = group(2, Beam([7], -0.5, 0), Beam([8], -0.6, 1, is_greedy=True))
    (ended,) = search.advance(candidates[:3], EOS, Candidate(-9.0, 1, EOS))
    assert (ended.tokens, ended.log_probability) == ([8], -9.0)
    assert [beam.tokens for beam in search.beams] == [[7, 3], [7, 4]]


def test_a_group_of_one_is_done_when_it_ended():
    search = group(1, Beam([], 0.0, 0))
    assert len(search.advance([Candidate(-1.0, 0, EOS), Candidate(-1.5, 0, 3)], EOS, None)) == 1
    assert search.beams == []


def test_the_maximum_length_truncates_beams():
    search = group(2, Beam([3], -1.0, 0), limit=1)
    assert len(search.advance([Candidate(-1.5, 0, 4), Candidate(-2.0, 0, EOS)], EOS, None)) == 1
    assert search.beams == []
    assert [beam.tokens for beam in search.truncated] == [[3]]


def test_a_group_is_done_when_no_beam_can_win():
    search = group(2, Beam([3], -2.0, 0), limit=9, alpha=1.0)
    assert not search.is_done
    bound = -2.0 / length_penalty(10, 1.0)
    search.finished.add(hypothesis(bound - 0.01))
    assert not search.is_done
    search.finished.add(hypothesis(bound))
    assert search.is_done


def test_candidates_that_are_too_long_are_replaced_by_others():
    search = group(2, Beam([7, 7], -0.1, 0), Beam([8], -0.5, 1), is_too_long=lambda tokens: len(tokens) >= 3)
    candidates = [Candidate(-rank, 0, 3 + rank) for rank in range(6)] + [Candidate(-9.0, 1, 4)]
    assert search.advance(candidates, EOS, candidates[0]) == []
    assert [beam.tokens for beam in search.beams] == [[8, 4]]
    assert search.advance([Candidate(-9.5, 0, 5)], EOS, None) == []
    assert search.beams == []
    assert [beam.tokens for beam in search.truncated] == [[8, 4]]
