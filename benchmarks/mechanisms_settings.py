"""Synthetic settings for `mechanisms.py`: features with one factor of a given strength.

A content is a 16-dimensional vector. A linear map per modality turns it into texts and videos, with noise, as an
encoder would that was trained on other pairs. Lengths and directions are similar to CLIP's: vectors are a few units
long, and each modality has an offset (its cone), orthogonal to all contents unless a setting is about it. A
setting is a function that draws N pairs. Strength 0 is the control without the factor; sizes, noise, and random numbers
are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods.dpdv.model import Captions

CONTENT, DIMENSION, AUDIO = 16, 64, 48
FRAMES, WORDS, PATCHES, SCENES = 8, 4, 2, 5
TEST, VALIDATION, BATCH = 400, 400, 64
COPIES = 16
"""Number of training pairs that share one content in the settings of false negatives."""
LENGTH = 8 / 3
"""Length of the part of a vector that shows its content; offsets and noise are in units of it."""
OFFSET = 1.2
"""Length of a modality's offset, for which two texts have a cosine of about 0.45, and two videos of about 0.5."""
SENTENCE_NOISE, WORD_NOISE, FRAME_NOISE = 0.9, 1.2, 1.5


@dataclass
class Split:
    """Features of N matching pairs, and several captions of each video if the setting has them."""

    text: TextFeatures
    video: VideoFeatures
    captions: Captions | None = None


@dataclass
class Setting:
    """Pairs for training, for the test, and for the choice of settings, which share no content.

    Attributes:
        copies: Number of consecutive training pairs that share one content.
        together: Number of these that are in one batch.
    """

    train: Split
    test: Split
    validation: Split
    copies: int
    together: int

    def batches(self, generator: torch.Generator) -> Iterator[Tensor]:
        """Yield the rows (BATCH,) of each batch of an epoch."""
        contents = len(self.train.text) // self.copies
        rows = torch.randperm(contents, generator=generator)[:, None] * self.copies + torch.arange(self.copies)
        groups = rows.unflatten(1, (-1, self.together)).transpose(0, 1)  # (groups, contents, together)
        yield from groups.flatten().split(BATCH)


class Space:
    """Maps from contents to texts, videos, and audio, and the one generator for all numbers of a setting.

    Args:
        offset: Length of both modalities' offsets, in units of LENGTH.
        neutral: Whether the offsets are orthogonal to all contents and to each other, so that they favor no item.
    """

    def __init__(self, seed: int, offset: float = OFFSET, neutral: bool = True) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        shared = self.normal(CONTENT, DIMENSION)
        self.text_map = shared / DIMENSION**0.5
        self.video_map = (shared + 0.5 * self.normal(CONTENT, DIMENSION)) / (1.25 * DIMENSION) ** 0.5
        self.audio_map = self.normal(CONTENT, AUDIO) / AUDIO**0.5
        self.styles = self.normal(4, DIMENSION) / DIMENSION**0.5
        offsets = self.normal(2, DIMENSION)
        if neutral:
            shown = torch.linalg.qr(torch.cat([self.text_map, self.video_map]).T).Q
            offsets = torch.linalg.qr((offsets - offsets @ shown @ shown.T).T).Q.T
        self.text_offset, self.video_offset = offset * offsets / offsets.norm(dim=1, keepdim=True)
        self.word_offset = self.apart(torch.cat([self.text_map, self.video_map, offsets]))
        self.hum = self.apart(self.audio_map)

    def apart(self, vectors: Tensor) -> Tensor:
        """Draw a direction that is orthogonal to all of some vectors (N, D)."""
        taken, direction = torch.linalg.qr(vectors.T).Q, self.normal(vectors.shape[1])
        return unit(direction - direction @ taken @ taken.T)

    def normal(self, *shape: int) -> Tensor:
        """Draw standard normal numbers."""
        return torch.randn(shape, generator=self.generator)

    def contents(self, *shape: int) -> Tensor:
        """Draw contents (*shape, CONTENT) of length 1."""
        return unit(self.normal(*shape, CONTENT))

    def parts(self, content: Tensor, count: int) -> Tensor:
        """Return `count` parts (..., count, CONTENT) of contents, each with half of the numbers."""
        seen = torch.rand((*content.shape[:-1], count, CONTENT), generator=self.generator) < 0.5
        return content.unsqueeze(-2) * seen * 2**0.5

    def noisy(self, vectors: Tensor, noise: float) -> Tensor:
        """Return vectors with noise in units of LENGTH."""
        return LENGTH * (vectors + noise * self.normal(*vectors.shape) / vectors.shape[-1] ** 0.5)

    def captions(self, said: Tensor, noise: float = SENTENCE_NOISE, word_noise: float = WORD_NOISE) -> TextFeatures:
        """Return texts whose word w describes a part of the content `said[:, w]` (N, WORDS, CONTENT)."""
        words = self.noisy(self.parts(said, 1).squeeze(-2) @ self.text_map + self.text_offset, word_noise)
        sentence = self.noisy(unit(said.mean(1)) @ self.text_map + self.text_offset, noise)
        return TextFeatures(sentence, words, torch.ones(words.shape[:2], dtype=torch.bool))

    def videos(self, shown: Tensor) -> VideoFeatures:
        """Return videos whose frame f shows the content `shown[:, f]` (N, FRAMES, CONTENT), with patches."""
        frames = self.noisy(shown @ self.video_map + self.video_offset, FRAME_NOISE)
        patches = self.noisy(self.parts(shown, PATCHES) @ self.video_map + self.video_offset, FRAME_NOISE)
        return VideoFeatures(frames, torch.ones(frames.shape[:2], dtype=torch.bool), patches)

    def pairs(self, content: Tensor, noise: float = SENTENCE_NOISE, word_noise: float = WORD_NOISE) -> Split:
        """Return texts and videos of contents (N, CONTENT)."""
        text = self.captions(repeated(content, WORDS), noise, word_noise)
        return Split(text, self.videos(repeated(content, FRAMES)))


