"""Transcription and translation of speech, with a model such as Whisper."""

from __future__ import annotations

import functools
import itertools
import math
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from xformer.backends import to_host
from xformer.config import check_number, take_options, with_options
from xformer.data.audio import HOP_LENGTH, SAMPLE_RATE, log_mel_spectrogram, read_samples, split_at_pauses
from xformer.errors import CheckpointError, ConfigError, nearest_hint
from xformer.generation import GenerationConfig, Hypothesis, generate
from xformer.generation.pretrained import GENERATION_FILE, read_generation
from xformer.generation.processors import token_alternatives
from xformer.io import StrPath, read_json
from xformer.models import SpeechTransformer, SpeechTransformerConfig
from xformer.pipelines.base import Pipeline, check_vocabulary
from xformer.pipelines.options import SpeechOptions
from xformer.pipelines.timestamps import WITHOUT_SPACES, TimestampRules, TokenSegment, split_segments, timed_words
from xformer.pipelines.transcript import Segment, Transcription, Word
from xformer.random import Rng
from xformer.tokenizers import PretrainedTokenizer, load_tokenizer
from xformer.tracing.activations import record

_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_ENGLISH_VOCABULARY = 51864  # of Whisper's models for English; all others have more tokens

_POSITION_LENGTH = 2 * HOP_LENGTH  # samples for each position of the encoder, and between timestamps: 20 ms
_NO_SPEECH = "<|nospeech|>", "<|nocaptions|>"

AudioSource = StrPath | Any


