"""Fingerprints of features: encoder or method, weights, sampling, and preprocessing; check of a store against them."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from tvr_lightning.data.readers import frame_fingerprint, text_fingerprint
from tvr_lightning.encoders.audio import AudioEncoder
from tvr_lightning.encoders.base import Encoder, fingerprint
from tvr_lightning.extract.plan import ExtractSource
from tvr_lightning.option_types import FeaturePart
from tvr_lightning.store import FeatureStore, Fingerprint, StoreError


def encoder_fingerprints(
    encoder: Encoder, audio_encoder: AudioEncoder | None, parts: Sequence[FeaturePart]
) -> dict[FeaturePart, Fingerprint]:
    """Return the encoder of each part: its name, configuration digest, and weights. Parts without one are omitted."""

    def of(encoder: Encoder | AudioEncoder) -> Fingerprint:
        configuration = encoder.configuration()
        digest = hashlib.sha256(repr(sorted(configuration.items())).encode()).hexdigest()[:12]
        name = configuration.get("name", type(encoder).__name__)
        return {"encoder": f"{name} {digest}", "weights": encoder.fingerprint()[:16]}

    others: list[FeaturePart] = [part for part in parts if part not in ("audio", "pixels")]
    made: dict[FeaturePart, Fingerprint] = dict.fromkeys(others, of(encoder)) if others else {}
    if audio_encoder is not None and "audio" in parts:
        made["audio"] = of(audio_encoder)
    return made


def fingerprints(
    source: ExtractSource, encoder: Encoder, audio_encoder: AudioEncoder | None, parts: Sequence[FeaturePart]
) -> dict[FeaturePart, Fingerprint]:
    """Return the encoder, weights, sampling, and preprocessing of each part."""
    read = source.read
    frames = frame_fingerprint(read.frames, read.preparation, read.sampling, source.copies)
    inputs: dict[FeaturePart, Fingerprint] = {"frames": frames, "patches": frames, "pixels": frames}
    inputs["text"] = {**text_fingerprint(source.words), "preprocessing": encoder.text_preparation}
    if read.audio is not None:
        inputs["audio"] = {**frames, "preprocessing": read.audio.describe()}
    encoders = encoder_fingerprints(encoder, audio_encoder, parts)
    return {part: {**encoders.get(part, {}), **inputs[part]} for part in parts}


def method_fingerprint(module: nn.Module, encoder: Encoder, options: Mapping[str, Any]) -> Fingerprint:
    """Return the fingerprint of a method: its options, its encoder's configuration, and the weights of both."""
    decided = repr((sorted(options.items()), sorted(encoder.configuration().items())))
    name = f"{type(module).__name__} {hashlib.sha256(decided.encode()).hexdigest()[:12]}"
    return {"method": name, "weights": fingerprint({}, module.state_dict())[:16]}


def check_store(store: FeatureStore, encoder: Encoder, audio_encoder: AudioEncoder | None = None) -> str:
    """Check a store against the encoders of a run, and return a line for the user that lists its parts.

    Raises:
        StoreError: The encoder is trained, or a part was created with another encoder or other weights.
    """
    trained = [name for name, parameter in encoder.named_parameters() if parameter.requires_grad]
    if trained:
        raise StoreError(
            f"The feature store {store.path} contains features of a frozen encoder, but {len(trained)} tensors of this "
            "run's encoder are trained. Set model.init_args.tuning to Frozen (as recipes/features.yaml does), or unset "
            "data.init_args.features."
        )
    for part, made in encoder_fingerprints(encoder, audio_encoder, store.parts).items():
        store.require(part, made)
    if audio_encoder is not None and "audio" not in store.parts:
        store.require("audio", {})
    return f"features from the store {store.path}: {', '.join(store.parts)}; only heads are trained, without decoding"
