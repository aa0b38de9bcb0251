"""Check of a feature store against the encoders: digests of all shards, and features of a sample computed again."""

import random

import torch
from torch import Tensor

from tvr_lightning.encoders.audio import AudioEncoder
from tvr_lightning.encoders.base import Encoder
from tvr_lightning.extract.batches import ExtractBatch, start_inference
from tvr_lightning.extract.fingerprint import fingerprints
from tvr_lightning.extract.plan import ExtractOptions, ExtractSource
from tvr_lightning.store import FeatureStore, StoreError

TOLERANCE = 2e-3  # relative to the largest value: float16 adds 5e-4, and batch sizes and devices change the last digits


@torch.no_grad()
def verify(
    source: ExtractSource,
    encoder: Encoder,
    audio_encoder: AudioEncoder | None,
    options: ExtractOptions,
    sample: int = 8,
) -> dict[str, float]:
    """Check the store at `options.out`: digests, fingerprints, files, and `sample` videos and texts computed again.

    Returns:
        The largest deviation of each tensor, relative to the largest value of the item.

    Raises:
        StoreError: A shard is damaged, the store has other settings or other files, or an item deviates by more than
            `TOLERANCE`. The message names the item.
    """
    store, models = FeatureStore(options.out), (encoder, audio_encoder)
    store.verify()
    parts = [part for part in store.parts if part != "audio" or audio_encoder is not None]
    for part, made in fingerprints(source, encoder, audio_encoder, parts).items():
        store.require(part, made)
    start_inference(models, options.device)
    draw = random.Random(0)
    deviations: dict[str, float] = {}
    for item in draw.sample(source.texts, min(sample, len(source.texts))) if "text" in parts else ():
        text = str(item.text)
        stored, computed = store.text([text]), encoder.encode_text([text], source.words)
        _compare(deviations, text, "sentence", stored.sentence, computed.sentence)
        _compare(deviations, text, "words", stored.words, computed.words)
    of_videos = [part for part in parts if part != "text"]
    readable = [pair for pair in source.videos if not any(pair[1].key in store.skipped(part) for part in of_videos)]
    for record, item in draw.sample(readable, min(sample, len(readable))) if of_videos else ():
        batch = ExtractBatch({}, source.read(record, None))
        batch.encode(of_videos, models, options.device)
        for part in of_videos:
            _compare(deviations, item.path, part, store.item(part, item.key)[0], batch.features[part].values[0])
    for part in of_videos:
        store.require_items(part, {item.key: record.path for record, item in source.videos})
    return deviations


def _compare(deviations: dict[str, float], item: str, name: str, stored: Tensor, computed: Tensor) -> None:
    if stored.shape != computed.shape:
        raise StoreError(f"{item}: stored {name} are {tuple(stored.shape)}, computed {tuple(computed.shape)}")
    expected = computed.float().cpu()
    deviation = float((stored.float() - expected).abs().max()) / (float(expected.abs().max()) or 1.0)
    if deviation > TOLERANCE:
        raise StoreError(
            f"{item}: the stored {name} deviate from the computed ones by {deviation:.1e} of the largest value. The "
            "file has changed, or the store was modified. Extract to another folder."
        )
    deviations[name] = max(deviations.get(name, 0.0), deviation)
