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


def test_sampling_settings_apply_to_calls_that_sample(tmp_path):
    settings = read(tmp_path, {"temperature": 0.7, "top_k": 20, "typical_p": 0.8, "repetition_penalty": 1.05})
    config = GenerationConfig(**settings.options)
    assert config == GenerationConfig(do_sample=False, temperature=0.7, top_k=20, repetition_penalty=1.05)
    assert (config.method, settings.ignored) == ("greedy", {})
    sampling = GenerationConfig.resolve(config, {"temperature": 0.5})
    assert (sampling.method, sampling.temperature, sampling.top_k) == ("sampling", 0.5, 20)


def test_contradictory_settings(tmp_path):
    settings = read(tmp_path, {"do_sample": True, "num_beams": 4, "temperature": 0.5})
    assert settings.options == {"do_sample": True, "top_k": 50, "temperature": 0.5}
    assert settings.ignored == {"num_beams": 4}
    greedy = GenerationConfig(**read(tmp_path, {"do_sample": True, "temperature": 0.0}).options)
    assert greedy.method == "greedy"
    assert GenerationConfig.resolve(greedy, {"temperature": 0.7}).method == "sampling"


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
        "suppress_tokens": (9, 3, 58100),
        "max_new_tokens": 140,  # without the start and the forced eos
        "min_new_tokens": 55,
        "begin_suppress_tokens": (220, 50257),
        "early_stopping": True,
    }
    assert (settings.eos_ids, settings.forced_bos_id) == ((0,), 7)
    assert settings.ignored == {"bad_words_ids": [[5, 6]]}
    assert GenerationConfig(**settings.options).method == "beam"


def test_lists_of_ids_keep_their_order_and_repetitions(tmp_path):
    values = {"bad_words_ids": [[7, 7], [8]], "suppress_tokens": [9, 3, 9], "begin_suppress_tokens": [5, 2, 5]}
    settings = read(tmp_path, {**values, "eos_token_id": [4, 1, 4]})
    assert settings.options == {"suppress_tokens": (9, 3, 9, 8), "begin_suppress_tokens": (5, 2, 5)}
    assert (settings.eos_ids, settings.ignored) == ((4, 1, 4), {"bad_words_ids": [[7, 7]]})
    config = settings.config(LanguageModelConfig(vocab_size=10, eos_id=4))
    assert (config.suppress_tokens, config.stop_token_ids) == ((9, 3, 9, 8), (1,))


# Values with an effect in transformers; other keys have the value 2.
VALUES = {
    **dict.fromkeys(("do_sample", "early_stopping", "renormalize_logits", "token_healing"), True),
    **dict.fromkeys(("top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"), 0.5),
    **{key: [2] for key in ("suppress_tokens", "begin_suppress_tokens", "stop_strings")},
    **{key: [[2, 2]] for key in ("bad_words_ids", "force_words_ids")},
    "num_beam_groups": 2,
}
BEAMS = ("renormalize_logits", "num_beam_groups", "diversity_penalty")
SAMPLING = ("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
# These concern speed and memory, the values that a call returns, or what the model, its tokenizer and its class state.
NO_EFFECT = {
    *("assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind", "bos_token_id"),
    *("cache_config", "cache_implementation", "compile_config", "continuous_batching_config", "decoder_start_token_id"),
    *("disable_compile", "is_assistant", "low_memory", "max_cache_len", "max_matching_ngram_size"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "output_attentions", "output_hidden_states"),
    *("output_logits", "output_scores", "pad_token_id", "prefill_chunk_size", "prompt_lookup_num_tokens"),
    *("remove_invalid_values", "return_dict_in_generate", "speculation_type", "target_lookbehind"),
    *("transformers_version", "use_cache", "use_mtp", "_from_model_config"),
}


def test_each_key_of_transformers_is_followed_or_named_in_a_warning(tmp_path):
    transformers = pytest.importorskip("transformers")
    keys = transformers.GenerationConfig().to_dict().keys() | vars(transformers.GenerationConfig()).keys()
    for key in keys - NO_EFFECT - {"_original_object_hash"}:
        others = {"num_beams": 2} if key in BEAMS else {"do_sample": True} if key in SAMPLING else {}
        for encoder_decoder in (False, True):
            plain = read(tmp_path, others, encoder_decoder=encoder_decoder)
            settings = read(tmp_path, {**others, key: VALUES.get(key, 2)}, encoder_decoder=encoder_decoder)
            if key == "forced_eos_token_id":  # the last token of an output of the maximum length
                settings = read(tmp_path, {key: 2, "max_new_tokens": 5}, encoder_decoder=encoder_decoder)
                assert settings.options["max_new_tokens"] == 4
            assert settings != plain, key


def test_the_limits_of_an_encoder_decoder_include_the_start_of_the_decoder(tmp_path):
    options = read(tmp_path, {"min_length": 1, "max_length": 1}, encoder_decoder=True).options
    assert options == {"min_new_tokens": 0, "max_new_tokens": 1}


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
        f"{path}: settings that are invalid or not supported are ignored: guidance_scale 1.5, stop_strings ['END']"
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
    ("values", "options"),
    [
        ({"eos_token_id": "x"}, {}),
        ({"eos_token_id": [1, -5]}, {}),
        ({"num_beams": 1.5}, {}),
        ({"num_beams": True}, {}),
        ({"do_sample": True, "temperature": "hot"}, {"do_sample": True, "top_k": 50}),
        ({"do_sample": True, "temperature": float("nan")}, {"do_sample": True, "top_k": 50}),
        ({"do_sample": True, "temperature": 2000.0}, {"do_sample": True, "top_k": 50}),
        ({"do_sample": True, "top_k": -1}, {"do_sample": True, "top_k": 50}),
        ({"do_sample": True, "top_p": 1.5}, {"do_sample": True, "top_k": 50}),
        ({"do_sample": "yes"}, {}),
        ({"bad_words_ids": 5}, {}),
        ({"repetition_penalty": -1.0}, {}),
        ({"length_penalty": -1.0}, {}),
        ({"num_return_sequences": 2}, {}),
        ({"max_new_tokens": 0}, {}),
        ({"num_beams": 3, "num_beam_groups": 2}, {"num_beams": 3, "length_penalty": 1.0}),
    ],
)
def test_invalid_defaults_are_ignored_with_a_warning(tmp_path, caplog, values, options):
    settings = read(tmp_path, values)
    assert settings.options == options
    settings.config(LanguageModelConfig(vocab_size=9))
    key, value = list(values.items())[-1]
    assert caplog.messages == [
        f"{tmp_path / 'generation_config.json'}: settings that are invalid or not supported are ignored: {key} {value}"
    ]


def test_damaged_files_raise(tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        read_generation(tmp_path, encoder_decoder=False)
