"""Synthetic worlds for `mechanisms.py`: features with one factor of a given strength.

A content is a vector of 16 numbers. Texts and videos show it through linear maps of their own, with noise, as an
encoder would that was trained on other pairs. Lengths and directions are similar to CLIP's: vectors are a few units
long, and each modality has an offset of its own (its cone), orthogonal to all contents unless a world is about it. A
world is a function of a seed and a strength. Strength 0 is the control without the factor; sizes, noise, and random
numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods.dpdv.captions import Captions

CONTENT, DIMENSION, AUDIO = 16, 64, 48
FRAMES, WORDS, PATCHES, SCENES = 8, 6, 4, 5
TRAIN, TEST, VALIDATION, BATCH = 512, 400, 400, 64
LENGTH = 8 / 3
"""Length of the part of a vector that shows its content; offsets and noise are in units of it."""
OFFSET = 1.2
"""Length of a modality's offset, for which two texts have a cosine of about 0.45, and two videos of about 0.5."""
SENTENCE_NOISE, WORD_NOISE, FRAME_NOISE = 0.9, 1.2, 1.5


@dataclass
class Split:
    """Features of N matching pairs, and several captions of each video if the world has them."""

    text: TextFeatures
    video: VideoFeatures
    captions: Captions | None = None


@dataclass
class World:
    """Pairs for training, for the test, and for the choice of settings, which share no content.

    Attributes:
        copies: Number of consecutive training pairs that share one content.
        together: Number of these that are in one batch.
    """

    train: Split
    test: Split
    validation: Split
    copies: int = 1
    together: int = 1

    def batches(self, generator: torch.Generator) -> Iterator[Tensor]:
        """Yield the rows (BATCH,) of each batch of an epoch."""
        contents = len(self.train.text) // self.copies
        rows = torch.randperm(contents, generator=generator)[:, None] * self.copies + torch.arange(self.copies)
        groups = rows.unflatten(1, (-1, self.together)).transpose(0, 1)  # (groups, contents, together)
        yield from groups.flatten().split(BATCH)


