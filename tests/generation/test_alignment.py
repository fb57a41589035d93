import numpy as np
import pytest

from tests.generation.definitions import SOURCES, padded, varied_model
from tests.reference import raises_line
from xformer.errors import ConfigError, DataError
from xformer.generation import alignments

OUTPUTS = [[3, 4, 5], [6], [], [12, 11, 10, 9], [7, 7]]


@pytest.fixture(scope="module")
def model():
    return varied_model(num_decoder_layers=3)


def test_alignments_are_the_attention_of_the_query_that_predicts(model):
    for layer in (None, 0, 1, 2):
        found = alignments(model, padded(SOURCES), OUTPUTS, layer=layer)
        for source, output, attention in zip(SOURCES, OUTPUTS, found, strict=True):
            assert attention.shape == (len(output), len(source))
            np.testing.assert_allclose(attention.sum(axis=1), 1.0)
            if output:
                weights = model.cross_attention_weights([source], [[1, *output[:-1]]])[1 if layer is None else layer]
                np.testing.assert_allclose(attention, weights[0].mean(axis=0), atol=1e-12)


def test_padding_on_the_left_is_left_out(model):
    left = alignments(model, padded(SOURCES, left=True), OUTPUTS)
    for one, two in zip(left, alignments(model, padded(SOURCES), OUTPUTS), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-12)


def test_a_single_layer_and_an_empty_batch(model):
    assert alignments(varied_model(num_decoder_layers=1), [SOURCES[0]], [[3]])[0].shape == (1, 5)
    assert alignments(model, np.zeros((0, 3), dtype="int64"), []) == []


def test_invalid_arguments_raise(model):
    with raises_line(DataError, "got 1 outputs for 5 inputs"):
        alignments(model, padded(SOURCES), [[3]])
    with raises_line(ConfigError, "layer is 3; expected 0 to 2 for a decoder of 3 layers"):
        alignments(model, [[4, 2]], [[3]], layer=3)
