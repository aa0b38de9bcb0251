"""Cases of GARE."""

from __future__ import annotations

from parity.case import ParityCase
from parity.compute.features import encode_case, first_pairs
from torch import Tensor

from tvr_lightning.authors.importer import import_checkpoint
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods.gare.method import GARE
from tvr_lightning.methods.gare.model import directional_diversity, norm_variance, relaxed_bottleneck
from tvr_lightning.methods.gare.options import Bottleneck, GAREOptions, LogMeanExp, TextPooling, Variance


def _module(case: ParityCase) -> GARE:
    config = case.config

    def number(name: str, default: float) -> float:
        return float(config.get(name, default))

    return import_checkpoint(
        case.checkpoint,
        str(case.path),
        words=case.input("input_ids").shape[1],
        frames=case.input("video").shape[1],
        method="gare",
        options=GAREOptions(
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
