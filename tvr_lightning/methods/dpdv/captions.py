"""The descriptions of DPDV's Recover-Path: their features, and which videos have enough of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tvr_lightning.encoders.base import Encoder
from tvr_lightning.errors import UserError
from tvr_lightning.features import Record


class CaptionError(UserError, ValueError):
    """The Recover-Path lacks captions; names the video and what provides them."""


@dataclass
class Captions(Record):
    """Features of up to S descriptions of each of B videos.

    Attributes:
        sentence: (B, S, D).
        words: (B, S, W, D).
        word_mask: (B, S, W) bool.
        mask: (B, S) bool, True where there is a description.
    """

    sentence: Tensor
    words: Tensor
    word_mask: Tensor
    mask: Tensor


def padded_captions(video_ids: list[str], descriptions: list[list[str]], most: int, least: int) -> list[list[str]]:
    """Return the descriptions of B videos without empty ones, padded with "" to `most` each.

    Args:
        video_ids: of the B videos, for errors.
        descriptions: of each video.
        most: S, places per video.
        least: how many the Recover-Path takes.

    Raises:
        CaptionError: a video has fewer than `least` descriptions that say something, or more than `most`.
    """
    padded = []
    for video_id, described in zip(video_ids, descriptions, strict=True):
        said = [text for text in described if text.strip()]
        if len(said) < least:
            raise CaptionError(
                f"{video_id} has {len(said)} descriptions, the Recover-Path takes {least}: describe it in the captions "
                "file, or lower model.init_args.dpdv.recover_captions"
            )
        if len(said) > most:
            raise CaptionError(
                f"{video_id} has {len(said)} descriptions, more than model.init_args.dpdv.captions {most}; raise it"
            )
        padded.append(said + [""] * (most - len(said)))
    return padded


def encode_captions(encoder: Encoder, descriptions: list[list[str]], words: int) -> Captions:
    """Encode S descriptions of each of B videos with the text encoder, as the paper does.

    Args:
        encoder: of the texts.
        descriptions: B lists of S strings; "" where there is none.
        words: W.
    """
    texts = [text for described in descriptions for text in described]
    features = encoder.encode_text(texts, words)
    mask = torch.tensor([bool(text) for text in texts], device=features.sentence.device)
    shape = (len(descriptions), -1)
    return Captions(
        features.sentence.unflatten(0, shape),
        features.words.unflatten(0, shape),
        features.word_mask.unflatten(0, shape),
        mask.unflatten(0, shape),
    )
