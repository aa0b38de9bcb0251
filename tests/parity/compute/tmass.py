"""Cases of T-MASS's head: both protocols with given draws, and the training step."""

from __future__ import annotations

import torch
from parity.case import CaseError, ParityCase
from parity.compute.features import case_attention, case_scale, embedded, load_head
from torch import Tensor

from tvr_lightning.authors.names import TMASS
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import unit
from tvr_lightning.layers.stochastic import support_text
from tvr_lightning.methods.tmass import TMASSHead, TMASSOptions, score_as_released
from tvr_lightning.training.losses import info_nce

SIGMA = "eval_sigma(video,trial,caption)"
TRIALS = "similarity_trials_query_conditioned(trial,caption,video)"
WEIGHTED = "loss.total_support_weight_"


def compute_tmass(case: ParityCase) -> dict[str, Tensor]:
    """Compute both protocols' scores (N, M), and the training step where the case has one, of a T-MASS case."""
    text, video = embedded(case)
    head = TMASSHead(text.sentence.shape[1], video.frames.shape[1], TMASSOptions(case_attention(case)))
    load_head(head, case, TMASS)
    draws = case.input(SIGMA)  # each pair has its own
    query, _ = head.prepare(text, video)
    frames = head.fused(text.sentence, video)
    pooled = head.pooled(query, video)
    plain = pooled.unit().dot(unit(text.sentence).unsqueeze(1))[:, :, 0, 0].T
    vectors = pooled.materialize()[:, :, 0].transpose(0, 1)
    log_radius = head.radius(frames.cosine(text.sentence), video.frame_mask.unsqueeze(1))

    def pair(i: int, j: int) -> tuple[Tensor, Tensor]:
        """Cosines (K,) of the samples of a pair and its score."""
        sides = head.prepare(text[i : i + 1], video[j : j + 1])
        cosines, _ = head.trials(*sides, head.fused(text.sentence[i : i + 1], sides[1]), draws[j, :, i])
        return cosines.flatten(), head.score(*sides, draws[j, :, i]).similarity

    pairs = [pair(i, j) for i in range(len(text)) for j in range(len(video))]
    found = {
        "log_variance(caption,video)": log_radius.transpose(0, 1),
        "pooled_video(video,caption)": vectors,
        TRIALS: torch.stack([cosines for cosines, _ in pairs], 1).unflatten(1, (len(text), len(video))),
        "similarity_query_conditioned": torch.cat([score for _, score in pairs]).view(len(text), len(video)),
        "similarity_as_released": _as_released(case, head, text, video, draws),
        "similarity_mean_text_query_conditioned": plain,
    }
    return found | (_training(case, head, text, video) if "train_sigma" in case.inputs else {})


def _as_released(case: ParityCase, head: TMASSHead, text: TextFeatures, video: VideoFeatures, draws: Tensor) -> Tensor:
    """Scores (N, M) by the released protocol: caption s of a query meets videos pooled under their own caption s."""
    owner, slot = case.input("caption_video"), case.input("caption_slot")
    scores = text.sentence.new_zeros(len(text), len(video))
    for number in slot.unique():
        rows = (slot == number).nonzero().flatten()
        own = torch.full((len(video),), -1)
        own[owner[rows]] = rows
        if (own < 0).any():
            raise CaseError(
                f"{case.path}: video {int((own < 0).nonzero()[0])} has no caption {int(number)}; the released protocol "
                "needs equally many captions of every video"
            )
        for i in rows.tolist():
            for j, caption in enumerate(own.tolist()):
                sides = text[i : i + 1], video[j : j + 1], text[caption : caption + 1]
                scores[i, j] = score_as_released(head, *sides, draws[j, :, i]).similarity
    return scores


def _training(case: ParityCase, head: TMASSHead, text: TextFeatures, video: VideoFeatures) -> dict[str, Tensor]:
    scale, rows = case_scale(case), case.input("train_caption")
    text, sigma = text[rows], case.input("train_sigma")
    pooled = head.pooled(*head.prepare(text, video)).materialize()[:, :, 0].transpose(0, 1)
    own = head.fused(text.sentence, video).cosine(text.sentence).diagonal(dim1=0, dim2=1).T
    std = head.std(own, video.frame_mask)
    cosines = head.train_cosines(text, video, sigma)
    stochastic, support = (info_nce(scale * matrix) for matrix in cosines)
    totals = {name: stochastic + support * float(name[len(WEIGHTED) :]) for name in case.expected if WEIGHTED in name}
    return {
        "train.log_variance": head.radius(own, video.frame_mask),
        "train.pooled_video(video,text)": pooled,
        "train.similarity": cosines[0],
        "train.stochastic_text": head.perturbed(text.sentence, std, sigma),
        "train.support_similarity": cosines[1],
        "train.support_text": support_text(text.sentence, pooled.mean(1), std),
        "loss.stochastic": stochastic,
        "loss.support": support,
        **totals,
    }
