"""Synthetic features in which one factor at a time is there or not: what `mechanisms.py` trains heads on.

A content is a vector of 16 numbers. Texts and videos show it through a linear map of their own, with noise and a
modality's own offset, as an encoder that was trained on pairs elsewhere would. Every world has a `control`, in which
the factor is absent, and otherwise the same sizes, noise and random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods.dpdv.captions import Captions

CONTENT, DIMENSION, AUDIO = 16, 64, 48
FRAMES, WORDS, PATCHES, SCENES = 8, 6, 4, 2
TRAIN, TEST, BATCH = 512, 400, 64


@dataclass
class Split:
    """N matching pairs: row i of everything belongs together.

    Attributes:
        text: (N, ...) features of the captions.
        video: (N, ...) features of the videos.
        captions: up to SCENES descriptions of each video, where the world has some.
    """

    text: TextFeatures
    video: VideoFeatures
    captions: Captions | None = None


@dataclass
class World:
    """Training and test pairs, and how the former come in batches.

    Attributes:
        train, test: pairs that share no content.
        copies: how many consecutive training pairs share one content.
        together: whether pairs of one content meet in one batch; otherwise they never do.
    """

    train: Split
    test: Split
    copies: int = 1
    together: bool = False

    def batches(self, generator: torch.Generator) -> Iterator[Tensor]:
        """Yield the rows (BATCH,) of each batch of one epoch."""
        contents = len(self.train.text) // self.copies
        order = torch.randperm(contents, generator=generator)
        rows = order[:, None] * self.copies + torch.arange(self.copies)  # (contents, copies)
        yield from (rows if self.together else rows.T).flatten().split(BATCH)


class Maps:
    """What texts, videos and sound make of a content, fixed by a seed."""

    def __init__(self, seed: int) -> None:
        """Draw the maps; all numbers of a world come from this one generator, in one order."""
        self.generator = torch.Generator().manual_seed(seed)
        shared = self.normal(CONTENT, DIMENSION)
        self.text = shared / CONTENT**0.5
        self.video = (shared + 0.5 * self.normal(CONTENT, DIMENSION)) / (1.25 * CONTENT) ** 0.5
        self.audio = self.normal(CONTENT, AUDIO) / CONTENT**0.5
        self.text_offset, self.video_offset = 0.5 * self.normal(DIMENSION), 0.5 * self.normal(DIMENSION)

    def normal(self, *shape: int) -> Tensor:
        """Draw standard normal numbers of any shape."""
        return torch.randn(shape, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        """Draw numbers from [0, 1) of any shape."""
        return torch.rand(shape, generator=self.generator)

    def contents(self, *shape: int) -> Tensor:
        """Draw contents (*shape, CONTENT) of length sqrt(CONTENT)."""
        return sized(self.normal(*shape, CONTENT))

    def parts(self, content: Tensor, count: int) -> Tensor:
        """Return `count` views (..., count, CONTENT) of contents (..., CONTENT), each of half of their numbers."""
        seen = self.uniform(*content.shape[:-1], count, CONTENT) < 0.5
        return content.unsqueeze(-2) * seen * 2**0.5

    def in_text(self, content: Tensor, noise: Tensor | float) -> Tensor:
        """Return text vectors (..., DIMENSION) of contents with noise of the given deviation."""
        return content @ self.text + self.text_offset + noise * self.normal(*content.shape[:-1], DIMENSION)

    def in_video(self, content: Tensor, noise: Tensor | float) -> Tensor:
        """Return frame or patch vectors (..., DIMENSION) of contents with noise of the given deviation."""
        return content @ self.video + self.video_offset + noise * self.normal(*content.shape[:-1], DIMENSION)

    def in_audio(self, content: Tensor, noise: float) -> Tensor:
        """Return audio vectors (..., AUDIO) of contents with noise of the given deviation."""
        return content @ self.audio + noise * self.normal(*content.shape[:-1], AUDIO)

    def captions(self, said: Tensor, sentence_noise: Tensor | float, word_noise: Tensor | float) -> TextFeatures:
        """Return texts of which word w tells a part of the content `said[:, w]` (N, WORDS, CONTENT)."""
        words = self.in_text(self.parts(said, 1).squeeze(-2), word_noise)
        sentence = self.in_text(sized(said.mean(1)), sentence_noise)
        return TextFeatures(sentence, words, torch.ones(words.shape[:2], dtype=torch.bool))

    def videos(self, shown: Tensor, noise: Tensor | float) -> VideoFeatures:
        """Return videos of which frame f shows the content `shown[:, f]` (N, FRAMES, CONTENT), with patches."""
        frames = self.in_video(shown, noise)
        patches = self.in_video(self.parts(shown, PATCHES), noise)
        return VideoFeatures(frames, torch.ones(frames.shape[:2], dtype=torch.bool), patches)


def sized(content: Tensor) -> Tensor:
    """Return contents (..., CONTENT) at the length sqrt(CONTENT)."""
    return content * CONTENT**0.5 / content.norm(dim=-1, keepdim=True)


def repeated(content: Tensor, count: int) -> Tensor:
    """Return (N, count, CONTENT) of contents (N, CONTENT)."""
    return content.unsqueeze(1).expand(-1, count, -1)


def partially_relevant(seed: int, factor: bool) -> World:
    """Videos of two scenes. A caption tells one of them (factor) or something of all (control)."""
    maps = Maps(seed)

    def split(count: int) -> Split:
        scenes = maps.contents(count, SCENES)
        chosen = (maps.uniform(count) * SCENES).long()
        one = repeated(scenes[torch.arange(count), chosen], WORDS)
        said = one if factor else scenes.repeat_interleave(WORDS // SCENES, dim=1)
        text = maps.captions(said, 0.9, 1.2)
        video = maps.videos(scenes.repeat_interleave(FRAMES // SCENES, dim=1), 1.5)
        described = [maps.captions(repeated(scenes[:, s], WORDS), 0.9, 1.2) for s in range(SCENES)]
        captions = Captions(
            torch.stack([text.sentence for text in described], 1),
            torch.stack([text.words for text in described], 1),
            torch.stack([text.word_mask for text in described], 1),
            torch.ones(count, SCENES, dtype=torch.bool),
        )
        return Split(text, video, captions)

    return World(split(TRAIN), split(TEST))


def hubs(seed: int, factor: bool) -> World:
    """Videos of one content. A tenth of them are hubs that show eight other videos' contents besides (factor)."""
    maps = Maps(seed)

    def split(count: int) -> Split:
        own = maps.contents(count)
        others = own[(maps.uniform(count, 8) * count).long()].sum(1)
        mixed = sized(own + sized(others))
        hub = maps.uniform(count, 1) < 0.1
        shown = torch.where(hub & factor, mixed, own)
        return Split(maps.captions(repeated(own, WORDS), 0.8, 1.2), maps.videos(repeated(shown, FRAMES), 1.5))

    return World(split(TRAIN), split(TEST))


