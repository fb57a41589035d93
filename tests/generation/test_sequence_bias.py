from tests.reference import raises_line
from xformer.errors import DataError
from xformer.generation.processors import check_sequence_bias, phrase_weights


def weights(history, *phrases):
    ((*checked,),) = check_sequence_bias([phrases], 1, 20)
    return phrase_weights(checked, history)


def test_tokens_that_begin_or_continue_a_phrase_are_favored():
    city = [[[7, 8, 9]]]
    assert weights([], *city) == {7: 1.0}
    assert weights([3, 7], *city) == {7: 1.0, 8: 2.0}
    assert weights([7, 8], *city) == {7: 1.0, 9: 2.0}
    assert weights([7, 8, 3], *city) == {7: 1.0}
    assert weights([3, 7, 8, 9], *city) == {}
    assert weights([7, 8, 9, 4, 5], *city) == {}


def test_the_longest_beginning_counts():
    stutter = [[[5, 5, 6]]]
    assert weights([5], *stutter) == {5: 2.0}
    assert weights([5, 5], *stutter) == {5: 1.0, 6: 2.0}
    assert weights([5, 5, 5], *stutter) == {5: 1.0, 6: 2.0}
    assert weights([5, 5, 5, 6], *stutter) == {}


def test_any_tokenization_of_a_phrase_counts():
    both = [[[7, 8], [9]], [[4]]]
    assert weights([], *both) == {7: 1.0, 9: 1.0, 4: 1.0}
    assert weights([9], *both) == {4: 1.0}
    assert weights([4, 7], *both) == {7: 1.0, 8: 2.0, 9: 1.0}
    assert weights([4, 7, 8], *both) == {}


def test_the_weights_of_several_phrases_are_not_added():
    assert weights([7], [[7, 8]], [[7, 9]]) == {7: 1.0, 8: 2.0, 9: 2.0}


def test_invalid_phrases_are_refused():
    with raises_line(DataError, r"sequence_bias has the phrase \[\[\]\]; expected at least one token id"):
        weights([], [[]])
    with raises_line(DataError, r"sequence_bias has the phrase \[\]; expected"):
        weights([], [])
    with raises_line(DataError, "sequence_bias has token id 20; expected 0 to 19"):
        weights([], [[3, 20]])
    with raises_line(DataError, "sequence_bias has 1 entries for 2 inputs"):
        check_sequence_bias([[]], 2, 20)
    assert check_sequence_bias(None, 2, 20) is None
