"""Encoders for texts, videos, and audio."""

from tvr_lightning.encoders.audio import AudioEncoder
from tvr_lightning.encoders.base import Encoder, TemporalInitialization
from tvr_lightning.encoders.clip import ClipEncoder, SizedClipEncoder
from tvr_lightning.encoders.hub import MissingWeightsError
from tvr_lightning.encoders.mteb_encoder import MTEBEncoder
from tvr_lightning.encoders.open_clip_encoder import OpenClipEncoder
from tvr_lightning.encoders.sentence_transformers_encoder import SentenceTransformersEncoder
from tvr_lightning.encoders.tiny import TinyClipEncoder
from tvr_lightning.encoders.tuning import Adapter, FineTuning, Frozen, LastBlocks, LoRA, Tuning
from tvr_lightning.encoders.wav2vec2 import TinyWav2Vec2Encoder, Wav2Vec2Encoder
from tvr_lightning.encoders.whisper import TinyWhisperEncoder, WhisperEncoder

__all__ = [
    "Adapter", "AudioEncoder", "ClipEncoder", "Encoder", "FineTuning", "Frozen", "LastBlocks", "LoRA", "MTEBEncoder",
    "MissingWeightsError", "OpenClipEncoder", "SentenceTransformersEncoder", "SizedClipEncoder",
    "TemporalInitialization", "TinyClipEncoder", "TinyWav2Vec2Encoder", "TinyWhisperEncoder", "Tuning",
    "Wav2Vec2Encoder", "WhisperEncoder",
]  # fmt: skip
