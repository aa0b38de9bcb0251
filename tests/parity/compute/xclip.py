"""Cases of X-CLIP."""

from __future__ import annotations

from parity.case import ParityCase
from parity.compute.features import encode_case, first_pairs
from torch import Tensor

from tvr_lightning.authors.importer import import_checkpoint


def compute_xclip(case: ParityCase) -> dict[str, Tensor]:
    """Compute features, similarity (N, M) with the factor exp(logit_scale), its parts, and loss of an X-CLIP case."""
    words, frames = case.input("input_ids").shape[1], case.input("video").shape[1]
    module = import_checkpoint(case.checkpoint, str(case.path), words, frames, method="xclip")
    text, video = encode_case(case, module.encoder)
    related = module.encode_video(video)
    scores, scale = module.score(text, related), module.temperature()
    return {
        "feature.sentence": text.sentence,
        "feature.words": text.words,
        "feature.frames": video.frames,
        "feature.temporal_frames": related.frames,
        "similarity": scale * scores.similarity,
        **{f"score.{name}": scale * part for name, part in scores.parts.items()},
        "loss": module.losses(first_pairs(text, related))["info_nce"],
    }
