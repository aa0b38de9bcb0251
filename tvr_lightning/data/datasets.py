"""Datasets that read texts, videos and matching pairs of one split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from tvr_lightning.data.audio_alignment import AudioOptions, add_sound, no_audio
from tvr_lightning.data.batch import Media, PairBatch, TextBatch, Tokens, VideoBatch
from tvr_lightning.data.records import Split, VideoRecord
from tvr_lightning.data.recover_captions import RecoverCaptions
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.media.audio import AudioError
from tvr_lightning.media.augment import Augmentation, draw_augmentation
from tvr_lightning.media.preparation import Preparation
from tvr_lightning.media.sampling import FrameSampling
from tvr_lightning.media.video import VideoError, read_clip


class VideoReader(Protocol):
    """Reads one video or one text: the one place where raw files and a feature store differ."""

    def __call__(self, video: VideoRecord, generator: np.random.Generator | None) -> Media | VideoFeatures:
        """Return a record of one video; `generator` drives random sampling and augmentation, None in evaluation.

        Raises:
            VideoError: the video cannot be read.
        """
        ...

    def empty(self) -> Media | VideoFeatures:
        """Return a record of no videos whose other dimensions agree with those read."""
        ...

    def text(self, text: str) -> list[str] | Tokens | TextFeatures:
        """Return one text as it is batched: the caption itself, its token ids, or its features."""
        ...


@dataclass(frozen=True)
class MediaReader:
    """Decodes clips from video files.

    Attributes:
        frames: F, frames per clip, padded and masked where a clip has fewer.
        preparation: how each becomes the square that the encoder takes.
        sampling: which frames are taken.
        augmentation: drawn once per clip, the same for its frames; only in training, where there is a generator.
        audio: what the audio encoder is given; None leaves the sound unread.
        on_corrupt: whether a broken sound track is an error, or sounds as far as it goes and is named in `problems`.
        tokenise: the encoder's `caption_tokens`; None leaves captions as strings.
    """

    frames: int
    preparation: Preparation
    sampling: FrameSampling
    augmentation: Augmentation = "none"
    audio: AudioOptions | None = None
    on_corrupt: Literal["error", "skip"] = "error"
    tokenise: Callable[[list[str]], Tokens] | None = None

    def __call__(self, video: VideoRecord, generator: np.random.Generator | None) -> Media:
        """Return Media with pixels (1, F, 3, S, S), frame_mask (1, F) and duration (1,) in seconds.

        Raises:
            VideoError: the file is missing, broken, or holds no video.
        """
        random = generator is not None and self.augmentation != "none"
        augment = draw_augmentation(self.augmentation if random else "none", self.preparation, generator)
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
        audio, size = None if self.audio is None else no_audio(self.audio, self.frames), self.preparation.image_size
        return Media(
            audio=audio,
            audio_mask=None if audio is None else audio.mask,
            pixels=torch.zeros(
                0, self.frames, 3, size, size, dtype=torch.uint8 if self.preparation.antialias else torch.float16
            ),
            frame_mask=torch.zeros(0, self.frames, dtype=torch.bool),
            duration=torch.zeros(0),
        )

    def text(self, text: str) -> list[str] | Tokens:
        """Return the caption as token ids, or as it is where the encoder tokenises."""
        return [text] if self.tokenise is None else self.tokenise([text])


class TextDataset(Dataset[TextBatch]):
    """The texts of a split, each with its index.

    Args:
        split: texts and videos.
        read: reads one text.
    """

    def __init__(self, split: Split, read: VideoReader) -> None:
        self.split = split
        self.read = read

    def __len__(self) -> int:
        """Return N, the number of texts."""
        return len(self.split.texts)

    def __getitem__(self, index: int) -> TextBatch:
        """Return a TextBatch of one text."""
        return text_item(self.split, index, self.read)


class VideoDataset(Dataset[VideoBatch]):
    """The videos of a split, each once, with its index.

    Args:
        split: texts and videos.
        read: reads one video.
        skip: an unreadable video becomes a record of no videos that names it in `skipped`; otherwise it is an error.
    """

    def __init__(self, split: Split, read: VideoReader, *, skip: bool = False) -> None:
        self.split = split
        self.read = read
        self.skip = skip

    def __len__(self) -> int:
        """Return M, the number of videos."""
        return len(self.split.videos)

    def __getitem__(self, index: int) -> VideoBatch:
        """Return a VideoBatch of one video, or of none if it was skipped.

        Raises:
            VideoError: the file cannot be read and `skip` is off; the message names it.
        """
        try:
            return video_item(self.split, index, self.read, None)
        except (VideoError, AudioError) as error:
            if not self.skip:
                raise
            return VideoBatch(self.read.empty(), torch.zeros(0, dtype=torch.int64), [], skipped=[str(error)])


class PairDataset(Dataset[PairBatch]):
    """Matching pairs of a training split, indexed by the (epoch, sample) pairs of `TrainingSampler`.

    Args:
        split: texts and videos; every video has a text.
        read: reads one video.
        one_caption: a sample is a video with one of its captions, drawn per epoch; otherwise every caption is a sample.
        seed: with epoch and sample, decides caption, random frames and augmentation, whatever worker reads it.
        skip: an unreadable video is replaced by the next readable one and named in `skipped`.
        captions: further descriptions, which pairs bring along as `extras["recover_captions"]`, a list of strings or
            their Tokens each.
        tokenise: the encoder's `caption_tokens`, for these; None leaves them strings.
    """

    def __init__(
        self,
        split: Split,
        read: VideoReader,
        *,
        one_caption: bool = False,
        seed: int = 0,
        skip: bool = False,
        captions: RecoverCaptions | None = None,
        tokenise: Callable[[list[str]], Tokens] | None = None,
    ) -> None:
        self.split = split
        self.read = read
        self.one_caption = one_caption
        self.seed = seed
        self.skip = skip
        self.captions = captions
        self.tokenise = tokenise
        self._captions = split.texts_of_videos()

    def __len__(self) -> int:
        """Number of samples: captions, or videos where one caption is drawn."""
        return len(self.split.videos) if self.one_caption else len(self.split.texts)

    def __getitem__(self, position: tuple[int, int]) -> PairBatch:
        """Return a PairBatch of one pair.

        Raises:
            VideoError: the video cannot be read and `skip` is off, or no video of the split can be read.
        """
        epoch, sample = position
        generator = np.random.default_rng([self.seed, epoch, sample])
        if self.one_caption:
            video, text = sample, int(generator.choice(self._captions[sample]))
        else:
            video, text = self.split.texts[sample].video, sample
        skipped: list[str] = []
        for step in range(len(self.split.videos)):
            # Substitutes follow in file order; one of its captions is drawn, since the sample's own does not fit it.
            candidate = (video + step) % len(self.split.videos)
            if step:
                text = int(generator.choice(self._captions[candidate]))
            try:
                item = video_item(self.split, candidate, self.read, generator)
            except (VideoError, AudioError) as error:
                if not self.skip:
                    raise
                skipped.append(str(error))
                continue
            item.skipped = skipped + item.skipped
            return PairBatch(text_item(self.split, text, self.read), item, self._extras(candidate))
        raise VideoError(self.split.videos[video].path, f"no video of the split can be read; first: {skipped[0]}")

    def _extras(self, video: int) -> dict[str, Any]:
        if self.captions is None:
            return {}
        described = self.captions.of(self.split.videos[video].video_id)
        return {"recover_captions": [described if self.tokenise is None else self.tokenise(described)]}


def text_item(split: Split, index: int, read: VideoReader) -> TextBatch:
    """Return the text at `index` of a split as a TextBatch of one."""
    return TextBatch(read.text(split.texts[index].text), torch.tensor([index]))


def video_item(split: Split, index: int, read: VideoReader, generator: np.random.Generator | None) -> VideoBatch:
    """Return the video at `index` of a split as a VideoBatch of one.

    Raises:
        VideoError: it cannot be read.
    """
    record = split.videos[index]
    video = read(record, generator)
    problems = video.problems if isinstance(video, Media) else []
    return VideoBatch(video, torch.tensor([index]), [record.video_id], list(problems))