def unit(content: Tensor) -> Tensor:
    """Return vectors at length 1."""
    return content / content.norm(dim=-1, keepdim=True)


def repeated(content: Tensor, count: int) -> Tensor:
    """Return (N, count, CONTENT) of contents (N, CONTENT)."""
    return content.unsqueeze(1).expand(-1, count, -1)


def undescribed_scenes(space: Space, count: int, strength: float, training: bool) -> Split:
    """The caption of a video describes one of its scenes; its frames are in random order.

    Strength: share of the frames that show other scenes.
    """
    told, others = space.contents(count), space.contents(count, SCENES - 1)
    untold = torch.arange(FRAMES) >= FRAMES * (1 - strength)
    shown = torch.where(untold[:, None], others.repeat_interleave(2, dim=1), repeated(told, FRAMES))
    order = torch.rand((count, FRAMES), generator=space.generator).argsort(1)
    shown = shown.gather(1, order[..., None].expand(-1, -1, CONTENT))
    return Split(space.captions(repeated(told, WORDS)), space.videos(shown))


def additional_captions(space: Space, count: int, strength: float, training: bool) -> Split:
    """The caption of a training video describes one of its scenes, and additional captions describe the others.

    Test videos show only the described scene. Strength: share of the training frames that show other scenes.
    """
    return additional_captions_everywhere(space, count, strength if training else 0.0, training)


def additional_captions_everywhere(space: Space, count: int, strength: float, training: bool) -> Split:
    """The caption of a video describes one of its scenes, and additional captions describe the others.

    Strength: share of the frames that show other scenes, in training and in the test.
    """
    scenes = space.contents(count, SCENES)  # the first one is described; the others have two frames each
    place = torch.arange(FRAMES) - FRAMES * (1 - strength)
    scene = torch.where(place < 0, 0, place.div(2, rounding_mode="floor") + 1).long()
    video, text = space.videos(scenes[:, scene]), space.captions(repeated(scenes[:, 0], WORDS))
    listed = [space.captions(repeated(scenes[:, each], WORDS)) for each in range(SCENES)]
    sentence, words, mask = (
        torch.stack([getattr(caption, name) for caption in listed], 1) for name in ("sentence", "words", "word_mask")
    )
    return Split(text, video, Captions(sentence, words, mask, (torch.arange(SCENES) <= scene.max()).expand(count, -1)))


def cone(space: Space, count: int, strength: float, training: bool) -> Split:
    """Videos are more or less similar to the mean text, and texts to the mean video (NCL, App. D, Eq. 23).

    Such a video is more similar to all texts, regardless of its content. Strength: standard deviation of the part of
    the vectors in the mean direction of the other modality, in units of the part that shows their content.
    """

    def moved(vectors: Tensor, direction: Tensor) -> Tensor:
        # Without the noise in this direction, which would be the same factor.
        moves = strength * LENGTH * space.normal(len(vectors), *(1,) * (vectors.ndim - 1))
        return vectors - (vectors @ direction).unsqueeze(-1) * direction + moves * direction

    pairs = space.pairs(space.contents(count))
    text = replace(pairs.text, sentence=moved(pairs.text.sentence, unit(space.video_offset)))
    return Split(text, replace(pairs.video, frames=moved(pairs.video.frames, unit(space.text_offset)), patches=None))


def gap(space: Space, count: int, strength: float, training: bool) -> Split:
    """Each modality has an offset in a random direction.

    Strength: length of the offsets, in units of the part of a vector that shows its content.
    """
    return space.pairs(space.contents(count))


