"""Cases of TC-MGC."""

from __future__ import annotations

import torch
from parity.case import ParityCase
from parity.compute.features import encode_case, first_pairs
from torch import Tensor

from tvr_lightning.authors.importer import import_checkpoint
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.layers.aggregation import ISA
from tvr_lightning.methods.tcmgc.method import TCMGC
from tvr_lightning.methods.tcmgc.options import Decorrelation, LanguageVideoAttention, TCMGCOptions
from tvr_lightning.pairwise import DensePairVectors


def compute_tcmgc(case: ParityCase) -> dict[str, Tensor]:
    """Compute features, scores with the factor exp(logit_scale), conditioned features and losses of a TC-MGC case.

    Scores are (N, M), videos conditioned on sentences (N, M, D), frames conditioned on words (N, W, M, D).
    """
    config = case.config
    module = import_checkpoint(
        case.checkpoint,
        str(case.path),
        words=case.input("input_ids").shape[1],
        frames=case.input("video").shape[1],
        method="tcmgc",
        options=TCMGCOptions(
            attention=LanguageVideoAttention(heads=int(config.get("num_mha_heads", 1))),
            similarity_aggregation=ISA(float(config.get("softmax_lambda", 100.0))),
            decorrelation=Decorrelation(weight=float(config.get("sdr_weight", 0.5))),
        ),
    )
    text, video = encode_case(case, module.encoder)
    related = module.encode_video(video)
    scale = module.temperature()
    scores = module.score(text, related)
    pairs = first_pairs(text, related)
    terms = module.losses(pairs)
    conditioned = _conditioned(module, text, related)
    return {
        "feature.sentence": text.sentence,
        "feature.words": text.words,
        "feature.frames": video.frames,
        "feature.temporal_frames": related.frames,
        "similarity": scale * scores.similarity,
        **{f"score.{name}": scale * part for name, part in scores.parts.items()},
        "sentence_conditioned_video": conditioned[:, :, 0],
        "word_conditioned_frames": conditioned[:, :, 1:].transpose(1, 2),
        "loss.info_nce": terms["info_nce"],
        "loss.sdr": module.head.decorrelation(module.score(pairs.text, pairs.video), scale),
        "loss.total": sum(terms.values(), scale.new_zeros(())),
    }


def _conditioned(module: TCMGC, text: TextFeatures, video: VideoFeatures) -> Tensor:
    """Text-conditioned vectors (N, M, 1 + W, D): z of the sentence, then z of every word."""
    attention = module.head.attention
    assert attention is not None  # an imported TC-MGC conditions on the text
    queries = attention.queries(torch.cat([text.sentence.unsqueeze(1), text.words], dim=1))
    return attention(DensePairVectors.from_texts(queries, videos=len(video)), video.frames).materialize()
