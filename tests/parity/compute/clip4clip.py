"""Cases of CLIP4Clip."""

from __future__ import annotations

from parity.case import CaseError, ParityCase
from parity.compute.features import encode_case, first_pairs
from torch import Tensor

from tvr_lightning.authors.importer import import_checkpoint, similarity_header


def compute_clip4clip(case: ParityCase) -> dict[str, Tensor]:
    """Compute features, similarity (N, M) with the factor exp(logit_scale), and loss of a CLIP4Clip case."""
    header = case.config.get("head")
    words, frames = case.input("input_ids").shape[1], case.input("video").shape[1]
    kind = type(similarity_header(case.checkpoint)).__name__
    found = kind[0].lower() + kind[1:]  # as the released code writes it
    if header not in (None, found):
        raise CaseError(f"{case.path}: config head is {header!r}; by its checkpoint's names the header is {found!r}")
    module = import_checkpoint(case.checkpoint, str(case.path), words, frames, method="clip4clip")
    text, video = encode_case(case, module.encoder)
    related = module.encode_video(video)
    similarity = module.score(text, related).similarity
    return {
        "feature.sentence": text.sentence,
        "feature.words": text.words,
        "feature.frames": video.frames,
        "feature.temporal_frames": related.frames,
        "similarity": module.logits(similarity),
        "loss": module.losses(first_pairs(text, related))["info_nce"],
    }
