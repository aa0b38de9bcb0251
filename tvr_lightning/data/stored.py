"""Reads videos and texts from a feature store where a dataset would otherwise decode and tokenise."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tvr_lightning.data.audio_alignment import AudioOptions
from tvr_lightning.data.records import Split, VideoRecord
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.media.opening import VideoError
from tvr_lightning.media.preparation import Preparation
from tvr_lightning.media.sampling import FrameSampling
from tvr_lightning.store import FeatureStore, Fingerprint, VideoKey, text_id


def video_key(dataset: str, video: VideoRecord) -> VideoKey:
    """Return what a video's features are kept under."""
    return dataset, video.video_id, video.span


def frame_fingerprint(frames: int, preparation: Preparation, sampling: FrameSampling, copies: str = "") -> Fingerprint:
    """Return how the frames of a store's videos are sampled and prepared, and of which `copies`, if of any."""
    sampled = f"{sampling}, {frames} frames" + (f", {copies}" if copies else "")
    return {"sampling": sampled, "preprocessing": preparation.describe()}


def text_fingerprint(words: int) -> Fingerprint:
    """Return how the texts of a store are cut; of what tokens, its encoder says."""
    return {"sampling": f"{words} words"}


def open_store(
    path: str,
    frames: int,
    preparation: Preparation,
    sampling: FrameSampling,
    words: int,
    audio: AudioOptions | None,
    copies: str = "",
) -> FeatureStore:
    """Open a store and check that it is whole and made for these options.

    Raises:
        StoreError: it is absent or damaged, or made otherwise; both values are shown.
    """
    store = FeatureStore(path)
    store.require("text", text_fingerprint(words))
    store.require("frames", frame_fingerprint(frames, preparation, sampling, copies))
    if audio is not None:
        store.require("audio", {"preprocessing": audio.describe()})
    store.verify()
    return store


@dataclass(frozen=True)
class FeatureReader:
    """Reads the features of one video or text, in the place of `MediaReader` and of the captions themselves.

    Attributes:
        store: where they are.
        dataset: the dataset's folder name, under which `tvr extract` kept its videos.
        patches: whether patch vectors are read too.
    """

    store: FeatureStore
    dataset: str
    patches: bool = False

    def __call__(self, video: VideoRecord, generator: np.random.Generator | None) -> VideoFeatures:
        """Return features with frames (1, F, D); `generator` has nothing to decide.

        Raises:
            VideoError: extraction skipped the video.
            StoreError: the video is not in the store, or its shard is damaged.
        """
        key = video_key(self.dataset, video)
        reason = self.store.skipped("frames").get(key)
        if reason is not None:
            raise VideoError(Path(video.path), f"skipped when features were extracted: {reason}")
        return self.store.video([key], self.patches)

    def empty(self) -> VideoFeatures:
        """Return features of no videos whose other dimensions agree with the store's."""
        return self.store.first_video(self.patches)[:0]

    def text(self, text: str) -> TextFeatures:
        """Return features of one text: sentence (1, D), words (1, W, D).

        Raises:
            StoreError: the text is not in the store, or its shard is damaged.
        """
        return self.store.text([text])

    def absent(self, split: Split) -> dict[int, str]:
        """Check that the store is complete for a split, and return which of its videos extraction skipped, and why.

        Returns:
            Reasons by position in `split.videos`.

        Raises:
            StoreError: videos or texts are missing without a reason; says which command completes the store.
        """
        keys = [video_key(self.dataset, video) for video in split.videos]
        self.store.require_items("frames", keys)
        if self.patches:
            self.store.require_items("patches", keys)
        self.store.require_items("text", [text_id(text.text) for text in split.texts])
        skipped = self.store.skipped("frames")
        return {i: f"skipped when features were extracted: {skipped[k]}" for i, k in enumerate(keys) if k in skipped}
