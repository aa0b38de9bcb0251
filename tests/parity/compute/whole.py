"""Cases of whole checkpoints: CLIP4Clip, X-CLIP, TC-MGC and GARE, from token IDs and pixels.

Scores (N, M) have the factor exp(logit_scale), except GARE's cosines.
"""

import torch
from parity.compute.features import encode_case, first_pairs

from tvr_lightning.authors.convert import import_checkpoint
from tvr_lightning.layers.aggregation import ISA
from tvr_lightning.methods.gare.model import directional_diversity, norm_variance, relaxed_bottleneck
from tvr_lightning.methods.gare.options import Bottleneck, GAREOptions, LogMeanExp, TextPooling, Variance
from tvr_lightning.methods.tcmgc.options import Decorrelation, LanguageVideoAttention, TCMGCOptions


def encoded(case, **options):
    """Return the method of a case, its texts, its videos after the temporal encoder, and all features by name."""
    words, frames = case.inputs["input_ids"].shape[1], case.inputs["video"].shape[1]
    module = import_checkpoint(case.checkpoint, str(case.path), words, frames, method=case.method, **options)
    text, video = encode_case(case, module.encoder)
    related = module.encode_video(video)
    features = {"sentence": text.sentence, "words": text.words, "frames": video.frames}
    features |= {"temporal_frames": related.frames}
    return module, text, related, {f"feature.{name}": tensor for name, tensor in features.items()}


def scaled(module, scores):
    parts = {f"score.{name}": part for name, part in scores.parts.items()}
    return {name: module.logits(score) for name, score in ({"similarity": scores.similarity} | parts).items()}


def compute_xclip(case):
    module, text, video, features = encoded(case)
    loss = module.losses(first_pairs(text, video))["info_nce"]
    return features | scaled(module, module.score(text, video)) | {"loss": loss}


compute_clip4clip = compute_xclip


def compute_tcmgc(case):
    config = case.config
    options = TCMGCOptions(
        attention=LanguageVideoAttention(heads=int(config.get("num_mha_heads", 1))),
        similarity_aggregation=ISA(float(config.get("softmax_lambda", 100.0))),
        decorrelation=Decorrelation(weight=float(config.get("sdr_weight", 0.5))),
    )
    module, text, video, features = encoded(case, options=options)
    pairs = first_pairs(text, video)
    terms = module.losses(pairs)
    attention = module.head.attention
    queries = attention.queries(torch.cat([text.sentence.unsqueeze(1), text.words], dim=1))
    conditioned = attention(queries, video.frames).materialize()
    found = {
        "sentence_conditioned_video": conditioned[:, :, 0],  # (N, M, D)
        "word_conditioned_frames": conditioned[:, :, 1:].transpose(1, 2),  # (N, W, M, D)
        "loss.info_nce": terms["info_nce"],
        "loss.sdr": module.head.decorrelation(module.score(pairs.text, pairs.video), module.temperature()),
        "loss.total": sum(terms.values()),
    }
    return features | scaled(module, module.score(text, video)) | found


def compute_gare(case):
    def number(name, default):
        return float(case.config.get(name, default))

    options = GAREOptions(
        pooling=TextPooling(number("pooling_temperature", 3.0)),
        bottleneck=Bottleneck(number("kl_weight", 1e-4)),
        norm_variance=Variance(number("norm_weight", 0.01), number("norm_floor", 0.5)),
        direction=LogMeanExp(number("direction_weight", 0.01), number("direction_alpha", 2.0)),
    )
    module, text, video, features = encoded(case, options=options)
    if "temporal_frames" not in case.features:  # the authors' case has them under the name of those before
        features["feature.frames"] = video.frames
    head, pairs = module.head, first_pairs(text, video)
    scores, terms = head(text, video, True), module.losses(pairs)
    increment = head(pairs.text, pairs.video, True).parts["increment"]
    texts, means = head.of_texts(text.sentence, len(video)), head.of_videos(head.mean_frames(video), len(text))
    return features | {
        "similarity": scores.similarity,
        "delta": scores.parts["increment"],  # (N, M, D), as the pooled videos
        "pooled_video": head.pooled(texts, means, video).materialize().squeeze(2),
        "loss.info_nce": terms["info_nce"],
        "loss.kl": relaxed_bottleneck(increment, options.bottleneck),
        "loss.direction": directional_diversity(increment, options.direction),
        "loss.norm_variance_unclamped": norm_variance(increment, Variance(floor=float("inf"))),
        "loss.total": sum(terms.values()),
    }
