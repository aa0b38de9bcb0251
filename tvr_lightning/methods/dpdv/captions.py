"""Features of the video descriptions for DPDV's Recover-Path."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tvr_lightning.data.batch import Tokens
from tvr_lightning.encoders.base import Encoder
from tvr_lightning.errors import UserError
from tvr_lightning.features import FeatureBatch


@dataclass
class Captions(FeatureBatch):
    """Features of up to S descriptions of each of B videos."""

    sentence: Tensor  # (B, S, D)
    words: Tensor  # (B, S, W, D)
    word_mask: Tensor  # (B, S, W) bool
    mask: Tensor  # (B, S) bool, True for valid descriptions


def nonempty(video_id: str, described: Sequence[str], most: int, least: int) -> list[int]:
    """Return the positions of the nonempty descriptions of a video.

    Raises:
        UserError: There are fewer than `least` or more than `most`.
    """
    places = [place for place, text in enumerate(described) if text.strip()]
    if len(places) < least:
        raise UserError(
            f"{video_id} has {len(places)} descriptions, but the Recover-Path needs {least}. Add descriptions to the "
            "captions file, or lower model.init_args.dpdv.recover_captions."
        )
    if len(places) > most:
        raise UserError(
            f"{video_id} has {len(places)} descriptions, more than model.init_args.dpdv.captions {most}. Raise it."
        )
    return places


def encode_captions(
    encoder: Encoder,
    video_ids: list[str],
    descriptions: Sequence[list[str] | Tokens],
    words: int,
    most: int,
    least: int,
) -> Captions:
    """Encode `least` to `most` descriptions of each of B videos with the text encoder, as in the paper.

    Descriptions are strings or the output of the encoder's `caption_tokens`. Missing ones are encoded as "".
    """
    texts: list[str] = []
    tokens: list[Tokens] = []
    counts = []
    tokenise = encoder.caption_tokens(words)
    blank = None if tokenise is None else tokenise([""])
    for video_id, described in zip(video_ids, descriptions, strict=True):
        strings = described.captions if isinstance(described, Tokens) else described
        places = nonempty(video_id, strings, most, least)
        missing = most - len(places)
        texts += [*(strings[place] for place in places), *[""] * missing]
        if isinstance(described, Tokens) and blank is not None:
            tokens += [described[places], blank[[0] * missing]]
        counts.append(len(places))
    features = encoder.encode_text(Tokens.cat(tokens) if tokens else texts, words)
    shape = (len(descriptions), most)
    mask = torch.arange(most) < torch.tensor(counts).unsqueeze(1)
    return Captions(
        features.sentence.unflatten(0, shape),
        features.words.unflatten(0, shape),
        features.word_mask.unflatten(0, shape),
        mask.to(features.sentence.device),
    )
