import math

from xformer.generation.candidates import Candidate
from xformer.generation.group import Finished, Group, Live
from xformer.generation.hypothesis import Hypothesis, length_penalty

EOS = 2


def hypothesis(score, *tokens):
    return Hypothesis(list(tokens), score, score, True)


def group(size, *live, limit=9, num_return_sequences=1, alpha=0.0, fits=None):
    return Group(
        size, limit, fits or (lambda tokens: True), limit + 1, alpha, list(live), Finished(num_return_sequences)
    )


def test_the_best_finished_are_kept_and_of_equal_ones_the_first():
    finished = Finished(2)
    assert finished.worst == -math.inf
    for score, token in ((-3.0, 3), (-1.0, 4), (-1.0, 5), (-2.0, 6), (-1.0, 7)):
        finished.add(hypothesis(score, token))
    assert [found.tokens for found in finished.hypotheses] == [[4], [5]]
    assert finished.worst == -1.0


def test_an_end_counts_only_among_the_best():
    for rank, ends in ((0, True), (1, True), (2, False)):
        tokens = [3, 4, 5]
        tokens.insert(rank, EOS)
        beams = group(2, Live([], 0.0, 0))
        ended = beams.advance([Candidate(-place, 0, token) for place, token in enumerate(tokens)], EOS, None)
        assert bool(ended) == ends
        assert [live.tokens for live in beams.live] == [[3], [4]]


def test_the_greedy_hypothesis_takes_the_last_place_or_ends():
    candidates = [Candidate(-1.0, 0, 3), Candidate(-2.0, 0, 4), Candidate(-3.0, 0, 5), Candidate(-9.0, 1, 6)]
    beams = group(2, Live([7], -0.5, 0), Live([8], -0.6, 1, greedy=True))
    assert beams.advance(candidates, EOS, candidates[3]) == []
    assert [(live.tokens, live.greedy, live.row) for live in beams.live] == [([7, 3], False, 0), ([8, 6], True, 1)]
    beams = group(2, Live([7], -0.5, 0), Live([8], -0.6, 1, greedy=True))
    (ended,) = beams.advance(candidates[:3], EOS, Candidate(-9.0, 1, EOS))
    assert (ended.tokens, ended.log_probability) == ([8], -9.0)
    assert [live.tokens for live in beams.live] == [[7, 3], [7, 4]]


def test_a_group_of_one_is_done_when_it_ended():
    beams = group(1, Live([], 0.0, 0))
    assert len(beams.advance([Candidate(-1.0, 0, EOS), Candidate(-1.5, 0, 3)], EOS, None)) == 1
    assert beams.live == []


def test_the_limit_stops_what_did_not_end():
    beams = group(2, Live([3], -1.0, 0), limit=1)
    assert len(beams.advance([Candidate(-1.5, 0, 4), Candidate(-2.0, 0, EOS)], EOS, None)) == 1
    assert beams.live == []
    assert [live.tokens for live in beams.cut] == [[3]]


def test_more_is_needed_until_nothing_live_can_win():
    beams = group(2, Live([3], -2.0, 0), limit=9, alpha=1.0)
    assert beams.needs_more
    bound = -2.0 / length_penalty(10, 1.0)
    beams.finished.add(hypothesis(bound - 0.01))
    assert beams.needs_more
    beams.finished.add(hypothesis(bound))
    assert not beams.needs_more


def test_what_does_not_fit_makes_room_for_what_does():
    beams = group(2, Live([7, 7], -0.1, 0), Live([8], -0.5, 1), fits=lambda tokens: len(tokens) < 3)
    candidates = [Candidate(-place, 0, 3 + place) for place in range(6)] + [Candidate(-9.0, 1, 4)]
    assert beams.advance(candidates, EOS, candidates[0]) == []
    assert [live.tokens for live in beams.live] == [[8, 4]]
    assert beams.advance([Candidate(-9.5, 0, 5)], EOS, None) == []
    assert beams.live == []
    assert [live.tokens for live in beams.cut] == [[8, 4]]
