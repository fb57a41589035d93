import json

import pytest

from xformer.errors import CheckpointError
from xformer.generation import GenerationConfig
from xformer.generation.pretrained import read_generation
from xformer.models import LanguageModelConfig, TransformerConfig


def read(directory, values, *, encoder_decoder=False, name="generation_config.json"):
    (directory / name).write_text(json.dumps(values))
    return read_generation(directory, encoder_decoder=encoder_decoder)


def test_a_language_model_that_samples(tmp_path):
    values = {
        "bos_token_id": 128000,
        "do_sample": True,
        "eos_token_id": [128001, 128008, 128009],
        "temperature": 0.6,
        "top_p": 0.9,
        "max_length": 4096,
        "transformers_version": "4.42.3",
        "_from_model_config": True,
    }
    settings = read(tmp_path, values)
    assert settings.options == {"do_sample": True, "top_k": 50, "temperature": 0.6, "top_p": 0.9}
    assert settings.eos_ids == (128001, 128008, 128009)
    assert settings.ignored == {"max_length": 4096}
    assert GenerationConfig(**settings.options).method == "sampling"
    assert read(tmp_path, {"do_sample": True, "top_k": 0}).options == {"do_sample": True}


def test_sampling_settings_do_not_apply_to_greedy_search(tmp_path):
    settings = read(tmp_path, {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05})
    assert settings.options == {"repetition_penalty": 1.05}
    assert GenerationConfig(**settings.options).method == "greedy"


def test_contradictory_settings(tmp_path):
    settings = read(tmp_path, {"do_sample": True, "num_beams": 4, "temperature": 0.5})
    assert settings.options == {"do_sample": True, "top_k": 50, "temperature": 0.5}
    assert settings.ignored == {"num_beams": 4}
    assert read(tmp_path, {"do_sample": True, "temperature": 0.0}).options == {}


def test_an_encoder_decoder_with_beams(tmp_path):
    values = {
        "bad_words_ids": [[58100], [5, 6]],
        "decoder_start_token_id": 58100,
        "eos_token_id": 0,
        "pad_token_id": 58100,
        "forced_bos_token_id": [7],
        "forced_eos_token_id": 0,
        "length_penalty": 2.0,
        "max_length": 142,
        "min_length": 56,
        "no_repeat_ngram_size": 3,
        "num_beams": 4,
        "early_stopping": True,
        "suppress_tokens": [9, 3],
        "begin_suppress_tokens": [220, 50257],
    }
    settings = read(tmp_path, values, encoder_decoder=True)
    assert settings.options == {
        "num_beams": 4,
        "length_penalty": 2.0,
        "no_repeat_ngram_size": 3,
        "suppress_tokens": (3, 9, 58100),
        "max_new_tokens": 140,  # without the start and the forced eos
        "min_new_tokens": 55,
        "begin_suppress_tokens": (220, 50257),
    }
    assert (settings.start_id, settings.eos_ids, settings.forced_bos_id) == (58100, (0,), 7)
    assert settings.ignored == {"bad_words_ids": [[5, 6]]}
    assert GenerationConfig(**settings.options).method == "beam"


def test_settings_that_the_pipeline_of_whisper_replaces(tmp_path):
    values = {"forced_decoder_ids": [[1, None], [2, 50359]], "suppress_tokens": [-1], "is_multilingual": True}
    settings = read(tmp_path, {**values, "task": "transcribe"}, encoder_decoder=True)
    assert (settings.options, settings.ignored) == ({}, {})
    forced = {"forced_decoder_ids": [[1, 50261], [2, 50359]], "language": "german"}
    assert read(tmp_path, forced, encoder_decoder=True).ignored == forced


def test_one_warning_names_the_settings_that_are_ignored(tmp_path, caplog):
    values = {"guidance_scale": 1.5, "stop_strings": ["END"], "typical_p": 0.9, "encoder_no_repeat_ngram_size": 0}
    settings = read(tmp_path, {**values, "decoder_start_token_id": 7, "early_stopping": True}, encoder_decoder=True)
    settings.config(TransformerConfig(source_vocab_size=9, target_vocab_size=9))
    path = tmp_path / "generation_config.json"
    assert caplog.messages == [
        f"{path}: settings that are not supported are ignored: guidance_scale 1.5, stop_strings ['END'], "
        "decoder_start_token_id 7"
    ]
    caplog.clear()
    read(tmp_path, {"num_beams": 2}, encoder_decoder=True).config(LanguageModelConfig(vocab_size=9))
    assert caplog.messages == []


def test_old_checkpoints_have_their_settings_in_the_model_configuration(tmp_path):
    values = {"model_type": "bart", "d_model": 16, "num_beams": 4, "eos_token_id": 2, "max_length": 10}
    values["encoder_no_repeat_ngram_size"] = 3
    settings = read(tmp_path, values, encoder_decoder=True, name="config.json")
    assert settings.options == {"num_beams": 4, "length_penalty": 1.0, "max_new_tokens": 9}
    assert (settings.eos_ids, settings.ignored) == ((2,), {"encoder_no_repeat_ngram_size": 3})
    assert read_generation(tmp_path / "missing", encoder_decoder=True).options == {}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"eos_token_id": "x"}, "eos_token_id 'x'; expected a token id"),
        ({"eos_token_id": [1, -5]}, "expected a token id"),
        ({"num_beams": 1.5}, "expected an integer"),
        ({"num_beams": True}, "expected an integer"),
        ({"temperature": "hot"}, "expected a number"),
        ({"temperature": float("nan")}, "expected a number"),
        ({"do_sample": "yes"}, "expected true or false"),
        ({"bad_words_ids": 5}, "list of lists"),
        ({"repetition_penalty": -1}, "repetition_penalty is -1.0; expected a number in"),
        ({"num_beams": 3, "num_beam_groups": 2}, "num_beam_groups 2 does not divide num_beams 3"),
    ],
)
def test_invalid_values(tmp_path, values, message):
    with pytest.raises(CheckpointError, match=message) as error:
        read(tmp_path, values)
    assert "generation_config.json" in str(error.value)
