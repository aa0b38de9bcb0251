"""Waveforms of the audio of synthetic scenes."""

import zlib

import numpy as np
import numpy.typing as npt

RATE = 16000  # samples per second
_PITCH = {"low": 220.0, "high": 1760.0}  # Hz
_BEEPS = {"slow": 1.0, "fast": 4.0}  # per second
_SWEEP = (300.0, 2400.0)  # Hz, once in two seconds

Waveform = npt.NDArray[np.float32]


def waveform(sound: str, duration: float) -> Waveform:
    """Return the samples of an audio pattern in -1 to 1, (duration x RATE,) float32, mono; zeros for silence."""
    t = np.arange(round(duration * RATE)) / RATE
    words = sound.split()
    if sound == "silence":
        samples = np.zeros_like(t)
    elif sound == "hiss":
        samples = 0.25 * np.random.default_rng(zlib.crc32(b"hiss")).uniform(-1, 1, len(t))
    elif words[1] == "sweep":
        within = (t % 2.0) / 2.0
        low, high = _SWEEP if words[0] == "rising" else _SWEEP[::-1]
        frequency = low * (high / low) ** within
        samples = 0.4 * np.sin(2 * np.pi * np.cumsum(frequency) / RATE)
    elif words[1] == "hum":
        samples = _tone(_PITCH[words[0]], t)
    else:
        sounding = (t * _BEEPS[words[0]]) % 1.0 < 0.5
        samples = _tone(_PITCH[words[1]], t) * sounding
    return samples.astype(np.float32)


def _tone(pitch: float, t: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    phase = 2 * np.pi * pitch * t
    return 0.35 * np.sin(phase) + 0.1 * np.sin(2 * phase)
