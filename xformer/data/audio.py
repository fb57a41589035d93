"""Audio: WAV files, resampling and log-mel spectrograms."""

from __future__ import annotations

import functools
import math
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xformer.config import check_count
from xformer.errors import DataError
from xformer.io import StrPath
from xformer.native import array_namespace

SAMPLE_RATE = 16_000  # of speech models
HOP_LENGTH = 160  # samples between frames: 10 ms
FFT_LENGTH = 400  # samples of a frame: 25 ms
MAX_FREQUENCY = 8000.0
_RATES = (1000, 1_000_000)
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_FORMATS = {(_PCM, 8): "u1", (_PCM, 16): "<i2", (_PCM, 24): "u1", (_PCM, 32): "<i4", (_FLOAT, 32): "<f4"}
_FORMATS |= {(_FLOAT, 64): "<f8"}
_ZERO_CROSSINGS, _ROLLOFF, _KAISER_BETA = 64, 0.955, 8.6  # passes 92 % of the band, attenuates aliases by 85 dB


class Audio(NamedTuple):
    """One channel of sound.

    Attributes:
        samples: NumPy array (samples,) of float32 in [-1, 1].
        sample_rate: Samples per second.
    """

    samples: Any
    sample_rate: int


def read_wav(path: StrPath | bytes) -> Audio:
    """Read a WAV file: integers of 8, 16, 24 or 32 bits, or floats of 32 or 64. Channels are averaged.

    Args:
        path: Path of the file, or its content.

    Raises:
        DataError: If the file is not such a WAV file, or has no samples.
        OSError: If it cannot be read.
    """
    content, path = (path, "the recording") if isinstance(path, bytes) else (Path(path).read_bytes(), path)
    if content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        raise DataError(f"{path} is not a WAV file; convert it, e.g. ffmpeg -i INPUT -ac 1 -ar {SAMPLE_RATE} OUT.wav")
    header, data, position = b"", None, 12
    while position + 8 <= len(content) and data is None:
        name, size = content[position : position + 4], int.from_bytes(content[position + 4 : position + 8], "little")
        if name == b"fmt ":
            header = content[position + 8 : position + 8 + size]
        elif name == b"data":  # programs that write to a pipe do not know its size: the rest of the file
            data = memoryview(content)[position + 8 : position + 8 + size]
        position += 8 + size + size % 2
    if len(header) < 16 or data is None:
        raise DataError(f"{path} is a WAV file without {'a format' if len(header) < 16 else 'data'}; use another copy")
    code, channels, rate, _, _, bits = struct.unpack("<HHIIHH", header[:16])
    if code == _EXTENSIBLE and len(header) >= 26:
        code = int.from_bytes(header[24:26], "little")
    if (code, bits) not in _FORMATS or not channels:
        received = f"{path} has format {code}, {bits} bits, {channels} channels and {rate} samples per second"
        raise DataError(f"{received}; expected integers (1) of 8, 16, 24 or 32 bits or floats (3) of 32 or 64")
    num_samples = len(data) // (channels * bits // 8)
    values = np.frombuffer(data[: num_samples * channels * bits // 8], _FORMATS[code, bits])
    samples = _as_floats(values, bits, is_integer=code == _PCM).reshape(num_samples, channels)
    return as_audio(path, samples.mean(axis=1), rate)


def as_audio(path: Any, samples: Any, rate: int) -> Audio:
    """Return the samples of a file; raise DataError if there are none, or for infinite ones or another rate."""
    if not _RATES[0] <= rate <= _RATES[1]:
        raise DataError(f"{path} has {rate} samples per second; expected {_RATES[0]} to {_RATES[1]}")
    if not len(samples) or not np.isfinite(samples).all():
        infinite = "samples that are not finite; expected floats from -1 to 1"
        raise DataError(f"{path} has {infinite if len(samples) else 'no samples'}")
    return Audio(samples, rate)


def read_samples(audio: StrPath | Any, sample_rate: int = SAMPLE_RATE) -> Any:
    """Return the samples of a WAV file, or of an array of a sample rate, as `resample` does for speech models."""
    if isinstance(audio, str | os.PathLike):
        audio, sample_rate = read_wav(audio)
    return as_audio("the audio", resample(np.asarray(audio), sample_rate), SAMPLE_RATE).samples


def _as_floats(values: Any, bits: int, *, is_integer: bool) -> Any:
    """Convert stored values to float32 in [-1, 1]."""
    if not is_integer:
        return values.astype(np.float32)
    if bits == 8:
        return (values.astype(np.float32) - 128.0) / 128.0
    if bits == 24:
        padded = np.zeros((len(values) // 3, 4), np.uint8)
        padded[:, 1:] = values.reshape(-1, 3)
        values, bits = padded.reshape(-1).view("<i4"), 32
    return values.astype(np.float32) / np.float32(2.0 ** (bits - 1))


def resample(samples: Any, sample_rate: int, new_rate: int = SAMPLE_RATE) -> Any:
    """Change the sample rate, with a windowed sinc filter for each phase (Smith, "Digital Audio Resampling").

    Returns a NumPy array of float32, whose sample i is the signal at the time i / new_rate. Raises DataError for
    anything but floats (samples,), and ConfigError for a rate that is not positive.
    """
    x = _check_samples(samples)
    check_count("sample_rate", sample_rate)
    check_count("new_rate", new_rate)
    divisor = math.gcd(sample_rate, new_rate)
    up, down = new_rate // divisor, sample_rate // divisor
    if up == down:
        return x
    cutoff = _ROLLOFF * min(1.0, up / down)
    half = math.ceil(_ZERO_CROSSINGS / cutoff)
    length = -(-len(x) * up // down)
    blocks = -(-length // up)
    padded = np.zeros(blocks * down + 2 * half + 1, np.float32)
    padded[half : half + len(x)] = x
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half)
    taps, output = np.arange(1 - half, half + 1), np.empty((blocks, up), np.float32)
    for phase in range(up):
        first, rest = divmod(phase * down, up)
        distance = taps - rest / up
        shape = np.i0(_KAISER_BETA * np.sqrt(np.clip(1.0 - (distance / half) ** 2, 0.0, None)))
        weights = np.sinc(cutoff * distance) * shape
        weights = (weights / weights.sum()).astype(np.float32)
        output[:, phase] = array_namespace(x).matmul(windows[first + 1 :: down][:blocks], weights)
    return output.reshape(-1)[:length]


def split_at_pauses(samples: Any, max_length: int) -> list[Any]:
    """Cut audio into windows, each at the quietest fifth of a second in the last sixth of the maximum length.

    Returns views of the samples, 16,000 per second; none for no samples. Raises DataError for anything but floats
    (samples,), and ConfigError if max_length is not a positive integer.
    """
    x, windows = _check_samples(samples), []
    check_count("max_length", max_length)
    while len(x) > max_length:
        tail = x[max_length - max_length // 6 : max_length].astype(np.float64)
        width = min(SAMPLE_RATE // 5, len(tail) // 2)
        cut = max_length
        if width:
            sums = np.cumsum(np.append(0.0, tail * tail))
            cut -= len(tail) - int(np.argmin(sums[width:] - sums[:-width])) - width // 2
        windows.append(x[:cut])
        x = x[cut:]
    return [*windows, x] if len(x) else windows


def log_mel_spectrogram(samples: Any, num_mel_bins: int = 80) -> Any:
    """Compute the logarithm of the power in mel bands, every 10 ms (Radford et al., 2023, section 2.2).

    Args:
        samples: Floats (samples,), 16,000 per second; at least 201.
        num_mel_bins: Number of bands.

    Returns:
        NumPy array (samples // 160, num_mel_bins) of float32.

    Raises:
        DataError: For other shapes or fewer samples.
    """
    x = _check_samples(samples)
    if len(x) <= FFT_LENGTH // 2:
        raise DataError(f"the audio has {len(x)} samples; expected at least {FFT_LENGTH // 2 + 1}")
    x = np.pad(x, FFT_LENGTH // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(x, FFT_LENGTH)[::HOP_LENGTH][:-1]
    window = 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(FFT_LENGTH) / FFT_LENGTH)
    power = np.abs(np.fft.rfft(frames * window, axis=1)) ** 2
    bands = np.log10(np.maximum(power @ mel_filters(num_mel_bins), 1e-10))
    return ((np.maximum(bands, bands.max() - 8.0) + 4.0) / 4.0).astype(np.float32)


@functools.cache
def mel_filters(num_mel_bins: int) -> Any:
    """Return triangular filters of equal area from 0 to 8000 Hz on the mel scale of Slaney (1998).

    The array has the shape (201 frequencies, num_mel_bins).
    """
    check_count("num_mel_bins", num_mel_bins)
    # The scale is linear up to 1000 Hz, 15 mel, and logarithmic above.
    step = math.log(6.4) / 27.0
    mel = np.linspace(0.0, 15.0 + math.log(MAX_FREQUENCY / 1000.0) / step, num_mel_bins + 2)
    edges = np.where(mel < 15.0, mel * 200.0 / 3.0, 1000.0 * np.exp(step * (mel - 15.0)))
    frequencies = np.linspace(0.0, SAMPLE_RATE / 2, FFT_LENGTH // 2 + 1)[:, None]
    rising = (frequencies - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - frequencies) / (edges[2:] - edges[1:-1])
    filters = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (edges[2:] - edges[:-2]))
    filters.flags.writeable = False
    return filters


def _check_samples(samples: Any) -> Any:
    x = np.asarray(samples)
    if x.ndim != 1 or x.dtype.kind != "f":
        raise DataError(f"samples have shape {x.shape} and dtype {x.dtype}; expected floats (samples,)")
    return x.astype(np.float32, copy=False)
