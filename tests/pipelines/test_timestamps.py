"""Timestamps of segments and words, subtitles, and the windows of long audio, with a tiny random Whisper model."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tokenizers

import xformer as xf
from tests.pipelines.test_transcription import write_wav
from tests.reference import normal, raises_line
from xformer.backends import from_host, to_host
from xformer.cli.main import exit_code
from xformer.data.audio import log_mel_spectrogram
from xformer.errors import ConfigError, DataError
from xformer.generation import Hypothesis
from xformer.generation.processors import Rows
from xformer.pipelines import Segment, Transcription, Word, transcription
from xformer.pipelines.timestamps import (
    TimestampRules,
    TokenSegment,
    align,
    merge_punctuation,
    shorten_pauses,
    split_segments,
    split_words,
)
from xformer.tree import map_arrays

WORDS = [*(f"Ġword{number}" for number in range(36)), ".", ",", "ing", "Ġ("]
NAMES = ("endoftext", "startoftranscript", "en", "zh", "transcribe", "translate", "nospeech", "notimestamps")
SPECIAL = {f"<|{name}|>": 40 + index for index, name in enumerate(NAMES)}
EOS, START, FIRST, POSITIONS = 40, 41, 48, 25
WINDOW = 320 * POSITIONS  # half a second
NOISE = 0.1 * normal(0, 3 * WINDOW + 100).astype(np.float32)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    """Make a tiny random model, a tokenizer with spaces before words, and its settings."""
    directory = tmp_path_factory.mktemp("timestamps")
    config = xf.SpeechTransformerConfig(
        source_vocab_size=6, target_vocab_size=FIRST + POSITIONS + 1, d_model=16, num_heads=2, d_ff=24,
        num_encoder_layers=1, num_decoder_layers=2, positions="learned", max_source_positions=POSITIONS,
        max_positions=40, key_bias=False, scale_embeddings=False, tie_output=True, pad_id=EOS, bos_id=START,
        eos_id=EOS, suppress_special=False, activation="gelu",
    )  # fmt: skip
    model = xf.SpeechTransformer(config, seed=4)
    model = map_arrays(lambda x: 3.0 * x, model)  # less uniform outputs
    xf.save_pretrained(model, directory)
    vocab = {word: index for index, word in enumerate(WORDS)} | SPECIAL
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=WORDS[0]))
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(list(SPECIAL))
    inner.save(str(directory / "tokenizer.json"))
    settings = {"is_multilingual": True, "max_length": 40, "suppress_tokens": list(range(START, FIRST))}
    settings |= {"alignment_heads": [[1, 0], [1, 1]], "max_initial_timestamp_index": 5}
    (directory / "generation_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture(scope="module")
def transcriber(whisper):
    return xf.Transcriber.from_pretrained(whisper)


def scripted(monkeypatch, outputs, log_probability=0.0):
    """Let the model write given tokens, one list for each window; returns the list of their frames."""
    frames, remaining = [], iter(outputs)

    def generate(model, features, config, *, prefix, **options):
        frames.extend(features)
        return [[Hypothesis([*each, *next(remaining)], log_probability, 0.0, True)] for each in prefix]

    monkeypatch.setattr(transcription, "generate", generate)
    return frames


# --- Tokens -----------------------------------------------------------------------------------------------------------


# Vocabulary of 20 tokens: text 0 to 9, eos 10, special tokens 11 to 13, timestamps 14 to 19; the prefix is 11, 12.
# The tokens that WhisperTimeStampLogitsProcessor of transformers 5.23 leaves, for logits of `normal(0, 20)` plus a bias
# of timestamps.
TEXT = list(range(13))
ALLOWED = [
    ([], -9.0, [14, 15, 16]), ([], 3.0, [14, 15, 16]), ([14], -9.0, TEXT), ([14], 3.0, TEXT),
    ([14, 3], -9.0, [*TEXT, 15, 16, 17, 18, 19]), ([14, 3], 0.0, [15, 16, 17, 18, 19]),
    ([14, 3, 16], -9.0, [10, 11, 12, 16, 17, 18, 19]), ([14, 3, 16], 0.0, [16, 17, 18, 19]),
    ([14, 3, 16, 16], -9.0, TEXT), ([14, 3, 16, 16], 3.0, TEXT), ([14, 3, 16, 16, 4], -9.0, [*TEXT, 17, 18, 19]),
    ([14, 3, 16, 16, 4], 0.0, [17, 18, 19]), ([14, 3, 19, 19, 4], -9.0, TEXT), ([14, 3, 19, 19, 4], 3.0, TEXT),
    ([14, 3, 16, 18, 5, 6], 0.0, [*TEXT, 19]), ([14, 3, 16, 18, 5, 6], 3.0, [19]),
]  # fmt: skip


def test_the_rules_leave_the_tokens_that_transformers_leaves(xp):
    rules = TimestampRules(14, 10, 2)
    for output, bias, expected in ALLOWED:
        logits = normal(0, 20).astype(np.float32) + np.where(np.arange(20) >= 14, bias, 0.0).astype(np.float32)
        rows = Rows.first([[11, 12]], [0], is_normalized=False)
        for token in output:
            rows = rows.extend([token])
        tokens, lengths = (from_host(xp, each) for each in (rows.tokens, rows.lengths))
        changed = to_host(rules(tokens, lengths, from_host(xp, logits[None]), rows))
        assert np.flatnonzero(np.isfinite(changed[0])).tolist() == expected
        np.testing.assert_array_equal(changed[0, expected], logits[expected])


# Tokens from 100 on are timestamps; the window has 50 positions. Segments and the next position are those of
# `WhisperGenerationMixin._retrieve_segment`.
@pytest.mark.parametrize(
    ("tokens", "segments", "next_position"),
    [
        ([100, 1, 2, 105, 105, 3, 4], [(0, 5, [1, 2])], 5),
        ([100, 1, 2, 105, 105, 3, 110], [(0, 5, [1, 2]), (5, 10, [3])], 50),
        ([102, 1, 105, 107, 2, 110, 110], [(2, 5, [1]), (7, 10, [2])], 10),
        ([100, 1, 2, 3], [(0, 50, [1, 2, 3])], 50),
        ([100, 1, 60, 130], [(0, 30, [1])], 50),  # special tokens are no text
        ([], [], 50),
    ],
)
def test_pairs_of_timestamps_separate_segments(tokens, segments, next_position):
    expected = [TokenSegment(*each) for each in segments]
    assert split_segments(tokens, 100, 50, 50) == (expected, next_position)


# --- Words ------------------------------------------------------------------------------------------------------------


def test_tokens_begin_where_transformers_finds_them():
    centers = 3.0 * np.arange(7)[:, None] + normal(1, 3, 7, 1)
    weights = np.exp(-((np.arange(24) - centers) ** 2) / 6.0) + 0.1 * np.abs(normal(2, 3, 7, 24))
    weights /= weights.sum(axis=-1, keepdims=True)
    # `_extract_token_timestamps` of transformers, whose normalization covers the tokens from the third on.
    assert align(weights[:, 2:], 0).tolist() == [0, 7, 10, 13, 16]
    np.testing.assert_array_equal(align(weights, 2, -1), align(5.0 * weights, 2, 6))


PIECES = [' "', "Hel", "lo", '",', " said", " (", " x", ")", " 50", "%", " well", "-", "known", ".", " Bye", "!"]


def test_words_are_those_of_transformers():
    words = split_words(range(len(PIECES)), lambda ids: "".join(PIECES[i] for i in ids))
    assert sum(count for _, count in words) == len(PIECES)
    timed = [Word(text, float(i), float(i + 1), 1.0) for i, (text, _) in enumerate(words)]
    merged = merge_punctuation(timed)
    # `_combine_tokens_into_words` of transformers.
    assert [word.text for word in merged] == [' "Hello",', " said", " ( x)", " 50", "%", " well", "-known.", " Bye!"]
    assert merged[0].start == 0.0
    assert all(word.start < word.end for word in merged)
    assert "".join(word.text for word in merged) == "".join(PIECES)


def test_languages_without_spaces_have_words_of_one_character():
    text = "你好世界".encode()
    words = split_words(text, lambda ids: bytes(ids).decode(errors="replace"), has_spaces=False)
    assert words == [("你", 3), ("好", 3), ("世", 3), ("界", 3)]
    assert split_words(text[:4], lambda ids: bytes(ids).decode(errors="replace"), has_spaces=False)[-1] == ("\ufffd", 1)


def test_pauses_are_no_part_of_words():
    times = [(" One", 0, 90), (" two", 90, 100), (" three", 100, 110), (".", 110, 200), (" Four", 200, 210)]
    words = shorten_pauses([Word(text, start, end, 1.0) for text, start, end in times])
    assert [(word.start, word.end) for word in words] == [(70, 90), (90, 100), (100, 110), (110, 130), (200, 210)]
    assert shorten_pauses([Word(" a", 3, 3, 1.0)]) == [Word(" a", 3, 3, 1.0)]
    assert shorten_pauses([]) == []


# --- The pipeline -----------------------------------------------------------------------------------------------------


def check_times(result, duration):
    """Times never run backwards and end with the audio; texts are those of the segments."""
    assert result.text == ("" if result.language == "zh" else " ").join(segment.text for segment in result.segments)
    last = 0.0
    for segment in result.segments:
        assert last <= segment.start < segment.end <= duration
        last = segment.end
        place = segment.start
        for word in segment.words:
            assert place <= word.start <= word.end <= segment.end
            assert 0.0 <= word.probability <= 1.0
            place = word.end
        if segment.words:
            assert "".join(word.text for word in segment.words).strip() == segment.text


@pytest.mark.parametrize(
    ("timestamps", "options"), [("segments", {"num_beams": 3}), ("words", {"temperature": 1.0, "seed": 2**64 - 1})]
)
def test_times_are_in_order_for_any_output(transcriber, timestamps, options):
    signals = [NOISE, NOISE[:200], NOISE[: WINDOW + 999]]
    seen = []
    results = transcriber(
        signals, timestamps=timestamps, progress=lambda *each: seen.append(each), batch_size=2, **options
    )
    for signal, result in zip(signals, results, strict=True):
        assert isinstance(result, Transcription)
        assert result.language in ("en", "zh")
        check_times(result, len(signal) / 16000)
        assert all(bool(segment.words) == (timestamps == "words") for segment in result.segments)
    total = sum(map(len, signals)) / 16000
    assert all(each[1] == total for each in seen)
    assert [each[0] for each in seen] == sorted(each[0] for each in seen)
    assert seen[-1][0] == total
    assert results[0].segments


def test_a_window_begins_where_the_last_complete_segment_ends(transcriber, monkeypatch):
    outputs = [
        [FIRST + 1, 1, FIRST + 4, FIRST + 4, 2, FIRST + 20, FIRST + 20, 3],
        [FIRST, 3, 4, FIRST + 24],
        [FIRST, 5],
        [FIRST + 2, 6, FIRST + 90],
    ]
    frames = scripted(monkeypatch, outputs)
    result = transcriber(NOISE, language="en", timestamps="segments")
    assert [(each.text, each.start, each.end) for each in result.segments] == [
        ("word1", 0.02, 0.08),
        ("word2", 0.08, 0.4),
        ("word3 word4", 0.4, 0.88),
        ("word5", 0.9, 1.4),
        ("word6", 1.44, 1.506),
    ]
    starts = [0, 20, 45, 70]
    for start, frame in zip(starts, frames, strict=True):
        window = np.zeros(WINDOW, np.float32)
        samples = NOISE[320 * start :][:WINDOW]
        window[: len(samples)] = samples
        np.testing.assert_array_equal(frame, log_mel_spectrogram(window, 6))


def test_segments_after_the_end_of_the_audio_are_left_out(transcriber, monkeypatch):
    outputs = [[FIRST, 1, FIRST + 2, FIRST + 2, 2, FIRST + 9, FIRST + 12, 3, FIRST + 14, FIRST + 14]]
    scripted(monkeypatch, outputs)
    result = transcriber(NOISE[:1600], language="en", timestamps="segments")
    assert [each[:3] for each in result.segments] == [("word1", 0.0, 0.04), ("word2", 0.04, 0.1)]


def test_windows_without_speech_have_no_text(transcriber, monkeypatch):
    probable = np.zeros(FIRST + POSITIONS + 1)
    probable[SPECIAL["<|nospeech|>"]] = 10.0
    output = [FIRST, 1, FIRST + 20]
    for log_probability, logits, expected in (
        (-9.0, probable, ""),
        (-3.0, probable, "word1"),
        (-9.0, 0 * probable, "word1"),
    ):
        scripted(monkeypatch, 2 * [output], log_probability)
        monkeypatch.setattr(xf.Transcriber, "_start_logits", lambda self, features, logits=logits: logits)
        assert transcriber(NOISE[:WINDOW], language="en", timestamps="segments").text == expected
        assert transcriber(NOISE[:WINDOW], language="en") == expected


@pytest.mark.parametrize(("outputs", "thresholds", "expected", "attempts"), [
    ([([1, 2], -0.9)], {}, "word1 word2", 1),
    ([([1, 2], -1.1), ([3, 4], -0.9)], {}, "word3 word4", 2),
    ([([1, 2], -1.1), ([3, 4], -1.2), ([5, 6], -1.3)], {}, "word5 word6", 3),
    ([([1, 2] * 30, -0.1), ([3, 4], -0.1)], {}, "word3 word4", 2),
    ([([1, 2], -1.1)], {"logprob_threshold": None}, "word1 word2", 1),
    ([([1, 2], -1.1)], {"logprob_threshold": -2}, "word1 word2", 1),
    ([([1, 2] * 4, -0.1)], {"compression_ratio_threshold": None}, " ".join(["word1 word2"] * 4), 1),
    ([([1, 2], -0.1), ([3, 4], -0.1)], {"compression_ratio_threshold": 0.1, "temperature": [0, 1]}, "word3 word4", 2),
    ([([1, 2], -1.1)], {"temperature": 0.7}, "word1 word2", 1),
])  # fmt: skip
def test_outputs_that_fail_a_threshold_are_sampled_again(
    transcriber, monkeypatch, outputs, thresholds, expected, attempts
):
    calls = []

    def generate(model, features, config, *, prefix, **options):
        calls.append((config.method, config.temperature, config.num_beams, len(features)))
        tokens, mean = outputs[len(calls) - 1]
        good = Hypothesis([*prefix[0], 8, 9], -0.1, 0.0, True)
        first = Hypothesis([*prefix[0], *tokens], mean * (len(tokens) + 1), 0.0, True)
        return [[first]] if len(features) == 1 else [[good], [first]]

    monkeypatch.setattr(transcription, "generate", generate)
    monkeypatch.setattr(xf.Transcriber, "_start_logits", lambda *args: np.zeros(FIRST + POSITIONS + 1))
    options = {"temperature": (0.0, 0.2, 0.4), **thresholds}
    audio = [NOISE[:100], NOISE[:200]]
    assert transcriber(audio, language="en", num_beams=3, **options)[1] == expected
    temperatures = np.atleast_1d(options["temperature"]).tolist()
    expected_calls = [("sampling", each, 1) if each else ("beam", 0, 3) for each in temperatures][:attempts]
    assert [call[:3] for call in calls] == expected_calls
    sizes = [2, 2] if options["temperature"] == [0, 1] else [2, 1, 1]
    assert [call[3] for call in calls] == sizes[:attempts]


def test_compression_ratios_are_those_of_transformers():
    ratio = transcription._compression_ratio
    words = [50364, 440, 3847, 281, 7042, 5510, 412, 1922, 3414, 3407, 13, 50257]
    assert ratio(words, 51865) == 24 / 32
    assert ratio([50364, *[440, 3847] * 30, 50257], 51865) == 124 / 18
    assert ratio([*[4] * 40, 50], 61) == 41 / 13
    assert ratio([], 61) == 0.0


def test_wrong_thresholds_are_errors(transcriber):
    for options, message in (
        ({"temperature": ()}, r"temperature is \(\); expected at least one number"),
        ({"temperature": (0.0, "hot")}, "temperature is 'hot'; expected a number"),
        ({"no_speech_threshold": float("nan")}, "no_speech_threshold is nan; expected a number"),
        ({"compression_ratio_threshold": [2.4]}, r"compression_ratio_threshold is \[2.4\]; expected a number"),
    ):
        with raises_line(ConfigError, message):
            transcriber(NOISE, **options)


def test_words_have_the_times_and_probabilities_of_a_teacher_forced_pass(transcriber, monkeypatch):
    text = [1, 38, 36, 2]
    scripted(monkeypatch, [[FIRST, *text[:3], FIRST + 12, FIRST + 12, *text[3:], FIRST + 25]])
    result = transcriber(NOISE[:WINDOW], language="en", timestamps="words")
    model, prompt = transcriber.model, [START, SPECIAL["<|en|>"], SPECIAL["<|transcribe|>"], FIRST - 1]
    features = log_mel_spectrogram(NOISE[:WINDOW], 6)[None]
    weights = model.cross_attention_weights(features, [[*prompt, *text, EOS]])[1][0]
    starts = align(weights, 3, -1) * 0.02
    logits = np.asarray(model(features, [prompt + text])[0, 3:-1, :EOS], np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    words = [word for segment in result.segments for word in segment.words]
    assert [word.text for word in words] == [" word1ing.", " word2"]
    np.testing.assert_allclose(words[0].probability, (probabilities[0, 1] + probabilities[1, 38]) / 2, rtol=1e-4)
    np.testing.assert_allclose(words[1].probability, probabilities[3, 2], rtol=1e-4)
    assert words[0].end <= words[1].start
    assert 0.0 <= words[0].start <= words[0].end <= min(0.24, starts[3] + 1e-9)
    assert words[1].start == pytest.approx(max(0.24, starts[3]))
    check_times(result, 0.5)


def test_chinese_is_joined_without_spaces(transcriber, monkeypatch):
    output = [FIRST, 1, FIRST + 4, FIRST + 4, 2, FIRST + 20]
    for task, expected in (("transcribe", "word1word2"), ("translate", "word1 word2")):
        scripted(monkeypatch, [output])
        assert transcriber(NOISE[:WINDOW], language="zh", task=task, timestamps="segments").text == expected


def test_silence_and_short_audio_are_transcribed(transcriber):
    for signal in (1e-9 * NOISE[:330], np.ones(300), NOISE[:1]):
        check_times(transcriber(signal, timestamps="words", language="en"), len(signal) / 16000)
    assert transcriber(np.zeros(3 * WINDOW), timestamps="words", language="en") == Transcription("", "en", ())
    assert transcriber(np.zeros(1)) == ""


def test_bad_input_is_refused_before_work_starts(transcriber):
    for audio, options, error, match in (
        (NOISE[:10], {"timestamps": "word"}, ConfigError, "timestamps is 'word'; expected one of 'segments', 'words'"),
        (NOISE[:10], {"return_timestamps": True}, ConfigError, "unknown argument 'return_timestamps'; use timestamps="),
        (np.zeros(0), {"timestamps": "words"}, DataError, "the audio has no samples"),
        (np.asarray([0.0, np.nan]), {"timestamps": "words"}, DataError, "samples that are not finite"),
    ):
        with raises_line(error, match):
            transcriber(audio, **options)


def test_settings_of_the_checkpoint_are_used(transcriber):
    assert transcriber.alignment_heads == [(1, 0), (1, 1)]
    assert transcriber.max_initial_timestamp == pytest.approx(0.1)
    other = xf.Transcriber(transcriber.model, transcriber.tokenizer)
    assert other.alignment_heads == [(1, 0), (1, 1)]  # the second half of the layers
    assert other.max_initial_timestamp == 1.0


# --- Subtitles --------------------------------------------------------------------------------------------------------

ODD = Transcription(
    "",
    "en",
    (
        Segment("A <b> & c --> d\n\ne\x00\u2028f", 0.0, 1.9996),
        Segment(" \n", 2.0, 2.5),
        Segment("x y", 3599.5, 36000.25, (Word(" x", 3599.5, 3600.0, 1.0), Word(" <y>", 3601.0, 3602.0, 0.5))),
    ),
)


def test_subtitles_escape_what_their_formats_do_not_allow():
    assert ODD.to_srt() == (
        "1\n00:00:00,000 --> 00:00:02,000\nA <b> & c -> d e f\n\n2\n00:59:59,500 --> 10:00:00,250\nx y\n\n"
    )
    assert ODD.to_vtt() == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:02.000\nA &lt;b&gt; &amp; c --&gt; d e f\n\n"
        "00:59:59.500 --> 10:00:00.250\nx<01:00:01.000> &lt;y&gt;\n\n"
    )
    assert json.loads(json.dumps(ODD.to_dict()))["segments"][2]["words"][1] == {
        "text": " <y>", "start": 3601.0, "end": 3602.0, "probability": 0.5,
    }  # fmt: skip
    assert Transcription("", "en", ()).to_srt() == ""
    assert Transcription("", "en", ()).to_vtt() == "WEBVTT\n\n"


def test_the_command_writes_subtitles_and_json(whisper, transcriber, tmp_path, capsys):
    paths = [write_wav(tmp_path / f"{number}.wav", NOISE[number * 1000 :]) for number in range(2)]
    command = ["transcribe", "--model", str(whisper), "--language", "en"]
    expected = [transcriber(path, language="en", timestamps="words") for path in paths]
    assert exit_code([*command, *map(str, paths), "--format", "json", "--timestamps", "words"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"file": str(path), **result.to_dict()} for path, result in zip(paths, expected, strict=True)]
    output = tmp_path / "a.srt"
    assert exit_code([*command, str(paths[0]), "--format", "srt", "--output", str(output)]) == 0
    assert output.read_text() == transcriber(paths[0], language="en", timestamps="segments").to_srt()
    assert exit_code([*command, str(paths[0]), "--format", "vtt", "--timestamps", "words"]) == 0
    assert capsys.readouterr().out == expected[0].to_vtt()
    for arguments, message in (
        ([str(paths[0]), "--timestamps", "words"], "--timestamps is given and --format is txt"),
        ([*map(str, paths), "--format", "srt"], "--format srt has subtitles of one file; got 2 files"),
        ([str(paths[0]), "--format", "ass"], "'ass' is not one of"),
        ([str(paths[0]), "--format", "vtt", "--timestamps", "letters"], "letters"),
    ):
        assert exit_code([*command, *arguments]) == 2
        assert message in capsys.readouterr().err
