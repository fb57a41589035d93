"""WAV files, resampling and spectrograms."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from tests.reference import normal, raises_line
from xformer.data.audio import log_mel_spectrogram, read_wav, resample, split_at_pauses
from xformer.errors import DataError

STEREO = np.clip(0.3 * normal(0, 50, 2), -0.99, 0.99)


def write_wav(path, data, *, code=1, channels=2, rate=8000, bits=16, extensible=False, size=None, extra=b""):
    fields = struct.pack("<HHIIHH", 0xFFFE if extensible else code, channels, rate, 0, 0, bits)
    if extensible:
        fields += struct.pack("<HHIH14s", 22, bits, 3, code, b"\0\0\0\0\x10\0\x80\0\0\xaa\0\x38\x9b\x71")
    chunks = b"WAVE" + extra + b"fmt " + struct.pack("<I", len(fields)) + fields
    chunks += b"data" + struct.pack("<I", len(data) if size is None else size) + data
    path.write_bytes(b"RIFF" + struct.pack("<I", len(chunks)) + chunks)
    return path


def encoded(bits):
    """Return STEREO as integers of a WAV file."""
    values = np.round(STEREO * (2 ** (bits - 1) - 1)).astype(np.int64)
    if bits == 8:
        return (values + 128).astype(np.uint8).tobytes()
    return values.astype("<i8").reshape(-1, 1).view(np.uint8)[:, : bits // 8].tobytes()


@pytest.mark.parametrize(("bits", "extensible"), [(8, False), (16, False), (24, True), (32, True)])
def test_integers_are_read_as_the_mean_of_the_channels(tmp_path, bits, extensible):
    audio = read_wav(write_wav(tmp_path / "a.wav", encoded(bits), bits=bits, extensible=extensible))
    assert audio.sample_rate == 8000
    assert audio.samples.dtype == np.float32
    np.testing.assert_allclose(audio.samples, STEREO.mean(axis=1), rtol=0, atol=2.0 ** (2 - min(bits, 20)))


@pytest.mark.parametrize("bits", [32, 64])
def test_floats_are_read(tmp_path, bits):
    path = write_wav(tmp_path / "a.wav", STEREO.astype(f"<f{bits // 8}").tobytes(), code=3, bits=bits)
    np.testing.assert_allclose(read_wav(path).samples, STEREO.mean(axis=1), atol=1e-6)


def test_other_chunks_and_an_unknown_size_are_accepted(tmp_path):
    extra = b"LIST" + struct.pack("<I", 3) + b"abc\0"  # odd sizes are padded
    path = write_wav(tmp_path / "a.wav", encoded(16) + b"\1", extra=extra, size=0xFFFFFFFF)
    assert len(read_wav(path).samples) == 50


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"code": 6, "bits": 8}, "has format 6, 8 bits, 2 channels and 8000 samples per second; expected integers"),
        ({"channels": 0}, "0 channels"),
        ({"rate": 4_000_000_000}, "4000000000 samples per second"),
        ({"data": b""}, "has no samples"),
        ({"code": 3, "bits": 32, "data": struct.pack("<2f", np.nan, 1)}, "has samples that are not finite"),
    ],
)
def test_files_that_cannot_be_read_are_errors(tmp_path, options, match):
    with raises_line(DataError, match):
        read_wav(write_wav(tmp_path / "a.wav", **{"data": encoded(16), **options}))


def test_other_formats_are_errors_that_name_a_converter(tmp_path):
    path = tmp_path / "a.mp3"
    path.write_bytes(b"ID3" + bytes(100))
    with raises_line(DataError, "is not a WAV file; convert it, e.g. ffmpeg"):
        read_wav(path)
    path.write_bytes(b"RIFF\0\0\0\0WAVEdata\4\0\0\0abcd")
    with raises_line(DataError, "is a WAV file without a format"):
        read_wav(path)


@pytest.mark.parametrize("rate", [8000, 11025, 44100])
def test_resampling_keeps_tones_and_removes_those_above_the_new_band(rate):
    def tones(sample_rate, *frequencies):
        time = np.arange(sample_rate) / sample_rate
        return sum(np.sin(2 * np.pi * f * time + f) for f in frequencies).astype(np.float32)

    middle = slice(1000, -1000)
    result = resample(tones(rate, 300, 1100, 3400), rate)
    assert result.shape == (16000,)
    np.testing.assert_allclose(result[middle], tones(16000, 300, 1100, 3400)[middle], rtol=0, atol=1e-4)
    if rate > 20000:
        np.testing.assert_allclose(resample(tones(rate, 8300, 10500), rate)[middle], 0, atol=2e-4)


def test_resampling_to_the_same_rate_changes_nothing():
    x = STEREO[:, 0].astype(np.float32)
    np.testing.assert_array_equal(resample(x, 16000), x)
    assert resample(np.zeros(0), 8000).shape == (0,)


def test_windows_end_in_the_pauses_of_long_audio():
    x = np.full(100_000, 0.5, np.float32)
    x[28_000:33_000] = x[57_000:60_000] = 0.01
    windows = split_at_pauses(x, 32_000)
    np.testing.assert_array_equal(np.concatenate(windows), x)
    assert all(len(window) <= 32_000 for window in windows)
    ends = np.cumsum([len(window) for window in windows])
    assert 29_000 < ends[0] < 31_000
    assert 58_000 < ends[1] < 59_000
    assert [len(window) for window in split_at_pauses(x[:32_001], 32_000)] == [ends[0], 32_001 - ends[0]]
    assert len(split_at_pauses(x[:32_000], 32_000)) == 1
    assert split_at_pauses(x[:0], 32_000) == []
    assert [len(window) for window in split_at_pauses(x[:5], 2)] == [2, 2, 1]


@pytest.mark.parametrize(
    ("num_mel_bins", "expected", "mean"),
    [  # values of WhisperFeatureExtractor of transformers 5.23
        (80, [1.16587, 1.23536, -0.55305, -0.55305, -0.19478, 0.28269, -0.55305], -0.545997),
        (128, [1.09011, 1.1162, -0.50398, -0.50398, -0.23005, 0.28177, -0.50398], -0.497741),
    ],
)
def test_spectrograms_equal_those_of_transformers(num_mel_bins, expected, mean):
    time = np.arange(24000) / 16000
    chirp = 0.5 * np.sin(2 * np.pi * (200 * time + 1500 * time**2)) * (time < 1.2)
    features = log_mel_spectrogram(np.pad(chirp, (0, 480000 - 24000)), num_mel_bins)
    assert features.shape == (3000, num_mel_bins)
    last = num_mel_bins - 1
    actual = features[[0, 0, 40, 90, 119, 120, 2999], [0, 7, 20, 60, 3, last, 5]]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)
    assert features.mean() == pytest.approx(mean, abs=1e-4)


def test_other_samples_are_errors():
    for samples in (np.zeros((2, 500)), np.zeros(500, int), np.zeros(200)):
        with raises_line(DataError, "samples"):
            log_mel_spectrogram(samples)
