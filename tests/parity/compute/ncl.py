"""Parity of NCL with its equations written out in float64: biases, loss, gradients, queues, ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from metric_rows import normalization_error
from parity.case import CaseError, ParityCase
from torch import Tensor
from torch.nn.functional import normalize

from tvr_lightning.evaluation.balance import retrieval_mass
from tvr_lightning.evaluation.normalization import Direction, SinkhornBias, normalize_scores
from tvr_lightning.evaluation.ranks import text_to_video_ranks, video_to_text_ranks
from tvr_lightning.evaluation.sources import MatrixSource
from tvr_lightning.layers.sinkhorn import sinkhorn_biases, sinkhorn_log_weights
from tvr_lightning.methods.ncl.model import normalized_logits
from tvr_lightning.training.losses import info_nce, row_cross_entropy

Named = Iterator[tuple[str, Tensor]]


@dataclass
class Scored:
    """What a case's embeddings give, in float64.

    Attributes:
        cosine: (N, M) inner products of unit texts and videos.
        text_bank: (K, M) those of the queue's texts with the videos.
        video_bank: (K', N) those of the queue's videos with the texts.
        gamma: temperature.
        iterations: of Sinkhorn's algorithm, by the name of the case's results.
    """

    cosine: Tensor
    text_bank: Tensor
    video_bank: Tensor
    gamma: float
    iterations: dict[str, int]


def _scored(case: ParityCase) -> Scored:
    missing = [key for key in ("gamma", "n_iters", "converged_iterations") if key not in case.config]
    if missing:
        raise CaseError(f"{case.path}: its config has no {' and no '.join(missing)}")
    names = ("text", "video", "queue_text", "queue_video")
    text, video, queue_text, queue_video = (
        normalize(case.input(f"{name}_embedding").double(), dim=-1) for name in names
    )
    few, many = int(case.config["n_iters"]), int(case.config["converged_iterations"])
    return Scored(
        cosine=text @ video.T,
        text_bank=queue_text @ video.T,
        video_bank=queue_video @ text.T,
        gamma=float(case.config["gamma"]),
        iterations={f"iterations_{few}": few, "converged": many},
    )


def compute_ncl(case: ParityCase) -> dict[str, Tensor]:
    """Compute biases, losses, gradients, probabilities and ranks of an NCL case with one text per video.

    For B pairs cosines are (B, B); biases, sums of probabilities and ranks (B,); losses scalar.
    """
    scored = _scored(case)
    cosine, gamma = scored.cosine, scored.gamma
    found = {"cosine": cosine} | dict(_losses("plain", cosine / gamma))
    found |= dict(_retrieval("plain", cosine, cosine, gamma))
    for name, iterations in scored.iterations.items():
        text_bias, video_bias = sinkhorn_biases(cosine, gamma, iterations)
        found |= {f"{name}.text_bias": text_bias, f"{name}.video_bias": video_bias}
        found |= dict(_retrieval(name, cosine + video_bias, cosine + text_bias[:, None], gamma))
        found |= dict(_training(case, name, gamma, iterations))
        found |= dict(_queues(f"queue.{name}", scored, iterations))
        if f"queue.{name}.text_bias_texts_as_rows" in case.expected:
            as_rows, _ = sinkhorn_biases(scored.video_bank.T, gamma, iterations)
            found |= {f"queue.{name}.text_bias_texts_as_rows": as_rows}
    return found


def compute_ncl_multi_caption(case: ParityCase) -> dict[str, Tensor]:
    """Compute biases, probabilities and ranks of an NCL case with several captions per video, both marginals.

    Cosines are (N, M); biases, sums of probabilities and ranks (N,) of texts and (M,) of videos.
    """
    scored = _scored(case)
    cosine, owner = scored.cosine, case.input("caption_video")
    counts = torch.bincount(owner, minlength=cosine.shape[1]).double(), torch.ones(len(owner), dtype=torch.float64)
    found = {"cosine": cosine} | dict(_ranks("plain", cosine, cosine, owner))
    for name, iterations in scored.iterations.items():
        for kind, marginals in (("uniform", torch.ones_like(counts[0])), ("count", counts[0])):
            text_bias, video_bias = _biases(cosine / scored.gamma, marginals, scored.gamma, iterations)
            prefix = f"oracle.{kind}.{name}"
            found |= {f"{prefix}.text_bias": text_bias, f"{prefix}.video_bias": video_bias}
            adjusted = cosine + video_bias, cosine + text_bias[:, None]
            found |= dict(_ranks(prefix, *adjusted, owner)) | dict(_masses(prefix, *adjusted, scored.gamma))
            count = kind == "count"
            found |= dict(_queues(f"queue.{kind}.{name}", scored, iterations, owner, counts if count else None))
    return found


def _biases(logits: Tensor, marginals: Tensor, gamma: float, iterations: int) -> list[Tensor]:
    """Sinkhorn biases of texts (N,) and videos (M,) for logits (N, M), with the marginals (M,) of the videos."""
    log_weights = sinkhorn_log_weights(
        lambda weights: (logits if weights is None else logits + weights).logsumexp(1),
        lambda weights: (logits if weights is None else logits + weights[:, None]).logsumexp(0),
        iterations,
        log_column_marginal=marginals.log(),
    )
    return [gamma * weights for weights in log_weights]


def _losses(name: str, logits: Tensor) -> Named:
    yield f"{name}.loss", info_nce(logits)
    yield f"{name}.loss_t2v", row_cross_entropy(logits)
    yield f"{name}.loss_v2t", row_cross_entropy(logits.T)


def _ranks(name: str, forward: Tensor, backward: Tensor, owner: Tensor) -> Named:
    """Ranks from scores (N, M) of either direction, and the video of each text (N,)."""
    yield f"{name}.rank_t2v", text_to_video_ranks(forward, owner).better + 1
    yield f"{name}.rank_v2t", video_to_text_ranks(backward, owner).better + 1


def _masses(name: str, forward: Tensor, backward: Tensor, gamma: float) -> Named:
    yield f"{name}.sum_probability_videos", retrieval_mass(MatrixSource(forward), gamma)
    yield f"{name}.sum_probability_texts", retrieval_mass(MatrixSource(backward.T), gamma)


def _retrieval(name: str, forward: Tensor, backward: Tensor, gamma: float) -> Named:
    """Ranks, probabilities and normalisation errors from square scores of either direction."""
    yield from _ranks(name, forward, backward, torch.arange(len(forward)))
    yield from _masses(name, forward, backward, gamma)
    yield f"{name}.normalisation_error_t2v", torch.tensor(normalization_error(forward, gamma), dtype=torch.float64)
    yield f"{name}.normalisation_error_v2t", torch.tensor(normalization_error(backward.T, gamma), dtype=torch.float64)


def _queues(
    name: str,
    scored: Scored,
    iterations: int,
    owner: Tensor | None = None,
    counts: tuple[Tensor, Tensor] | None = None,
) -> Named:
    """Biases from training queries, as evaluation applies them, and what they do to the ranks."""
    cosine, gamma = scored.cosine, scored.gamma
    normalizer = SinkhornBias(gamma, "train", iterations, "uniform" if counts is None else "count")
    of_videos, of_texts = counts or (None, None)
    first: Direction = "text-to-video"
    forward = normalize_scores(normalizer, cosine, scored.text_bank, first, of_texts, of_videos)
    backward = normalize_scores(normalizer, cosine.T, scored.video_bank, "video-to-text", of_videos, of_texts).T
    yield f"{name}.video_bias", (forward - cosine)[0]
    yield f"{name}.text_bias", (backward - cosine)[:, 0]
    if owner is None:
        yield from _retrieval(name, forward, backward, gamma)
    else:
        yield from _ranks(name, forward, backward, owner)


def _training(case: ParityCase, name: str, gamma: float, iterations: int) -> Named:
    """Adjusted scores, losses, and gradients with the biases constant or, where the case has them, through them."""
    with torch.enable_grad():
        raw = [case.input(f"{side}_embedding").double().requires_grad_() for side in ("text", "video")]
        text, video = (normalize(side, dim=-1) for side in raw)
        log_scale = torch.tensor(gamma, dtype=torch.float64).reciprocal().log().requires_grad_()
        cosine, scale = text @ video.T, log_scale.exp()
        logits = scale * cosine
        normalized = normalized_logits(logits, iterations, scale=scale)
        yield f"{name}.adjusted_similarity", normalized.detach() * gamma
        yield from _losses(name, normalized.detach())
        sides = ("text_embedding", "video_embedding")
        kinds = ("cosine", "logit_scale.biases_constant", "normalised_text", "normalised_video", *sides)
        wanted = (cosine, log_scale, text, video, *raw)
        gradients = torch.autograd.grad(info_nce(normalized), wanted, retain_graph=True)
        for kind, gradient in zip(kinds, gradients, strict=True):
            yield f"{name}.gradient.{kind}", gradient
        weights = (normalized - logits).detach()
        (gradient,) = torch.autograd.grad(info_nce(logits + weights), (log_scale,), retain_graph=True)
        yield f"{name}.gradient.logit_scale.log_weights_constant", gradient
        if f"{name}.gradient.text_embedding_through_biases" in case.expected:
            loss = info_nce(normalized_logits(logits, iterations, detach=False))
            for kind, gradient in zip(sides, torch.autograd.grad(loss, raw), strict=True):
                yield f"{name}.gradient.{kind}_through_biases", gradient