class Space:
    """Maps from contents to texts, videos, and sound.

    Args:
        seed: Seed of the one generator for all numbers of a world.
        offset: Length of both modalities' offsets, in units of LENGTH.
        neutral: Whether the offsets are orthogonal to all contents and to each other, so that they favor no item.
    """

    def __init__(self, seed: int, offset: float = OFFSET, neutral: bool = True) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        shared = self.normal(CONTENT, DIMENSION)
        self.text_map = shared / DIMENSION**0.5
        self.video_map = (shared + 0.5 * self.normal(CONTENT, DIMENSION)) / (1.25 * DIMENSION) ** 0.5
        self.audio_map = self.normal(CONTENT, AUDIO) / AUDIO**0.5
        offsets = self.normal(2, DIMENSION)
        if neutral:
            shown = torch.linalg.qr(torch.cat([self.text_map, self.video_map]).T).Q
            offsets = torch.linalg.qr((offsets - offsets @ shown @ shown.T).T).Q.T
        self.text_offset, self.video_offset = offset * offsets / offsets.norm(dim=1, keepdim=True)

    def normal(self, *shape: int) -> Tensor:
        """Draw standard normal numbers."""
        return torch.randn(shape, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        """Draw numbers from [0, 1)."""
        return torch.rand(shape, generator=self.generator)

    def contents(self, *shape: int) -> Tensor:
        """Draw contents (*shape, CONTENT) of length 1."""
        return unit(self.normal(*shape, CONTENT))

    def parts(self, content: Tensor, count: int) -> Tensor:
        """Return `count` parts (..., count, CONTENT) of contents, each with half of the numbers."""
        seen = self.uniform(*content.shape[:-1], count, CONTENT) < 0.5
        return content.unsqueeze(-2) * seen * 2**0.5

    def noise(self, *shape: int) -> Tensor:
        """Draw noise of about length 1."""
        return self.normal(*shape) / shape[-1] ** 0.5

    def in_text(self, content: Tensor, noise: float) -> Tensor:
        """Return text vectors (..., DIMENSION) of contents."""
        vectors = content @ self.text_map + self.text_offset
        return LENGTH * (vectors + noise * self.noise(*vectors.shape))

    def in_video(self, content: Tensor, noise: float) -> Tensor:
        """Return frame or patch vectors (..., DIMENSION) of contents."""
        vectors = content @ self.video_map + self.video_offset
        return LENGTH * (vectors + noise * self.noise(*vectors.shape))

    def in_audio(self, content: Tensor, noise: float) -> Tensor:
        """Return audio vectors (..., AUDIO) of contents."""
        vectors = content @ self.audio_map
        return LENGTH * (vectors + noise * self.noise(*vectors.shape))

    def captions(
        self, said: Tensor, sentence_noise: float = SENTENCE_NOISE, word_noise: float = WORD_NOISE
    ) -> TextFeatures:
        """Return texts whose word w describes a part of the content `said[:, w]` (N, WORDS, CONTENT)."""
        words = self.in_text(self.parts(said, 1).squeeze(-2), word_noise)
        sentence = self.in_text(unit(said.mean(1)), sentence_noise)
        return TextFeatures(sentence, words, torch.ones(words.shape[:2], dtype=torch.bool))

    def videos(self, shown: Tensor, noise: float = FRAME_NOISE) -> VideoFeatures:
        """Return videos whose frame f shows the content `shown[:, f]` (N, FRAMES, CONTENT), with patches."""
        frames = self.in_video(shown, noise)
        patches = self.in_video(self.parts(shown, PATCHES), noise)
        return VideoFeatures(frames, torch.ones(frames.shape[:2], dtype=torch.bool), patches)


def unit(content: Tensor) -> Tensor:
    """Return vectors at length 1."""
    return content / content.norm(dim=-1, keepdim=True)


def repeated(content: Tensor, count: int) -> Tensor:
    """Return (N, count, CONTENT) of contents (N, CONTENT)."""
    return content.unsqueeze(1).expand(-1, count, -1)


def untold_scenes(seed: int, strength: float) -> World:
    """The caption of a video describes one of its scenes; its frames are in random order.

    Strength: share of the frames that show other scenes.
    """
    space = Space(seed)

    def split(count: int) -> Split:
        told, others = space.contents(count), space.contents(count, SCENES - 1)
        untold = torch.arange(FRAMES) >= FRAMES * (1 - strength)
        shown = torch.where(untold[:, None], others.repeat_interleave(2, dim=1), repeated(told, FRAMES))
        order = space.uniform(count, FRAMES).argsort(1)
        shown = shown.gather(1, order[..., None].expand(-1, -1, CONTENT))
        return Split(space.captions(repeated(told, WORDS)), space.videos(shown))

    return World(split(TRAIN), split(TEST), split(VALIDATION))


def further_captions(seed: int, strength: float, at_test: float | None = 0.0) -> World:
    """The caption of a training video describes one of its scenes, further captions describe the others.

    Test videos show only the described scene. Strength: share of the training frames that show other scenes.
    """
    space = Space(seed)

    def split(count: int, untold: float) -> Split:
        scenes = space.contents(count, SCENES)  # the first one is described; the others have two frames each
        place = torch.arange(FRAMES) - (FRAMES * (1 - untold))
        scene = torch.where(place < 0, 0, place.div(2, rounding_mode="floor") + 1).long()
        video = space.videos(scenes[:, scene])
        text = space.captions(repeated(scenes[:, 0], WORDS))
        listed = [space.captions(repeated(scenes[:, each], WORDS)) for each in range(SCENES)]
        captions = Captions(
            torch.stack([caption.sentence for caption in listed], 1),
            torch.stack([caption.words for caption in listed], 1),
            torch.stack([caption.word_mask for caption in listed], 1),
            (torch.arange(SCENES) <= scene.max()).expand(count, -1),
        )
        return Split(text, video, captions)

    later = strength if at_test is None else at_test
    return World(split(TRAIN, strength), split(TEST, later), split(VALIDATION, later))


def further_captions_everywhere(seed: int, strength: float) -> World:
    """The same, with the other scenes in test videos too.

    Strength: share of all frames that show other scenes.
    """
    return further_captions(seed, strength, at_test=None)


def cone(seed: int, strength: float) -> World:
    """Videos are more or less similar to the mean text, and texts to the mean video (NCL, App. D, Eq. 23).

    Such a video is more similar to all texts, regardless of its content. Strength: standard deviation of the part of
    the vectors in the mean direction of the other modality, in units of the part that shows their content.
    """
    space = Space(seed)
    mean_text, mean_video = unit(space.text_offset), unit(space.video_offset)

    def moved(vectors: Tensor, direction: Tensor) -> Tensor:
        # Without the noise in this direction, which would be the same factor.
        moves = strength * LENGTH * space.normal(len(vectors), *(1,) * (vectors.ndim - 1))
        return vectors - (vectors @ direction).unsqueeze(-1) * direction + moves * direction

    def split(count: int) -> Split:
        content = space.contents(count)
        text, video = space.captions(repeated(content, WORDS)), space.videos(repeated(content, FRAMES))
        text = replace(text, sentence=moved(text.sentence, mean_video))
        return Split(text, replace(video, frames=moved(video.frames, mean_text), patches=None))

    return World(split(TRAIN), split(TEST), split(VALIDATION))


def gap(seed: int, strength: float) -> World:
    """Each modality has an offset in a random direction.

    Strength: length of the offsets, in units of the part of a vector that shows its content.
    """
    space = Space(seed, strength, neutral=False)

    def split(count: int) -> Split:
        content = space.contents(count)
        return Split(space.captions(repeated(content, WORDS)), space.videos(repeated(content, FRAMES)))

    return World(split(TRAIN), split(TEST), split(VALIDATION))


def false_negatives(seed: int, strength: float) -> World:
    """Sixteen training pairs share a content, and some of them are negatives of each other in a batch.

    Strength: number of false negatives of a text in its batch. The pairs are the same for all strengths.
    """
    space, copies = Space(seed), 16

    def split(count: int, copies: int) -> Split:
        content = space.contents(count // copies).repeat_interleave(copies, dim=0)
        return Split(space.captions(repeated(content, WORDS)), space.videos(repeated(content, FRAMES)))

    splits = split(2 * TRAIN, copies), split(TEST, 1), split(VALIDATION, 1)
    return World(*splits, copies, together=1 + int(strength))


def false_negatives_of_a_style(seed: int, strength: float) -> World:
    """The same, and the text and the video of a training pair share a style, half as long as their content.

    Among pairs of one content, only the style identifies the match. In the test, the styles of a text and its video
    are unrelated, so that a head that has learned styles is misled. Strength: number of false negatives of a text.
    """
    space, copies = Space(seed), 16
    styles = space.normal(4, DIMENSION) / DIMENSION**0.5

    def style(count: int) -> Tensor:
        return 0.5 * LENGTH * unit(space.normal(count, len(styles))) @ styles

    def split(count: int, copies: int, paired: bool) -> Split:
        content = space.contents(count // copies).repeat_interleave(copies, dim=0)
        text, video = space.captions(repeated(content, WORDS)), space.videos(repeated(content, FRAMES))
        own, other = style(count), style(count)
        text = replace(text, sentence=text.sentence + own, words=text.words + own.unsqueeze(1))
        frames = video.frames + (own if paired else other).unsqueeze(1)
        return Split(text, replace(video, frames=frames, patches=None))

    splits = split(2 * TRAIN, copies, True), split(TEST, 1, False), split(VALIDATION, 1, False)
    return World(*splits, copies, together=1 + int(strength))


def noisy_sentences(seed: int, strength: float) -> World:
    """Sentences in the test are noisier than those in training, whose noise is 0.3.

    Strength: additional noise in the test, in units of the part of a sentence that shows its content.
    """
    space = Space(seed)

    def split(count: int, noise: float) -> Split:
        content = space.contents(count)
        return Split(space.captions(repeated(content, WORDS), noise), space.videos(repeated(content, FRAMES)))

    return World(split(TRAIN, 0.3), split(TEST, 0.3 + strength), split(VALIDATION, 0.3 + strength))


def told_by_sound(seed: int, strength: float) -> World:
    """Some videos have a twin with the same frames and another sound, and captions that describe the sound too.

    Strength: share of the videos with a twin.
    """
    space = Space(seed)

    def split(count: int) -> Split:
        picture, sound = space.contents(count), space.contents(count)
        twins = torch.arange(count) < strength * count
        picture = torch.where(twins[:, None], picture[torch.arange(count) // 2 * 2], picture)
        second = torch.where(twins[:, None], sound, picture)
        said = torch.cat([repeated(picture, WORDS // 2), repeated(second, WORDS // 2)], dim=1)
        text, video = space.captions(said), space.videos(repeated(picture, FRAMES))
        audio = space.in_audio(repeated(sound, FRAMES), FRAME_NOISE)
        return Split(text, replace(video, patches=None, audio=audio, audio_mask=video.frame_mask))

    return World(split(TRAIN), split(TEST), split(VALIDATION))


def noisy_words(seed: int, strength: float) -> World:
    """Words are noisier than sentences in all pairs, so that contrasts with words have lower and less useful scores.

    Strength: additional noise of the words, in units of the part of a word that shows its content.
    """
    space = Space(seed)

    def split(count: int) -> Split:
        content = space.contents(count)
        text = space.captions(repeated(content, WORDS), word_noise=WORD_NOISE + strength)
        return Split(text, replace(space.videos(repeated(content, FRAMES)), patches=None))

    return World(split(TRAIN), split(TEST), split(VALIDATION))


WORLDS: dict[str, Callable[[int, float], World]] = {
    "untold scenes": untold_scenes,
    "further captions": further_captions,
    "further captions everywhere": further_captions_everywhere,
    "cone": cone,
    "gap": gap,
    "false negatives": false_negatives,
    "false negatives of a style": false_negatives_of_a_style,
    "noisy sentences": noisy_sentences,
    "told by sound": told_by_sound,
    "noisy words": noisy_words,
}
