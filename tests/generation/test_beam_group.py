import math

from xformer.generation.beams import Beam, BeamGroup
from xformer.generation.results import Hypothesis, length_penalty

EOS = 2


def hypothesis(score, *tokens):
    return Hypothesis(list(tokens), score, score, True)


def group(size, *beams, limit=9, num_outputs=1, alpha=0.0):
    return BeamGroup(size, num_outputs, length_penalty(limit + 1, alpha), list(beams))


def found(beams):
    return [(beam.row, beam.token) for beam in beams]


def test_the_best_finished_are_kept_and_of_equal_ones_the_first():
    search = group(3, num_outputs=2)
    assert search.worst_score == -math.inf
    for score, token in ((-3.0, 3), (-1.0, 4), (-1.0, 5), (-2.0, 6), (-1.0, 7)):
        search.add(hypothesis(score, token))
    assert [each.tokens for each in search.finished] == [[4], [5]]
    assert search.worst_score == -1.0


def test_an_end_counts_only_among_the_best():
    for rank, ends in ((0, True), (1, True), (2, False)):
        tokens = [3, 4, 5]
        tokens.insert(rank, EOS)
        search = group(2, Beam(0.0, 0))
        ended, _ = search.advance([Beam(-rank, 0, token) for rank, token in enumerate(tokens)], EOS, None)
        assert bool(ended) == ends
        assert found(search.beams) == [(0, 3), (0, 4)]


def test_the_greedy_beam_is_kept_as_the_last_or_ends():
    def candidates():
        return [Beam(-1.0, 0, 3), Beam(-2.0, 0, 4), Beam(-3.0, 0, 5), Beam(-9.0, 1, 6)]

    search = group(2, Beam(-0.5, 0), Beam(-0.6, 1, is_greedy=True))
    assert search.advance(candidates(), EOS, candidates()[3]) == ([], [])
    assert found(search.beams) == [(0, 3), (1, 6)]
    assert [beam.is_greedy for beam in search.beams] == [False, True]
    search = group(2, Beam(-0.5, 0), Beam(-0.6, 1, is_greedy=True))
    (ended,), _ = search.advance(candidates()[:3], EOS, Beam(-9.0, 1, EOS))
    assert (ended.row, ended.log_probability) == (1, -9.0)
    assert found(search.beams) == [(0, 3), (0, 4)]


def test_a_group_of_one_is_done_when_it_ended():
    search = group(1, Beam(0.0, 0))
    ended, truncated = search.advance([Beam(-1.0, 0, EOS), Beam(-1.5, 0, 3)], EOS, None)
    assert (len(ended), truncated, search.beams) == (1, [], [])


def test_the_maximum_length_truncates_beams():
    search = group(2, Beam(-1.0, 0), limit=1)
    candidates = [Beam(-1.5, 0, 4), Beam(-2.0, 0, EOS)]
    ended, truncated = search.advance(candidates, EOS, None, is_last=True)
    assert (len(ended), truncated, search.beams) == (1, [Beam(-1.0, 0)], [])


def test_a_group_is_done_when_no_beam_can_win():
    search = group(2, Beam(-2.0, 0), limit=9, alpha=1.0)
    assert not search.is_done
    bound = -2.0 / length_penalty(10, 1.0)
    search.add(hypothesis(bound - 0.01))
    assert not search.is_done
    search.add(hypothesis(bound))
    assert search.is_done


def test_candidates_that_are_too_long_are_replaced_by_others():
    search = group(2, Beam(-0.1, 0), Beam(-0.5, 1))
    candidates = [Beam(-rank, 0, 3 + rank) for rank in range(6)] + [Beam(-9.0, 1, 4)]
    assert search.advance(candidates, EOS, candidates[0], is_too_long=lambda beam: beam.row == 0) == ([], [])
    assert found(search.beams) == [(1, 4)]
    parents = search.beams
    assert search.advance([Beam(-9.5, 1, 5)], EOS, None, is_too_long=lambda beam: True) == ([], parents)
    assert search.beams == []