class Transcriber(Pipeline):
    """Turn speech into text: `Transcriber.from_pretrained("whisper-tiny")("speech.wav")` (Radford et al., 2023).

    The model reads 30 seconds at a time. Longer audio is cut at pauses into windows of 25 to 30 seconds, which are
    transcribed on their own. With timestamps, each window begins where the last complete segment of the one before it
    ends. Windows without speech have no text (sections 3.8 and 4.5).

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        defaults: Default settings of generation, which a call may replace. Default: greedy search.
        multilingual: The model knows several languages, and outputs begin with tokens of language and task.
            Default: by the size of the vocabulary, as Whisper does.
        alignment_heads: Layer and head of the cross-attention that follows the spoken words, for times of words.
            Default: all heads of the second half of the layers.
        max_initial_timestamp: Latest first timestamp of a window, in seconds.

    Attributes:
        languages: Codes of the languages that the model knows.
        window_length: Number of samples that the model reads at a time, 16,000 per second: 30 seconds for Whisper.

    Raises:
        CheckpointError: If the tokenizer does not fit the model.
        ConfigError: For alignment heads that the model does not have, and a negative or infinite max_initial_timestamp.
    """

    task = "transcription"
    model_classes = (SpeechTransformer,)
    attention_kinds = ()

    def __init__(
        self,
        model: SpeechTransformer,
        tokenizer: PretrainedTokenizer,
        *,
        defaults: GenerationConfig | None = None,
        multilingual: bool | None = None,
        alignment_heads: Sequence[Sequence[int]] | None = None,
        max_initial_timestamp: float = 1.0,
    ) -> None:
        check_vocabulary("tokenizer", tokenizer, model.vocab_size)
        self.model, self.tokenizer = model, tokenizer
        self.alignment_heads = _check_heads(alignment_heads, model.config)
        check_number("max_initial_timestamp", max_initial_timestamp, at_least=0)
        self.max_initial_timestamp = float(max_initial_timestamp)
        self.defaults = GenerationConfig() if defaults is None else defaults
        self.multilingual = model.vocab_size > _ENGLISH_VOCABULARY if multilingual is None else multilingual
        self.window_length = 2 * model.config.max_source_positions * HOP_LENGTH
        self._first_timestamp = self._token("<|notimestamps|>") + 1
        matches = filter(None, map(_LANGUAGE.fullmatch, tokenizer.added_tokens))
        self._language_ids = {match[1]: self._token(match[0]) for match in matches}
        self.languages = sorted(self._language_ids) if self.multilingual else ["en"]

    @classmethod
    def _from_checkpoint(cls, model: Any, directory: Path) -> Self:
        path = directory / GENERATION_FILE
        values = read_json(path, "generation settings") if path.exists() else {}
        index = values.get("max_initial_timestamp_index")
        return cls(
            model,
            load_tokenizer(directory),
            defaults=read_generation(directory, encoder_decoder=True).config(model.config),
            multilingual=values.get("is_multilingual"),
            alignment_heads=values.get("alignment_heads"),
            max_initial_timestamp=index * _POSITION_LENGTH / SAMPLE_RATE if type(index) is int else 1.0,
        )

    @with_options(SpeechOptions)
    def __call__(
        self,
        audio: AudioSource | Sequence[AudioSource],
        config: GenerationConfig | None = None,
        *,
        sample_rate: int = SAMPLE_RATE,
        seed: int = 0,
        progress: Callable[[float, float], None] | None = None,
        on_segment: Callable[[Segment, str], None] | None = None,
        **options: Any,
    ) -> Any:
        """Return the text of a recording: `transcriber("speech.wav", language="de")`.

        Args:
            audio: Path of a WAV file, or floats (samples,) of one channel; or a list of these.
            config: Settings of generation. Default: those of the checkpoint.
            sample_rate: Samples per second of arrays; files have their own.
            seed: Seed of sampling.
            progress: Function that receives the seconds that are done and all seconds of the audio, as it proceeds.
            on_segment: Function that receives each segment as soon as it is known, and what it adds to the text.
            **options: Fields of `SpeechOptions`, and fields of `GenerationConfig` that replace those of the config.

        Returns:
            The text, or with `timestamps` a `Transcription`; for a list a list of them.

        Raises:
            DataError: For a file that is not a WAV file, and for invalid samples.
            ConfigError: For an unknown language, task or kind of timestamps, and for invalid settings.
        """
        speech = SpeechOptions(**take_options(SpeechOptions, options))
        config = GenerationConfig.resolve(self.defaults if config is None else config, options)
        temperatures = speech.temperature if isinstance(speech.temperature, tuple) else (speech.temperature,)
        if not temperatures:
            raise ConfigError(f"temperature is {temperatures!r}; expected at least one number")
        changes = [{} if each is None else {"temperature": each} for each in temperatures]
        configs = [GenerationConfig.resolve(config, each) for each in changes]
        sources = list(audio) if isinstance(audio, list | tuple) else [audio]
        language, task, timestamps = speech.language, speech.task, speech.timestamps
        self._check_task(language, task)
        signals = [read_samples(each, sample_rate) for each in sources]
        languages = [language or self._detected(signal) for signal in signals]
        has_spaces = [code not in WITHOUT_SPACES or task == "translate" for code in languages]
        run = functools.partial(self._decode, configs=configs, speech=speech, rng=Rng(seed))
        length = self.window_length
        windows: list[_Window] = []
        for index, signal in enumerate(signals):
            parts = split_at_pauses(signal, length) if timestamps is None else [signal[:length]]
            prefix = self._prefix(languages[index], task)
            for start, samples in zip(itertools.accumulate(map(len, parts), initial=0), parts, strict=False):
                windows.append(_Window(index, len(windows), start, samples, prefix, has_spaces[index]))
        segments: list[list[Segment]] = [[] for _ in signals]
        texts = [""] * len(signals)
        done, total = 0, sum(map(len, signals))
        while windows:
            following = []
            size = speech.batch_size
            batches = [windows[start : start + size] for start in range(0, len(windows), size)]
            results = itertools.chain.from_iterable(self._run_batches(run, batches))
            for window, (found, end) in zip(windows, results, strict=True):
                for segment in found:
                    added = (" " if segments[window.audio] and has_spaces[window.audio] else "") + segment.text
                    segments[window.audio].append(segment)
                    texts[window.audio] += added
                    if on_segment is not None:
                        on_segment(segment, added)
                done += end - window.start
                if progress is not None:
                    progress(done / SAMPLE_RATE, total / SAMPLE_RATE)
                samples = signals[window.audio][end : end + length]
                if timestamps is not None and len(samples) >= _POSITION_LENGTH:
                    following.append(window._replace(number=window.number + len(signals), start=end, samples=samples))
            windows = following
        if progress is not None and done < total:  # a rest that is shorter than a position is not read
            progress(total / SAMPLE_RATE, total / SAMPLE_RATE)
        outputs: list[Any] = texts
        if timestamps is not None:
            outputs = list(map(Transcription, texts, languages, map(tuple, segments)))
        return outputs if isinstance(audio, list | tuple) else outputs[0]

    def detect_language(self, audio: AudioSource, *, sample_rate: int = SAMPLE_RATE) -> str:
        """Return the code of the language that is spoken in the first 30 seconds; arguments are those of a call."""
        return self._detected(read_samples(audio, sample_rate))

    def _detected(self, signal: Any) -> str:
        """Return the language that most probably follows the start token."""
        if not self.multilingual:
            return "en"
        logits = self._start_logits(self._features(signal[: self.window_length]))
        return max(self._language_ids, key=lambda code: logits[self._language_ids[code]])

    def _start_logits(self, features: Any) -> Any:
        """Return the logits (vocabulary,) of the token after the start token, on the host."""
        cache = self.model.prefill(features[None])
        return to_host(self.model.decode_step(self.model.target_ids([[self.model.config.bos_id]]), cache))[0]

    def _features(self, samples: Any) -> Any:
        padded = np.zeros(self.window_length, np.float32)
        padded[: len(samples)] = samples
        return log_mel_spectrogram(padded, self.model.config.source_vocab_size)

    # --- Windows ------------------------------------------------------------------------------------------------------

    def _decode(
        self, batch: list[_Window], configs: list[GenerationConfig], speech: SpeechOptions, rng: Rng
    ) -> list[tuple[list[Segment], int]]:
        """Return the segments of each window, and the sample at which the next window begins."""
        latest = self.max_initial_timestamp * SAMPLE_RATE / _POSITION_LENGTH
        latest = min(latest, self.model.config.max_source_positions)
        rules = TimestampRules(self._first_timestamp, self.model.config.eos_id, round(latest))
        features = [self._features(window.samples) for window in batch]
        prefixes = [window.prefix if speech.timestamps is None else window.prefix[:-1] for window in batch]
        outputs: list[Any] = [None] * len(batch)
        waiting = list(range(len(batch)))
        for attempt, config in enumerate(configs):
            found = generate(
                self.model,
                np.stack([features[i] for i in waiting]),
                config,
                prefix=[prefixes[i] for i in waiting],
                logits_processors=[] if speech.timestamps is None else [rules],
                rng=rng.fold_in("temperature", attempt) if attempt else rng,
                indices=[batch[i].number for i in waiting],
            )
            for i, (output, *_) in zip(waiting, found, strict=True):
                outputs[i] = output._replace(tokens=output.tokens[len(prefixes[i]) :])
            if attempt + 1 < len(configs):
                waiting = [i for i in waiting if self._fails(features[i], outputs[i], speech)]
            if not waiting:
                break
        return [self._segments(*each, speech) for each in zip(batch, features, outputs, strict=True)]

    def _segments(
        self, window: _Window, features: Any, output: Hypothesis, speech: SpeechOptions
    ) -> tuple[list[Segment], int]:
        """Return the segments of a window, and the sample at which the next window begins."""
        end, tokens = window.start + len(window.samples), output.tokens
        if self._is_without_speech(features, output, speech):
            return [], end
        if speech.timestamps is None:
            text = self._text(tokens)
            return [Segment(text, window.start / SAMPLE_RATE, end / SAMPLE_RATE)] if text else [], end
        num_positions = max(1, len(window.samples) // _POSITION_LENGTH)
        parts, next_position = split_segments(tokens, self._first_timestamp, self.model.config.eos_id, num_positions)
        words: list[list[Word]] = [[] for _ in parts]
        if speech.timestamps == "words":
            words = self._words(window, features, parts, num_positions)

        def seconds(position: float) -> float:
            return round(min(window.start + position * _POSITION_LENGTH, end) / SAMPLE_RATE, 3)

        segments = []
        for part, found in zip(parts, words, strict=True):
            times = [[seconds(min(max(x, part.start), part.end)) for x in (word.start, word.end)] for word in found]
            first, last = (times[0][0], times[-1][1]) if times else (0.0, 0.0)
            if first >= last:
                first, last = seconds(part.start), seconds(part.end)
            text = self._text(part.tokens)
            if text and first < last:
                placed = (word._replace(start=each[0], end=each[1]) for word, each in zip(found, times, strict=True))
                segments.append(Segment(text, first, last, tuple(placed)))
        return segments, min(window.start + next_position * _POSITION_LENGTH, end)

    def _words(
        self, window: _Window, features: Any, parts: Sequence[TokenSegment], num_positions: int
    ) -> list[list[Word]]:
        """Return the words of each segment, with positions of the encoder as times, from one teacher-forced pass."""
        tokens = [token for part in parts for token in part.tokens]
        if not tokens:
            return [[] for _ in parts]
        start, config = len(window.prefix), self.model.config
        memory = self.model.encode(features[None])
        names = [f"decoder.{layer}.cross_attention.weights" for layer, _ in self.alignment_heads]
        with record(self.model, names) as recorded:
            logits = self.model.decode([[config.bos_id, *window.prefix, *tokens, config.eos_id]], memory)
        cross = zip(names, self.alignment_heads, strict=True)
        weights = [to_host(recorded[name][0, head, :, :num_positions]) for name, (_, head) in cross]
        chosen = token_alternatives(logits[0, start:-2, : config.eos_id], tokens, 1)
        probabilities = [math.exp(each.log_probability) for each in chosen]
        decode, has_spaces = self.tokenizer.decode, window.has_spaces
        return timed_words(parts, np.stack(weights), start, probabilities, decode, has_spaces=has_spaces)

    def _is_without_speech(self, features: Any, output: Hypothesis, speech: SpeechOptions) -> bool:
        """Return whether nobody speaks in a window with an output, whose tokens have no prefix."""
        if features.min() == features.max():  # digital silence
            return True
        token = next(filter(None, map(self.tokenizer.token_to_id, _NO_SPEECH)), None)
        threshold, least = speech.no_speech_threshold, speech.logprob_threshold
        if token is None or threshold is None or (least is not None and _mean_log_probability(output) >= least):
            return False
        logits = np.asarray(self._start_logits(features), np.float64)
        weights = np.exp(logits - logits.max())
        return bool(weights[token] > threshold * weights.sum())

    def _fails(self, features: Any, output: Hypothesis, speech: SpeechOptions) -> bool:
        """Return whether a window with speech needs another output than this one, whose tokens have no prefix."""
        tokens = [*output.tokens, *([self.model.config.eos_id] if output.finished else [])]
        largest, least = speech.compression_ratio_threshold, speech.logprob_threshold
        repeats = largest is not None and _compression_ratio(tokens, self.model.vocab_size) > largest
        is_improbable = least is not None and _mean_log_probability(output) < least
        return (repeats or is_improbable) and not self._is_without_speech(features, output, speech)

    # --- Tokens -------------------------------------------------------------------------------------------------------

    def _check_task(self, language: str | None, task: str) -> None:
        if not self.multilingual and task != "transcribe":
            raise ConfigError("task is 'translate', but the model knows English only; expected 'transcribe'")
        if language is not None and language not in self.languages:
            raise ConfigError(f"language is {language!r}; {nearest_hint(language, self.languages)}")

    def _prefix(self, language: str | None, task: str) -> list[int]:
        """Return the tokens that follow the start token."""
        names = [f"<|{language}|>", f"<|{task}|>"] if self.multilingual else []
        return [self._token(name) for name in (*names, "<|notimestamps|>")]

    def _token(self, name: str) -> int:
        token = self.tokenizer.token_to_id(name)
        if token is None:
            raise CheckpointError(f"the tokenizer of {self.tokenizer.directory} has no token {name}")
        return token

    def _text(self, tokens: Sequence[int]) -> str:
        # Timestamps are not special in all files.
        return self.tokenizer.decode([token for token in tokens if token < self._first_timestamp]).strip()


class _Window(NamedTuple):
    """Samples that the model reads at a time.

    Attributes:
        audio: Index of the audio.
        number: Index of the random stream.
        start: First sample in the audio.
        samples: The samples.
        prefix: Tokens of the language, the task, and <|notimestamps|>.
        has_spaces: The language is written with spaces between words.
    """

    audio: int
    number: int
    start: int
    samples: Any
    prefix: list[int]
    has_spaces: bool


def _mean_log_probability(output: Hypothesis) -> float:
    """Return the mean log-probability of the tokens and eos; the tokens have no prefix."""
    return output.log_probability / (len(output.tokens) + 1)


def _compression_ratio(tokens: Sequence[int], vocab_size: int) -> float:
    """Return the length of the tokens as bytes, divided by that of their compression."""
    size = int(math.log2(vocab_size) / 8) + 1
    content = b"".join(token.to_bytes(size, "little") for token in tokens)
    return len(content) / len(zlib.compress(content))


def _check_heads(heads: Any, config: SpeechTransformerConfig) -> list[tuple[int, int]]:
    """Return the layers and heads whose cross-attention aligns words."""
    layers, count = config.num_decoder_layers, config.num_heads
    if heads is None:
        return [(layer, head) for layer in range(layers // 2, layers) for head in range(count)]
    known = [[layer, head] for layer in range(layers) for head in range(count)]
    pairs = [list(pair) for pair in heads] if isinstance(heads, list | tuple) else []
    if not pairs or not all(pair in known for pair in pairs):
        expected = f"pairs of a layer, 0 to {layers - 1}, and a head, 0 to {count - 1}"
        raise ConfigError(f"alignment_heads is {heads!r:.100}; expected {expected}")
    return [(int(layer), int(head)) for layer, head in pairs]
