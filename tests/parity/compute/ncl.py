"""Cases of NCL's equations written out in float64: biases, losses, gradients, queues and ranks."""

from itertools import product

import torch
from metric_rows import normalization_error
from torch.nn.functional import normalize

from tvr_lightning.evaluation.balance import retrieval_mass
from tvr_lightning.evaluation.normalization import SinkhornBias, normalize_scores
from tvr_lightning.evaluation.sources import MatrixSource
from tvr_lightning.layers.sinkhorn import sinkhorn_biases
from tvr_lightning.methods.ncl.model import normalized_logits
from tvr_lightning.ranks import text_to_video_ranks, video_to_text_ranks
from tvr_lightning.training.losses import info_nce, row_cross_entropy


def _scored(case):
    """Return cosines, gamma, and Sinkhorn's iterations by their name in the results.

    Cosines are (N, M) of texts and videos, (K, M) of the queue's texts and the videos, (K', N) of its videos and texts.
    """
    names = ("text", "video", "queue_text", "queue_video")
    text, video, *queue = (normalize(case.inputs[f"{name}_embedding"].double(), dim=-1) for name in names)
    few, many = int(case.config["n_iters"]), int(case.config["converged_iterations"])
    cosines = text @ video.T, queue[0] @ video.T, queue[1] @ text.T
    return cosines, float(case.config["gamma"]), {f"iterations_{few}": few, "converged": many}


def compute_ncl(case):
    """With one text per video: cosines are (B, B); biases, sums of probabilities and ranks (B,)."""
    cosines, gamma, every = _scored(case)
    cosine = cosines[0]
    found = {"cosine": cosine} | dict(_losses("plain", cosine / gamma))
    found |= dict(_retrieval("plain", cosine, cosine, gamma))
    for name, iterations in every.items():
        text_bias, video_bias = sinkhorn_biases(cosine, gamma, iterations)
        found |= {f"{name}.text_bias": text_bias, f"{name}.video_bias": video_bias}
        found |= dict(_retrieval(name, cosine + video_bias, cosine + text_bias[:, None], gamma))
        found |= dict(_training(case, name, gamma, iterations))
        biases, *adjusted = _adjusted(cosines, gamma, iterations, "queue")
        found |= {f"queue.{name}.{of}": bias for of, bias in biases.items()}
        found |= dict(_retrieval(f"queue.{name}", *adjusted, gamma))
        if f"queue.{name}.text_bias_texts_as_rows" in case.expected:
            as_rows, _ = sinkhorn_biases(cosines[2].T, gamma, iterations)
            found[f"queue.{name}.text_bias_texts_as_rows"] = as_rows
    return found


def compute_ncl_multi_caption(case):
    """With several captions per video and both marginals: cosines are (N, M), the rest (N,) or (M,)."""
    cosines, gamma, every = _scored(case)
    cosine, owner = cosines[0], case.inputs["caption_video"]
    counts = torch.bincount(owner, minlength=cosine.shape[1]).double(), torch.ones(len(owner), dtype=torch.float64)
    found = {"cosine": cosine} | dict(_ranks("plain", cosine, cosine, owner))
    for name, iterations in every.items():
        for source, kind in product(("oracle", "queue"), ("uniform", "count")):
            prefix = f"{source}.{kind}.{name}"
            biases, *adjusted = _adjusted(cosines, gamma, iterations, source, counts if kind == "count" else None)
            found |= {f"{prefix}.{of}": bias for of, bias in biases.items()}
            found |= dict(_ranks(prefix, *adjusted, owner)) | dict(_masses(prefix, *adjusted, gamma))
    return found


def _losses(name, logits):
    yield f"{name}.loss", info_nce(logits)
    yield f"{name}.loss_t2v", row_cross_entropy(logits)
    yield f"{name}.loss_v2t", row_cross_entropy(logits.T)


def _ranks(name, forward, backward, owner):
    """Ranks from scores (N, M) of either direction, and the video of each text (N,)."""
    yield f"{name}.rank_t2v", text_to_video_ranks(forward, owner).better + 1
    yield f"{name}.rank_v2t", video_to_text_ranks(backward, owner).better + 1


def _masses(name, forward, backward, gamma):
    yield f"{name}.sum_probability_videos", retrieval_mass(MatrixSource(forward), gamma)
    yield f"{name}.sum_probability_texts", retrieval_mass(MatrixSource(backward.T), gamma)


def _retrieval(name, forward, backward, gamma):
    """Ranks, probabilities and normalization errors from square scores of either direction."""
    yield from _ranks(name, forward, backward, torch.arange(len(forward)))
    yield from _masses(name, forward, backward, gamma)
    for side, scores in (("t2v", forward), ("v2t", backward.T)):
        error = torch.tensor(normalization_error(scores, gamma), dtype=torch.float64)
        yield f"{name}.normalisation_error_{side}", error


def _adjusted(cosines, gamma, iterations, source, counts=None):
    """Biases, as evaluation applies them, and the scores of either direction with them.

    The queries are those of training (`queue`) or of the test (`oracle`).
    """
    cosine, text_bank, video_bank = cosines
    queries = "oracle" if source == "oracle" else "train"
    normalizer = SinkhornBias(gamma, queries, iterations, "uniform" if counts is None else "count")
    of_videos, of_texts = counts or (None, None)
    forward = normalize_scores(normalizer, cosine, text_bank, "text-to-video", of_texts, of_videos)
    backward = normalize_scores(normalizer, cosine.T, video_bank, "video-to-text", of_videos, of_texts).T
    biases = {"video_bias": (forward - cosine)[0], "text_bias": (backward - cosine)[:, 0]}
    return biases, forward, backward


@torch.enable_grad()
def _training(case, name, gamma, iterations):
    """Adjusted scores, losses, and gradients with the biases constant or, where the case has them, through them."""
    sides = ("text_embedding", "video_embedding")
    raw = [case.inputs[side].double().requires_grad_() for side in sides]
    text, video = (normalize(side, dim=-1) for side in raw)
    log_scale = torch.tensor(gamma, dtype=torch.float64).reciprocal().log().requires_grad_()
    cosine, scale = text @ video.T, log_scale.exp()
    logits = scale * cosine
    normalized = normalized_logits(logits, iterations, scale=scale)
    yield f"{name}.adjusted_similarity", normalized.detach() * gamma
    yield from _losses(name, normalized.detach())
    kinds = ("cosine", "logit_scale.biases_constant", "normalised_text", "normalised_video", *sides)
    gradients = torch.autograd.grad(info_nce(normalized), (cosine, log_scale, text, video, *raw), retain_graph=True)
    for kind, gradient in zip(kinds, gradients, strict=True):
        yield f"{name}.gradient.{kind}", gradient
    weights = (normalized - logits).detach()
    (gradient,) = torch.autograd.grad(info_nce(logits + weights), (log_scale,), retain_graph=True)
    yield f"{name}.gradient.logit_scale.log_weights_constant", gradient
    if f"{name}.gradient.text_embedding_through_biases" in case.expected:
        loss = info_nce(normalized_logits(logits, iterations, detach=False))
        for kind, gradient in zip(sides, torch.autograd.grad(loss, raw), strict=True):
            yield f"{name}.gradient.{kind}_through_biases", gradient
