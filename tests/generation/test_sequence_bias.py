from tests.reference import raises_line
from xformer.errors import DataError
from xformer.generation.sequence_bias import PhraseSet, phrase_sets


def phrase_set(*phrases):
    return PhraseSet.make(phrases, 20)


def test_a_phrase_is_begun_and_continued():
    city = phrase_set([[7, 8, 9]])
    assert city.weights([]) == {7: 1.0}
    assert city.weights([3, 7]) == {7: 1.0, 8: 2.0}
    assert city.weights([7, 8]) == {7: 1.0, 9: 2.0}
    assert city.weights([7, 8, 3]) == {7: 1.0}
    assert city.weights([3, 7, 8, 9]) == {}
    assert city.weights([7, 8, 9, 4, 5]) == {}


def test_the_longest_beginning_counts():
    stutter = phrase_set([[5, 5, 6]])
    assert stutter.weights([5]) == {5: 2.0}
    assert stutter.weights([5, 5]) == {5: 1.0, 6: 2.0}
    assert stutter.weights([5, 5, 5]) == {5: 1.0, 6: 2.0}
    assert stutter.weights([5, 5, 5, 6]) == {}


def test_any_tokenization_of_a_phrase_counts():
    both = phrase_set([[7, 8], [9]], [[4]])
    assert both.weights([]) == {7: 1.0, 9: 1.0, 4: 1.0}
    assert both.weights([9]) == {4: 1.0}
    assert both.weights([4, 7]) == {7: 1.0, 8: 2.0, 9: 1.0}
    assert both.weights([4, 7, 8]) == {}


def test_several_phrases_that_want_one_token_do_not_add_up():
    assert phrase_set([[7, 8]], [[7, 9]]).weights([7]) == {7: 1.0, 8: 2.0, 9: 2.0}


def test_bad_phrases():
    with raises_line(DataError, r"sequence_bias has the phrase \[\[\]\]; expected at least one token id"):
        phrase_set([[]])
    with raises_line(DataError, r"sequence_bias has the phrase \[\]; expected"):
        phrase_set([])
    with raises_line(DataError, "sequence_bias has token id 20; expected 0 to 19"):
        phrase_set([[3, 20]])
    with raises_line(DataError, "sequence_bias has 1 entries for 2 inputs"):
        phrase_sets([[]], 2, 20)
    assert phrase_sets(None, 2, 20) is None
