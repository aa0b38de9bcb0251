"""Fingerprints of features: encoder or method, weights, sampling, and preprocessing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from tvr_lightning.data.stored import frame_fingerprint, text_fingerprint
from tvr_lightning.encoders.audio import AudioEncoder
from tvr_lightning.encoders.base import Encoder
from tvr_lightning.encoders.fingerprint import fingerprint
from tvr_lightning.extract.plan import ExtractSource
from tvr_lightning.store import Fingerprint, Part


def encoder_fingerprint(encoder: Encoder | AudioEncoder) -> Fingerprint:
    """Return the name and configuration digest of an encoder, and the digest of its weights."""
    configuration = sorted(encoder.configuration().items())
    digest = hashlib.sha256(repr(configuration).encode()).hexdigest()[:12]
    name = dict(configuration).get("name", type(encoder).__name__)
    return {"encoder": f"{name} {digest}", "weights": encoder.fingerprint()[:16]}


def encoder_fingerprints(
    encoder: Encoder, audio_encoder: AudioEncoder | None, parts: Sequence[Part]
) -> dict[Part, Fingerprint]:
    """Return the encoder of each part, reading each encoder's weights once. Audio without an encoder is omitted."""
    seen = encoder_fingerprint(encoder) if set(parts) - {"audio"} else {}
    heard = encoder_fingerprint(audio_encoder) if audio_encoder is not None and "audio" in parts else None
    made = {part: heard if part == "audio" else seen for part in parts}
    return {part: values for part, values in made.items() if values is not None}


def fingerprints(
    source: ExtractSource, encoder: Encoder, audio_encoder: AudioEncoder | None, parts: Sequence[Part]
) -> dict[Part, Fingerprint]:
    """Return the encoder, weights, sampling, and preprocessing of each part."""
    read = source.read
    frames = frame_fingerprint(read.frames, read.preparation, read.sampling, source.copies)
    encoders = encoder_fingerprints(encoder, audio_encoder, parts)
    made: dict[Part, Fingerprint] = {}
    for part in parts:
        if part == "text":
            tokens = {"preprocessing": encoder.text_preparation}
            made[part] = {**encoders[part], **text_fingerprint(source.words), **tokens}
        elif part == "audio":
            assert read.audio is not None
            made[part] = {**encoders[part], **frames, "preprocessing": read.audio.describe()}
        else:
            made[part] = {**encoders[part], **frames}
    return made


def method_fingerprint(module: nn.Module, encoder: Encoder, options: Mapping[str, Any]) -> Fingerprint:
    """Return the fingerprint of a method: its options, its encoder's configuration, and the weights of both."""
    decided = repr((sorted(options.items()), sorted(encoder.configuration().items())))
    name = f"{type(module).__name__} {hashlib.sha256(decided.encode()).hexdigest()[:12]}"
    return {"method": name, "weights": fingerprint({}, module)[:16]}
