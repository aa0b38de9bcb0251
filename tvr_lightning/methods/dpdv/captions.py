"""Features of the video descriptions for DPDV's Recover-Path, and checks that every video has enough of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tvr_lightning.data.batch import Tokens
from tvr_lightning.encoders.base import Encoder
from tvr_lightning.errors import UserError
from tvr_lightning.features import FeatureBatch


@dataclass
class Captions(FeatureBatch):
    """Features of up to S descriptions of each of B videos.

    Attributes:
        sentence: Sentences (B, S, D).
        words: Words (B, S, W, D).
        word_mask: Mask (B, S, W) bool of the words.
        mask: Mask (B, S) bool, True for valid descriptions.
    """

    sentence: Tensor
    words: Tensor
    word_mask: Tensor
    mask: Tensor


def said_captions(video_ids: list[str], descriptions: list[list[str]], most: int, least: int) -> list[list[int]]:
    """Return the positions of the nonempty descriptions of each of B videos.

    Args:
        video_ids: IDs of the B videos, for errors.
        descriptions: Descriptions of each video.
        most: Maximum number S of descriptions per video.
        least: Number of descriptions that the Recover-Path uses.

    Raises:
        UserError: A video has fewer than `least` or more than `most` nonempty descriptions.
    """
    found = []
    for video_id, described in zip(video_ids, descriptions, strict=True):
        said = [place for place, text in enumerate(described) if text.strip()]
        if len(said) < least:
            raise UserError(
                f"{video_id} has {len(said)} descriptions, but the Recover-Path needs {least}. Add descriptions to the "
                "captions file, or lower model.init_args.dpdv.recover_captions."
            )
        if len(said) > most:
            raise UserError(
                f"{video_id} has {len(said)} descriptions, more than model.init_args.dpdv.captions {most}. Raise it."
            )
        found.append(said)
    return found


def encode_captions(
    encoder: Encoder,
    video_ids: list[str],
    descriptions: list[list[str]] | list[Tokens],
    words: int,
    most: int,
    least: int,
) -> Captions:
    """Encode the descriptions of B videos with the text encoder, as in the paper. Missing descriptions are "".

    Args:
        encoder: Text encoder.
        video_ids: IDs of the B videos, for errors.
        descriptions: Descriptions of each video, as strings or as the output of the encoder's `caption_tokens`.
        words: Number of words W.
        most: Maximum number S of descriptions per video.
        least: Number of descriptions that the Recover-Path uses.

    Raises:
        UserError: A video has fewer than `least` or more than `most` nonempty descriptions.
    """
    strings = [described.captions if isinstance(described, Tokens) else described for described in descriptions]
    said = said_captions(video_ids, strings, most, least)
    texts: list[str] | Tokens = [
        text
        for described, places in zip(strings, said, strict=True)
        for text in [*(described[place] for place in places), *[""] * (most - len(places))]
    ]
    tokens = [described for described in descriptions if isinstance(described, Tokens)]
    tokenise = encoder.caption_tokens(words)
    if tokenise is not None and len(tokens) == len(descriptions):
        nothing = tokenise([""])
        parts = [(of[places], nothing[[0] * (most - len(places))]) for of, places in zip(tokens, said, strict=True)]
        texts = Tokens.cat([part for pair in parts for part in pair])
    features = encoder.encode_text(texts, words)
    mask = torch.tensor([[place < len(places) for place in range(most)] for places in said]).flatten()
    mask = mask.to(features.sentence.device)
    shape = (len(descriptions), -1)
    return Captions(
        features.sentence.unflatten(0, shape),
        features.words.unflatten(0, shape),
        features.word_mask.unflatten(0, shape),
        mask.unflatten(0, shape),
    )
