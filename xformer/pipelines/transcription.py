"""Transcription and translation of speech, with a model such as Whisper."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xformer.backends import to_host
from xformer.config import check_count
from xformer.data.audio import HOP_LENGTH, SAMPLE_RATE, log_mel_spectrogram, read_wav, resample, split_at_pauses
from xformer.errors import CheckpointError, ConfigError, DataError, nearest_hint
from xformer.generation import GenerationConfig, generate
from xformer.generation.pretrained import GENERATION_FILE, read_generation
from xformer.io import read_json
from xformer.models import SpeechTransformer
from xformer.pipelines.base import Pipeline, check_vocabulary
from xformer.pipelines.batching import run_batches
from xformer.random import Rng
from xformer.tokenizers import PretrainedTokenizer

TASKS = ("transcribe", "translate")
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_ENGLISH_VOCABULARY = 51864  # of Whisper's models for English; all others have more tokens

AudioSource = str | os.PathLike[str] | Any


class Transcriber(Pipeline):
    """Turn speech into text: `Transcriber.from_pretrained("whisper-tiny")("speech.wav")` (Radford et al., 2023).

    The model reads 30 seconds at a time. Longer audio is cut at pauses into windows of 25 to 30 seconds, which are
    transcribed on their own, without timestamps.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        defaults: Default settings of generation, which a call may replace. Default: greedy search.
        multilingual: The model knows several languages, and outputs begin with tokens of language and task.
            Default: by the size of the vocabulary, as Whisper does.

    Raises:
        CheckpointError: If the tokenizer does not fit the model.
    """

    task = "transcription"
    model_classes = (SpeechTransformer,)

    def __init__(
        self,
        model: SpeechTransformer,
        tokenizer: PretrainedTokenizer,
        *,
        defaults: GenerationConfig | None = None,
        multilingual: bool | None = None,
    ) -> None:
        check_vocabulary("tokenizer", tokenizer, model.vocab_size)
        self.model, self.tokenizer = model, tokenizer
        self.defaults = GenerationConfig() if defaults is None else defaults
        self.multilingual = model.vocab_size > _ENGLISH_VOCABULARY if multilingual is None else multilingual

    @classmethod
    def _settings(cls, directory: Path, config: Any) -> dict[str, Any]:
        path = directory / GENERATION_FILE
        return {
            "defaults": read_generation(directory, encoder_decoder=True).config(config),
            "multilingual": read_json(path, "generation settings").get("is_multilingual") if path.exists() else None,
        }

    @property
    def languages(self) -> list[str]:
        """Codes of the languages that the model knows."""
        return sorted(self._language_ids) if self.multilingual else ["en"]

    @property
    def window_length(self) -> int:
        """Number of samples that the model reads at a time, 16,000 per second: 30 seconds for Whisper."""
        return 2 * self.model.config.max_source_positions * HOP_LENGTH

    def __call__(
        self,
        audio: AudioSource | Sequence[AudioSource],
        config: GenerationConfig | None = None,
        *,
        sample_rate: int = SAMPLE_RATE,
        language: str | None = None,
        task: str = "transcribe",
        batch_size: int = 8,
        seed: int = 0,
        **overrides: Any,
    ) -> Any:
        """Return the text of an audio: `transcriber("speech.wav", language="de")`.

        Args:
            audio: Path of a WAV file, or floats (samples,) of one channel; or a list of these.
            config: Settings of generation. Default: those of the checkpoint.
            sample_rate: Samples per second of arrays; files have their own.
            language: Code of the spoken language, e.g. "de". Default: the one that the model detects in the first 30
                seconds of each audio.
            task: "transcribe", or "translate" into English.
            batch_size: Windows of 30 seconds that are transcribed at a time. On NumPy each core runs one batch.
            seed: Seed of sampling.
            **overrides: Fields of `GenerationConfig` that replace those of the config.

        Returns:
            The text; for a list a list of texts.

        Raises:
            DataError: For a file that is not a WAV file, and for invalid samples.
            ConfigError: For an unknown language or task, and for invalid settings.
        """
        check_count("batch_size", batch_size)
        config = GenerationConfig.resolve(self.defaults if config is None else config, overrides)
        sources = list(audio) if isinstance(audio, list | tuple) else [audio]
        self._check_task(language, task)
        signals = [_read(each, sample_rate) for each in sources]
        windows = [
            (index, window)
            for index, signal in enumerate(signals)
            for window in split_at_pauses(signal, self.window_length)
        ]
        prefixes = [self._prefix(language or self._detected(signal), task) for signal in signals]

        def run(rows: list[int]) -> list[str]:
            outputs = generate(
                self.model,
                np.stack([self._features(windows[row][1]) for row in rows]),
                config,
                prefix=[prefixes[windows[row][0]] for row in rows],
                rng=Rng(seed),
                indices=rows,
            )
            return [self._text(output.tokens) for output, *_ in outputs]

        rows = list(range(len(windows)))
        batches = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
        texts: list[list[str]] = [[] for _ in signals]
        for batch, results in zip(batches, run_batches(run, batches, self.model), strict=True):
            for row, text in zip(batch, results, strict=True):
                texts[windows[row][0]].append(text)
        joined = [" ".join(filter(None, parts)) for parts in texts]
        return joined if isinstance(audio, list | tuple) else joined[0]

    def detect_language(self, audio: AudioSource, *, sample_rate: int = SAMPLE_RATE) -> str:
        """Return the code of the language that is spoken in the first 30 seconds; arguments are those of a call."""
        return self._detected(_read(audio, sample_rate)) or "en"

    def _detected(self, signal: Any) -> str | None:
        """Return the language that most probably follows the start token; None for an English-only model."""
        if not self.multilingual:
            return None
        cache = self.model.prefill(self._features(signal[: self.window_length])[None])
        logits = to_host(self.model.decode_step(self.model.target_ids([[self.model.config.bos_id]]), cache))[0]
        return max(self._language_ids, key=lambda code: logits[self._language_ids[code]])

    def _features(self, signal: Any) -> Any:
        padded = np.zeros(self.window_length, np.float32)
        padded[: len(signal)] = signal
        return log_mel_spectrogram(padded, self.model.config.source_vocab_size)

    def _check_task(self, language: str | None, task: str) -> None:
        if task not in TASKS:
            raise ConfigError(f"task is {task!r}; expected 'transcribe' or 'translate'")
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
        last = self._token("<|notimestamps|>")  # timestamps follow it; they are not special in all files
        return self.tokenizer.decode([token for token in tokens if token < last]).strip()

    @property
    def _language_ids(self) -> dict[str, int]:
        matches = filter(None, map(_LANGUAGE.fullmatch, self.tokenizer.added_tokens))
        return {match[1]: self._token(match[0]) for match in matches}


def _read(audio: AudioSource, sample_rate: int) -> Any:
    """Return samples (samples,) at the rate of the model."""
    if isinstance(audio, str | os.PathLike):
        audio, sample_rate = read_wav(audio)
    samples = resample(np.asarray(audio), sample_rate)
    if not len(samples):
        raise DataError("the audio has no samples")
    return samples
