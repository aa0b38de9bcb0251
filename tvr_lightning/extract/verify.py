"""Check of a feature store against the encoders: digests of all shards, and features of a sample computed again."""

from __future__ import annotations

import random

import torch

from tvr_lightning.encoders.audio import AudioEncoder
from tvr_lightning.encoders.base import Encoder
from tvr_lightning.extract.fingerprint import fingerprints
from tvr_lightning.extract.plan import ExtractOptions, ExtractSource
from tvr_lightning.extract.run import frozen
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.store import FeatureStore, StoreError

TOLERANCE = 2e-3  # relative to the largest value: float16 adds 5e-4, and batch sizes and devices change the last digits


def verify(
    source: ExtractSource,
    encoder: Encoder,
    audio_encoder: AudioEncoder | None,
    options: ExtractOptions,
    sample: int = 8,
    seed: int = 0,
) -> dict[str, float]:
    """Check the store at `options.out`: digests, fingerprints, files, and `sample` videos and texts computed again.

    Returns:
        The largest deviation of each tensor, relative to the largest value of the item.

    Raises:
        StoreError: A shard is damaged, the store has other settings or other files, or an item deviates by more than
            `TOLERANCE`. The message names the item.
    """
    store = FeatureStore(options.out)
    store.verify()
    parts = [part for part in store.parts if part != "audio" or audio_encoder is not None]
    for part, made in fingerprints(source, encoder, audio_encoder, parts).items():
        store.require(part, made)
    draw = random.Random(seed)
    deviations: dict[str, float] = {}
    with frozen(options.device, encoder, audio_encoder):
        for item in draw.sample(source.texts, min(sample, len(source.texts))) if "text" in parts else ():
            text = str(item.text)
            _compare(deviations, text, store.text([text]), encoder.encode_text([text], source.words))
        stored = next((part for part in parts if part in ("frames", "pixels")), None)
        videos = [pair for pair in source.videos if stored and pair[1].key not in store.skipped(stored)]
        for record, item in draw.sample(videos, min(sample, len(videos))):
            media = source.read(record, None)
            if "pixels" in parts and not torch.equal(store.pixels([item.key])[0], media.pixels):
                raise StoreError(
                    f"{item.path}: the stored pixels are not those of the video. Extract to another folder."
                )
            if stored == "pixels":
                deviations["pixels"] = 0.0
                continue
            media = media.to(options.device)
            computed = encoder.encode_video(media, "patches" in parts)
            if audio_encoder is not None and "audio" in parts:
                computed.audio, _ = audio_encoder.encode_audio(media)
            _compare(deviations, item.path, store.video([item.key], "patches" in parts), computed)
    for part in parts:
        if part != "text":
            store.require_items(part, {item.key: record.path for record, item in source.videos})
    return deviations


def _compare(
    deviations: dict[str, float],
    name: str,
    stored: TextFeatures | VideoFeatures,
    computed: TextFeatures | VideoFeatures,
) -> None:
    for tensor in ("sentence", "words", "frames", "patches", "audio"):
        actual, expected = getattr(stored, tensor, None), getattr(computed, tensor, None)
        if actual is None or expected is None:
            continue
        if actual.shape != expected.shape:
            raise StoreError(f"{name}: stored {tensor} are {tuple(actual.shape)}, computed {tuple(expected.shape)}")
        expected = expected.float().cpu()
        deviation = float((actual - expected).abs().max()) / (float(expected.abs().max()) or 1.0)
        if deviation > TOLERANCE:
            raise StoreError(
                f"{name}: the stored {tensor} deviate from the encoder's output by {deviation:.1e} of the largest "
                "value. The file has changed, or the store was modified. Extract to another folder."
            )
        deviations[tensor] = max(deviations.get(tensor, 0.0), deviation)
