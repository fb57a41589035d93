from tests.reference import raises_line
from xformer.errors import DataError
from xformer.generation.topic import TopicFocus, topic_foci


def focus(*phrases):
    return TopicFocus.of(phrases, 20)


def test_a_phrase_is_begun_and_continued():
    city = focus([[7, 8, 9]])
    assert city.wanted([]) == {7: 1.0}
    assert city.wanted([3, 7]) == {7: 1.0, 8: 2.0}
    assert city.wanted([7, 8]) == {7: 1.0, 9: 2.0}
    assert city.wanted([7, 8, 3]) == {7: 1.0}
    assert city.wanted([3, 7, 8, 9]) == {}
    assert city.wanted([7, 8, 9, 4, 5]) == {}


def test_the_longest_beginning_counts():
    stutter = focus([[5, 5, 6]])
    assert stutter.wanted([5]) == {5: 2.0}
    assert stutter.wanted([5, 5]) == {5: 1.0, 6: 2.0}
    assert stutter.wanted([5, 5, 5]) == {5: 1.0, 6: 2.0}
    assert stutter.wanted([5, 5, 5, 6]) == {}


def test_any_tokenisation_of_a_phrase_will_do():
    both = focus([[7, 8], [9]], [[4]])
    assert both.wanted([]) == {7: 1.0, 9: 1.0, 4: 1.0}
    assert both.wanted([9]) == {4: 1.0}
    assert both.wanted([4, 7]) == {7: 1.0, 8: 2.0, 9: 1.0}
    assert both.wanted([4, 7, 8]) == {}


def test_several_phrases_that_want_one_token_do_not_add_up():
    assert focus([[7, 8]], [[7, 9]]).wanted([7]) == {7: 1.0, 8: 2.0, 9: 2.0}


def test_bad_phrases():
    with raises_line(DataError, r"topic phrase \[\[\]\] has no tokens"):
        focus([[]])
    with raises_line(DataError, r"topic phrase \[\] has no tokens"):
        focus([])
    with raises_line(DataError, "topic has the token id 20; expected 0 to 19"):
        focus([[3, 20]])
    with raises_line(DataError, "topics has 1 entries for 2 sentences"):
        topic_foci([[]], 2, 20)
    assert topic_foci(None, 2, 20) is None
