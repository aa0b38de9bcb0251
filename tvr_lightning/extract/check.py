"""Check that the features of a store match the encoders of the run."""

from __future__ import annotations

from tvr_lightning.encoders.audio import AudioEncoder
from tvr_lightning.encoders.base import Encoder
from tvr_lightning.extract.fingerprint import encoder_fingerprints
from tvr_lightning.store import FeatureStore, StoreError


def check_store(store: FeatureStore, encoder: Encoder, audio_encoder: AudioEncoder | None = None) -> str:
    """Check a store against the encoders of a run, and return a line for the user that lists its parts.

    Raises:
        StoreError: The encoder is trained, or a part was created with another encoder or other weights. The message
            contains both fingerprints.
    """
    trained = [name for name, parameter in encoder.named_parameters() if parameter.requires_grad]
    if trained:
        raise StoreError(
            f"The feature store {store.path} contains features of a frozen encoder, but {len(trained)} tensors of this "
            "run's encoder are trained. Set model.init_args.encoder.init_args.freeze to all (as recipes/features.yaml "
            "does), or unset data.init_args.features."
        )
    for part, made in encoder_fingerprints(encoder, audio_encoder, store.parts).items():
        store.require(part, made)
    if audio_encoder is not None and "audio" not in store.parts:
        store.require("audio", {})
    return f"features from the store {store.path}: {', '.join(store.parts)}; only heads are trained, without decoding"