def imbalanced(seed: int, factor: bool) -> World:
    """Of every pair the sentence, the words, or half of the frames are spoilt by noise (factor), or nothing is."""
    maps = Maps(seed)

    def split(count: int) -> Split:
        content = maps.contents(count)
        spoilt = (maps.uniform(count) * 3).long()

        def noise(kind: int, usual: float) -> Tensor:
            return torch.where((spoilt == kind) & factor, 4 * usual, usual)

        sentence, words, frames = noise(0, 0.9).unsqueeze(1), noise(1, 1.2)[:, None, None], noise(2, 1.5)
        per_frame = torch.where(torch.arange(FRAMES) % 2 == 0, frames.unsqueeze(1), 1.5)
        text = maps.captions(repeated(content, WORDS), sentence, words)
        frame_vectors = maps.in_video(repeated(content, FRAMES), per_frame.unsqueeze(-1))
        video = VideoFeatures(frame_vectors, torch.ones(count, FRAMES, dtype=torch.bool))
        return Split(text, video)

    return World(split(TRAIN), split(TEST))


def told_by_sound(seed: int, factor: bool) -> World:
    """Videos with sound. Two videos each look alike and captions tell the sound too (factor); or neither (control)."""
    maps = Maps(seed)

    def split(count: int) -> Split:
        picture, sound = maps.contents(count), maps.contents(count)
        if factor:
            picture = picture[: count // 2].repeat_interleave(2, dim=0)
        half = WORDS // 2
        said = torch.cat([repeated(picture, half), repeated(sound if factor else picture, half)], dim=1)
        text, video = maps.captions(said, 0.9, 1.2), maps.videos(repeated(picture, FRAMES), 1.5)
        audio = maps.in_audio(repeated(sound, FRAMES), 1.5)
        return Split(text, replace(video, patches=None, audio=audio, audio_mask=video.frame_mask))

    return World(split(TRAIN), split(TEST))


def false_negatives(seed: int, factor: bool) -> World:
    """Four training videos share a content. They meet in one batch as each other's negatives (factor), or never do."""
    maps, copies = Maps(seed), 4

    def split(count: int, copies: int) -> Split:
        content = maps.contents(count // copies).repeat_interleave(copies, dim=0)
        return Split(maps.captions(repeated(content, WORDS), 0.8, 1.2), maps.videos(repeated(content, FRAMES), 1.5))

    return World(split(TRAIN, copies), split(TEST, 1), copies, together=factor)


WORLDS: dict[str, Callable[[int, bool], World]] = {
    "partially relevant captions": partially_relevant,
    "hub videos": hubs,
    "score imbalance": imbalanced,
    "captions told by sound": told_by_sound,
    "false negatives": false_negatives,
}
