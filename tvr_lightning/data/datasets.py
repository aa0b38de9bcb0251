"""Datasets that read texts, videos and matching pairs of one split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from tvr_lightning.data.audio_alignment import AudioOptions, add_sound, no_audio
from tvr_lightning.data.batch import Media, PairBatch, TextBatch, Tokens, VideoBatch
from tvr_lightning.data.records import Split, VideoRecord
from tvr_lightning.data.recover_captions import RecoverCaptions
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.media.audio import AudioError
from tvr_lightning.media.augment import Augmentation, FrameTransform, draw_augmentation
from tvr_lightning.media.container import VideoError
from tvr_lightning.media.preparation import Preparation
from tvr_lightning.media.video import read_clip
from tvr_lightning.option_types import FrameSampling


class VideoReader(Protocol):
    """Reader of one video or one text, from raw files or from a feature store."""

    def __call__(self, video: VideoRecord, generator: np.random.Generator | None) -> Media | VideoFeatures:
        """Return a record of one video; `generator` drives random sampling and augmentation (None in evaluation)."""
        ...

    def empty(self) -> Media | VideoFeatures:
        """Return a record of zero videos with the other dimensions of the records that are read."""
        ...

    def text(self, text: str) -> list[str] | Tokens | TextFeatures:
        """Return one text in the form in which it is batched: the caption, its token IDs, or its features."""
        ...


@dataclass(frozen=True)
class MediaReader:
    """Decoder of clips from video files.

    Attributes:
        frames: Number of frames F per clip; shorter clips are padded and masked.
        preparation: Conversion of a frame into the square input of the encoder.
        sampling: Rule for selecting the frames of a clip.
        augmentation: Augmentation sampled once per clip, for all its frames. It applies only in training, with a
            generator.
        audio: Settings of the audio encoder input; None reads no audio.
        on_corrupt: Handling of a broken audio track: "error" raises an error; "skip" uses the readable part and adds
            the file to `problems`.
        tokenise: The encoder's `caption_tokens`; None leaves captions as strings.
    """

    frames: int
    preparation: Preparation
    sampling: FrameSampling
    augmentation: Augmentation = "none"
    audio: AudioOptions | None = None
    on_corrupt: Literal["error", "skip"] = "error"
    tokenise: Callable[[list[str]], Tokens] | None = None

    def __call__(self, video: VideoRecord, generator: np.random.Generator | None) -> Media:
        """Return Media with pixels (1, F, 3, S, S), frame_mask (1, F) and duration (1,) in seconds."""
        augment: FrameTransform = self.preparation
        if generator is not None:
            augment = draw_augmentation(self.augmentation, self.preparation, generator)
        clip = read_clip(
            video.path,
            frames=self.frames,
            image_size=self.preparation.image_size,
            sampling=self.sampling,
            span=video.span,
            generator=generator,
            augment=augment,
        )
        duration = torch.tensor([clip.duration], dtype=torch.float32)
        media = Media(pixels=clip.pixels[None], frame_mask=clip.frame_mask[None], duration=duration)
        if self.audio is not None:
            add_sound(media, video.path, video.span, clip, self.audio, self.on_corrupt)
        return media

    def empty(self) -> Media:
        """Return Media with pixels (0, F, 3, S, S)."""
        audio = None if self.audio is None else no_audio(self.audio, self.frames)
        size, dtype = self.preparation.image_size, torch.uint8 if self.preparation.antialias else torch.float16
        return Media(
            pixels=torch.zeros(0, self.frames, 3, size, size, dtype=dtype),
            frame_mask=torch.zeros(0, self.frames, dtype=torch.bool),
            audio=audio,
            audio_mask=None if audio is None else audio.mask,
            duration=torch.zeros(0),
        )

    def text(self, text: str) -> list[str] | Tokens:
        """Return the caption as token IDs, or unchanged if the encoder tokenizes it."""
        return [text] if self.tokenise is None else self.tokenise([text])


@dataclass(eq=False)
class TextDataset(Dataset[TextBatch]):
    """Texts of a split, each with its index."""

    split: Split
    read: VideoReader

    def __len__(self) -> int:
        return len(self.split.texts)

    def __getitem__(self, index: int) -> TextBatch:
        return TextBatch(self.read.text(self.split.texts[index].text), torch.tensor([index]))


@dataclass(eq=False)
class VideoDataset(Dataset[VideoBatch]):
    """Unique videos of a split, each with its index.

    With `skip`, an unreadable video becomes a record of zero videos that names it in `skipped`.
    """

    split: Split
    read: VideoReader
    skip: bool = False

    def __len__(self) -> int:
        return len(self.split.videos)

    def __getitem__(self, index: int) -> VideoBatch:
        try:
            return self.item(index)
        except (VideoError, AudioError) as error:
            if not self.skip:
                raise
            return VideoBatch(self.read.empty(), torch.zeros(0, dtype=torch.int64), [], skipped=[str(error)])

    def item(self, index: int, generator: np.random.Generator | None = None) -> VideoBatch:
        """Return one video, or raise an error if it cannot be read; `generator` is for training."""
        record = self.split.videos[index]
        video = self.read(record, generator)
        problems = video.problems if isinstance(video, Media) else []
        return VideoBatch(video, torch.tensor([index]), [record.video_id], list(problems))


@dataclass(eq=False)
class PairDataset(Dataset[PairBatch]):
    """Matching pairs of a training split, indexed by the (epoch, sample) pairs of `TrainingSampler`.

    Attributes:
        split: Texts and videos; every video has a text.
        read: Reader of a video.
        one_caption: Whether a sample is a video with one of its captions, selected randomly in each epoch. Otherwise
            every caption is a sample.
        seed: Seed that, with epoch and sample, determines caption, random frames and augmentation in any worker.
        skip: Whether an unreadable video is replaced by the next readable one and named in `skipped`.
        captions: Additional descriptions, added to each pair as `extras["recover_captions"]`.
        tokenise: The encoder's `caption_tokens` for these descriptions; None leaves them as a list of strings.
    """

    split: Split
    read: VideoReader
    one_caption: bool = False
    seed: int = 0
    skip: bool = False
    captions: RecoverCaptions | None = None
    tokenise: Callable[[list[str]], Tokens] | None = None

    def __post_init__(self) -> None:
        self._texts, self._videos = TextDataset(self.split, self.read), VideoDataset(self.split, self.read)
        self._captions = self.split.texts_of_videos()

    def __len__(self) -> int:
        return len(self._videos if self.one_caption else self._texts)

    def __getitem__(self, position: tuple[int, int]) -> PairBatch:
        epoch, sample = position
        generator = np.random.default_rng([self.seed, epoch, sample])
        if self.one_caption:
            video, text = sample, int(generator.choice(self._captions[sample]))
        else:
            video, text = self.split.texts[sample].video, sample
        skipped: list[str] = []
        for step in range(len(self._videos)):
            # Substitutes follow in file order, each with one of its captions, since the sample's does not fit.
            candidate = (video + step) % len(self._videos)
            if step:
                text = int(generator.choice(self._captions[candidate]))
            try:
                item = self._videos.item(candidate, generator)
            except (VideoError, AudioError) as error:
                if not self.skip:
                    raise
                skipped.append(str(error))
                continue
            item.skipped = skipped + item.skipped
            extras = {}
            if self.captions is not None:
                described = self.captions.of(item.video_id[0])
                extras["recover_captions"] = [described if self.tokenise is None else self.tokenise(described)]
            return PairBatch(self._texts[text], item, extras)
        raise VideoError(self.split.videos[video].path, f"no video of the split can be read; first: {skipped[0]}")
