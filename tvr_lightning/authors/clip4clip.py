"""CLIP4Clip's checkpoints (ArrowLuo/CLIP4Clip, modules/modeling.py) and parity cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from torch import Tensor

from tvr_lightning.authors.checkpoint import NameMap, check_family, rename
from tvr_lightning.authors.clip import CLIP_NAMES, clip_encoder, count_blocks, encode_case, first_pairs
from tvr_lightning.methods.clip4clip import CLIP4Clip, SimilarityHeader
from tvr_lightning.parity.case import ParityCase, ParityError

NAMES: dict[SimilarityHeader, NameMap] = {
    "meanP": NameMap(CLIP_NAMES),
    "seqTransf": NameMap(
        (
            *CLIP_NAMES,
            ("transformerClip.resblocks.", "temporal.resblocks."),
            ("frame_position_", "temporal.frame_position_"),
        )
    ),
    # The released code creates position embeddings for seqLSTM too and never adds them.
    "seqLSTM": NameMap(
        (*CLIP_NAMES, ("lstm_visual.", "temporal.lstm_visual.")), unused=("frame_position_embeddings.",)
    ),
    "tightTransf": NameMap(
        (
            *CLIP_NAMES,
            ("cross.embeddings.position_embeddings.", "cross.position_embeddings."),
            ("cross.transformer.resblocks.", "cross.resblocks."),
            ("cross.pooler.ln_pool.", "cross.ln_pool."),
            ("cross.pooler.dense.", "cross.dense."),
            ("similarity_dense.", "cross.similarity_dense."),
        )
    ),
}


def similarity_header(checkpoint: Mapping[str, Tensor]) -> SimilarityHeader:
    """Return the header that a checkpoint with these names was trained with."""
    if any(name.startswith("cross.") for name in checkpoint):
        return "tightTransf"
    if any(name.startswith("transformerClip.") for name in checkpoint):
        return "seqTransf"
    return "seqLSTM" if any(name.startswith("lstm_visual.") for name in checkpoint) else "meanP"


def _layers(checkpoint: Mapping[str, Tensor], header: SimilarityHeader) -> int | None:
    if header == "seqLSTM":
        return sum(name.startswith("lstm_visual.weight_ih_l") for name in checkpoint)
    if header == "meanP":
        return None
    return count_blocks(
        checkpoint, f"{'cross.transformer' if header == 'tightTransf' else 'transformerClip'}.resblocks."
    )


def import_clip4clip(
    checkpoint: Mapping[str, Tensor],
    source: str,
    words: int = 32,
    frames: int = 12,
    header: SimilarityHeader | None = None,
) -> CLIP4Clip:
    """Build CLIP4Clip from an authors' checkpoint; every size comes from the tensors' shapes.

    Args:
        checkpoint: tensors by the authors' names.
        source: the file, for errors.
        words: text positions W that the method is for.
        frames: frames F that the method is for.
        header: similarity header; None reads it off the names.

    Raises:
        ParityError: another method's checkpoint, unexpected or missing names, or words and frames beyond its positions.
    """
    check_family("clip4clip", checkpoint, source)
    header = header or similarity_header(checkpoint)
    encoder = clip_encoder(checkpoint, source)
    tokens = {"seqTransf": frames, "tightTransf": frames + 1}.get(header, 0)
    if words > encoder.context_length or tokens > encoder.context_length:
        raise ParityError(
            f"{source}: {words} words and {frames} frames do not fit; the checkpoint has positions for "
            f"{encoder.context_length} words"
            + (f" and {encoder.context_length - tokens + frames} frames" if tokens else "")
        )
    if header != "meanP" and not _layers(checkpoint, header):
        raise ParityError(
            f"{source}: no tensors of the header {header}; by its names this is {similarity_header(checkpoint)}"
        )
    module = CLIP4Clip(
        encoder,
        words=words,
        frames=frames,
        similarity_header=header,
        temporal_layers=_layers(checkpoint, header),
    )
    module.load_state_dict(rename(checkpoint, NAMES[header], module.state_dict(), source))
    return module.eval()


def compute_clip4clip(case: ParityCase) -> dict[str, Tensor]:
    """Compute features, similarity (N, M) with the factor exp(logit_scale), and loss of a CLIP4Clip case."""
    header = case.config.get("head")
    if header is not None and header not in get_args(SimilarityHeader):
        raise ParityError(
            f"{case.path}: config head is {header!r}; expected one of {', '.join(get_args(SimilarityHeader))}"
        )
    words, frames = case.input("input_ids").shape[1], case.input("video").shape[1]
    module = import_clip4clip(case.checkpoint, str(case.path), words, frames, header)
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