def false_negatives(space: Space, count: int, strength: float, training: bool) -> Split:
    """Sixteen training pairs share a content, and some of them are negatives of each other in a batch.

    Strength: number of false negatives of a text in its batch. The pairs are the same for all strengths.
    """
    copies = COPIES if training else 1
    return space.pairs(space.contents(count // copies).repeat_interleave(copies, dim=0))


def false_negatives_of_a_style(space: Space, count: int, strength: float, training: bool) -> Split:
    """The same, and the text and the video of a training pair share a style, half as long as their content.

    Among pairs of one content, only the style identifies the match. In the test, the styles of a text and its video
    are unrelated, so that a head that has learned styles is misled. Strength: number of false negatives of a text.
    """
    pairs = false_negatives(space, count, strength, training)
    own, other = (0.5 * LENGTH * unit(space.normal(count, len(space.styles))) @ space.styles for _ in range(2))
    text = replace(pairs.text, sentence=pairs.text.sentence + own, words=pairs.text.words + own.unsqueeze(1))
    frames = pairs.video.frames + (own if training else other).unsqueeze(1)
    return Split(text, replace(pairs.video, frames=frames, patches=None))


def noisy_sentences(space: Space, count: int, strength: float, training: bool) -> Split:
    """Sentences in the test are noisier than those in training, whose noise is 0.3.

    Strength: additional noise in the test, in units of the part of a sentence that shows its content.
    """
    return space.pairs(space.contents(count), noise=0.3 if training else 0.3 + strength)


def noisy_words(space: Space, count: int, strength: float, training: bool) -> Split:
    """Words are noisier than sentences in all pairs, so that contrasts with words have lower and less useful scores.

    Strength: additional noise of the words, in units of the part of a word that shows its content.
    """
    pairs = space.pairs(space.contents(count), word_noise=WORD_NOISE + strength)
    return Split(pairs.text, replace(pairs.video, patches=None))


def lower_words(space: Space, count: int, strength: float, training: bool) -> Split:
    """All words have the same additional offset, orthogonal to all videos.

    Contrasts with words then have lower scores, but the same order. Strength: length of the offset, in units of the
    part of a word that shows its content.
    """
    pairs = space.pairs(space.contents(count))
    words, frames = pairs.text.words + strength * LENGTH * space.word_offset, pairs.video.frames
    frames = frames - (frames @ space.word_offset).unsqueeze(-1) * space.word_offset
    return Split(replace(pairs.text, words=words), replace(pairs.video, frames=frames, patches=None))


def described_audio(space: Space, count: int, strength: float, training: bool) -> Split:
    """Some videos have a twin with the same frames and other audio, and captions that describe the audio too.

    Strength: share of the videos with a twin.
    """
    return _twins(space, count, strength, 0.0)


def unrelated_audio(space: Space, count: int, strength: float, training: bool) -> Split:
    """All videos have a twin with the same frames and other audio, which the captions describe too.

    Strength: share of the frames whose audio is a hum instead, the same vector in all videos, with noise.
    """
    return _twins(space, count, 1.0, strength)


def _twins(space: Space, count: int, share: float, noisy: float) -> Split:
    picture, sound = space.contents(count), space.contents(count)
    twins = torch.arange(count) < share * count
    picture = torch.where(twins[:, None], picture[torch.arange(count) // 2 * 2], picture)
    second = torch.where(twins[:, None], sound, picture)
    said = torch.cat([repeated(picture, WORDS // 2), repeated(second, WORDS // 2)], dim=1)
    text, video = space.captions(said), space.videos(repeated(picture, FRAMES))
    audio = space.noisy(repeated(sound, FRAMES) @ space.audio_map, FRAME_NOISE)
    order = torch.rand((count, FRAMES), generator=space.generator).argsort(1)
    hum = space.noisy(2 * space.hum.expand_as(audio), FRAME_NOISE)
    audio = torch.where((order < noisy * FRAMES)[..., None], hum, audio)
    return Split(text, replace(video, patches=None, audio=audio, audio_mask=video.frame_mask))


FUNCTIONS = (
    undescribed_scenes, additional_captions, additional_captions_everywhere, cone, gap, false_negatives,
    false_negatives_of_a_style, noisy_sentences, noisy_words, lower_words, described_audio, unrelated_audio,
)  # fmt: skip
SETTINGS: dict[str, Callable[[Space, int, float, bool], Split]] = {
    made.__name__.replace("_", " "): made for made in FUNCTIONS
}


@lru_cache(maxsize=2)
def make_setting(name: str, seed: int, strength: float, pairs: int) -> Setting:
    """Return the splits of a setting, with a number of training pairs."""
    space = Space(seed, strength, neutral=False) if name == "gap" else Space(seed)
    shared = name.startswith("false negatives")
    make, copies = SETTINGS[name], COPIES if shared else 1
    train = make(space, pairs, strength, True)
    test, validation = (make(space, count, strength, False) for count in (TEST, VALIDATION))
    return Setting(train, test, validation, copies, 1 + int(strength) if shared else 1)
