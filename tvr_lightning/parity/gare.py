"""GARE's checkpoints (musicman217/GARE-text-video-retrieval, tvr/models/modeling.py) and parity cases."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from tvr_lightning.authors.checkpoint import NameMap, check_family, rename
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods.gare import GARE, Bottleneck, GAREOptions, LogMeanExp, TextPooling, Variance
from tvr_lightning.methods.gare.model import directional_diversity, norm_variance, relaxed_bottleneck
from tvr_lightning.parity.case import ParityCase, ParityError
from tvr_lightning.parity.encoder import CLIP_NAMES, clip_encoder, count_blocks, encode_case, first_pairs

NAMES = NameMap(
    (
        *CLIP_NAMES,
        ("transformerClip.resblocks.", "temporal.resblocks."),
        ("frame_position_", "temporal.frame_position_"),
        ("psi.layers.0.cross_attn.", "head.psi."),
        ("psi.layers.0.", "head.psi."),
        ("psi.", "head.psi."),
    ),
    # Created by the released code and never used; the output of log_std_proj is thrown away.
    unused=("psi.log_std_proj.", "psi.layers.0.linear2.", "psi.layers.0.mlp.", "weight_fc."),
)

# The released code creates the temporal transformer's position embeddings for MSVD too, where it builds no transformer.
NAMES_WITHOUT_TEMPORAL = NameMap(NAMES.prefixes, (*NAMES.unused, "frame_position_embeddings."))


def import_gare(
    checkpoint: Mapping[str, Tensor], source: str, words: int = 32, frames: int = 12, gare: GAREOptions | None = None
) -> GARE:
    """Build GARE from an authors' checkpoint; what shapes do not tell comes as arguments.

    Args:
        checkpoint: tensors by the authors' names.
        source: the file, for errors.
        words: text positions W that the method is for.
        frames: frames F that the method is for.
        gare: options; `temporal_layers` is what the checkpoint has.

    Raises:
        ParityError: another method's checkpoint, unexpected or missing names, more than one layer in psi, or words and
            frames beyond its positions.
    """
    check_family("gare", checkpoint, source)
    layers = count_blocks(checkpoint, "psi.layers.")
    if layers != 1:
        raise ParityError(f"{source}: psi has {layers} layers; GARE's psi has one (Eq. 7)")
    encoder = clip_encoder(checkpoint, source, text_mask=True)
    temporal_layers = count_blocks(checkpoint, "transformerClip.resblocks.")
    if max(words, frames if temporal_layers else 0) > encoder.context_length:
        raise ParityError(
            f"{source}: {words} words and {frames} frames do not fit; the checkpoint has positions for "
            f"{encoder.context_length} of each"
        )
    options = dataclasses.replace(gare or GAREOptions(), temporal_layers=temporal_layers)
    module = GARE(encoder, words=words, frames=frames, gare=options)
    names = NAMES if temporal_layers else NAMES_WITHOUT_TEMPORAL
    module.load_state_dict(rename(checkpoint, names, module.state_dict(), source))
    return module.eval()


def _module(case: ParityCase) -> GARE:
    config = case.config

    def number(name: str, default: float) -> float:
        return float(config.get(name, default))

    return import_gare(
        case.checkpoint,
        str(case.path),
        words=case.input("input_ids").shape[1],
        frames=case.input("video").shape[1],
        gare=GAREOptions(
            pooling=TextPooling(number("pooling_temperature", 3.0)),
            bottleneck=Bottleneck(number("kl_weight", 1e-4)),
            norm_variance=Variance(number("norm_weight", 0.01), number("norm_floor", 0.5)),
            direction=LogMeanExp(number("direction_weight", 0.01), number("direction_alpha", 2.0)),
        ),
    )


def compute_gare(case: ParityCase) -> dict[str, Tensor]:
    """Compute features, cosines (N, M), increments and pooled videos (N, M, D), and scalar losses of a GARE case."""
    module = _module(case)
    text, video = encode_case(case, module.encoder)
    related = module.encode_video(video)
    scores = module.head(text, related, True)
    pairs = first_pairs(text, related)
    terms = module.losses(pairs)
    increment = module.head(pairs.text, pairs.video, True).parts["increment"]
    options = module.options
    unbounded = Variance(floor=float("inf"))
    return {
        "feature.sentence": text.sentence,
        "feature.words": text.words,
        # The authors' case holds only the frames behind the temporal transformer, under the name of those before it.
        "feature.frames": (video if "temporal_frames" in case.features else related).frames,
        "feature.temporal_frames": related.frames,
        "similarity": scores.similarity,
        "delta": scores.parts["increment"],
        "pooled_video": _pooled(module, text, related),
        "loss.info_nce": terms["info_nce"],
        "loss.kl": relaxed_bottleneck(increment, options.bottleneck),
        "loss.direction": directional_diversity(increment, options.direction),
        "loss.norm_variance_unclamped": norm_variance(increment, unbounded),
        "loss.total": sum(terms.values(), increment.new_zeros(())),
    }


def _pooled(module: GARE, text: TextFeatures, video: VideoFeatures) -> Tensor:
    """Text-conditioned video vectors (N, M, D), the pooling of every pair."""
    head = module.head
    texts, means = head.of_texts(text.sentence, len(video)), head.of_videos(head.mean_frames(video), len(text))
    return head.pooled(texts, means, video).materialize().squeeze(2)
