"""Attention weights as arrays, HTML and plots."""

from __future__ import annotations

import numpy as np
import pytest

from xformer.errors import ConfigError, DataError
from xformer.models import Encoder, EncoderConfig, LanguageModel, LanguageModelConfig, Transformer, TransformerConfig
from xformer.pipelines import TextGenerator, Tokenizers, Translator, show_attention
from xformer.tokenizers import Tokenizer

SIZES = {"d_model": 16, "num_heads": 2, "d_ff": 32}
LINES = ["two & three", "zwei <drei>"]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(LINES, 60)


@pytest.fixture(scope="module")
def translator(tokenizer):
    size = tokenizer.vocab_size
    config = TransformerConfig(
        source_vocab_size=size, target_vocab_size=size, num_encoder_layers=1, num_decoder_layers=3, **SIZES
    )
    return Translator(Transformer(config, dtype="float64"), Tokenizers(tokenizer, tokenizer))


def test_the_rows_of_a_pair_are_the_queries_that_predict_the_output(translator, tokenizer):
    attention = show_attention(translator, *LINES)
    source, target = ([*tokenizer.encode(line), 2] for line in LINES)
    expected = translator.model.cross_attention_weights([source], [[1, *target[:-1]]])
    weights, queries, keys = attention.maps["cross"]
    np.testing.assert_allclose(weights, np.concatenate(expected), rtol=1e-5)
    assert queries[-1] == keys[-1] == "</s>"
    assert len(queries) == len(target)
    assert attention.maps["decoder"].keys == ["<s>", *queries[:-1]]
    assert attention.maps["encoder"].weights.shape == (1, 2, len(source), len(source))
    assert not np.triu(attention.maps["decoder"].weights[1, 0], 1).any()


def test_ids_and_texts_give_the_same_weights(translator, tokenizer):
    ids = [tokenizer.encode(line) for line in LINES]
    by_text = show_attention(translator, *LINES).maps["cross"]
    by_ids = show_attention(translator.model, np.asarray([[*ids[0], 2]]), ids[1]).maps["cross"]
    np.testing.assert_array_equal(by_ids.weights, by_text.weights)
    assert by_ids.keys == [*map(str, ids[0]), "2"]


def test_without_a_target_the_output_of_the_model_is_shown(translator):
    ((output,),) = translator.outputs(LINES[:1])
    generated, given = (show_attention(translator, LINES[0], each).maps["cross"] for each in (None, output.tokens))
    assert generated.queries == given.queries
    np.testing.assert_array_equal(generated.weights, given.weights)


def test_models_of_one_text(tokenizer):
    config = LanguageModelConfig(vocab_size=tokenizer.vocab_size, num_layers=2, **SIZES)
    generator = TextGenerator(LanguageModel(config), tokenizer)
    weights, queries, keys = show_attention(generator, "two & t").maps["decoder"]
    assert queries == keys
    assert weights.shape == (2, 2, len(keys), len(keys))
    np.testing.assert_allclose(weights.sum(axis=-1), 1.0, rtol=1e-5)
    encoder = Encoder(EncoderConfig(vocab_size=20, num_layers=2, **SIZES))
    assert repr(show_attention(encoder, [5, 4, 7])) == "Attention(encoder=[2, 2, 3, 3])"


def test_the_html_has_every_layer_and_head_and_escapes_tokens(translator):
    content = show_attention(translator, *LINES)._repr_html_()
    cross = content[: content.index("self-attention of the decoder")]
    assert cross.count("<image") == 3 * (1 + 2)
    assert content.index('<option value="2">') < content.index('<option value="1">')
    assert "&amp;" in content
    assert "<drei" not in content


def test_a_plot_has_the_source_on_x(translator):
    pytest.importorskip("matplotlib")
    attention = show_attention(translator, *LINES)
    weights, queries, keys = attention.maps["cross"]
    axes, scale = attention.plot(layer=1, head=0, title="pair").axes
    assert scale.get_ylabel() == "attention, layer 1, head 0"
    assert [label.get_text() for label in axes.get_xticklabels()] == keys
    assert [label.get_text() for label in axes.get_yticklabels()] == queries
    np.testing.assert_array_equal(axes.images[0].get_array(), weights[1, 0])
    mean = attention.plot("encoder").axes[0].images[0].get_array()
    np.testing.assert_allclose(mean, attention.maps["encoder"].weights[-1].mean(axis=0))
    for options, message in (({"kind": "self"}, "kind is 'self'"), ({"layer": 3}, "layer is 3"), ({"head": 2}, "head")):
        with pytest.raises(ConfigError, match=message):
            attention.plot(**options)


def test_errors_name_what_was_expected(translator):
    with pytest.raises(DataError, match="source is blank"):
        show_attention(translator, " ")
    with pytest.raises(DataError, match="source is a text; expected token ids"):
        show_attention(translator.model, "two")
    with pytest.raises(DataError, match=r"source has shape \(2, 1\)"):
        show_attention(translator.model, [[1], [2]])
    model = LanguageModel(LanguageModelConfig(vocab_size=9, num_layers=1, **SIZES))
    with pytest.raises(ConfigError, match="target was passed to a LanguageModel"):
        show_attention(model, [5], [6])


def test_pipelines_describe_themselves(translator):
    lines = repr(translator).splitlines()
    assert lines[0] == "Translator("
    assert lines[1] == f"  model=Transformer({translator.model.parameter_count():,} parameters, float64, numpy),"
    assert "Tokenizer(model='bpe'" in lines[2]
    assert "<details open><summary>Transformer, " in translator._repr_html_()
