"""Cases of T-MASS's head: both protocols with given draws, and the training step."""

from __future__ import annotations

import torch
from parity.case import CaseError, ParityCase
from parity.compute.features import case_attention, case_scale, embedded, load_head
from torch import Tensor

from tvr_lightning.authors.names import TMASS
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import unit
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
    draws = case.input(SIGMA)
    log_radius = head.log_radius(text.sentence, video)
    query, _ = head.prepare(text, video)
    pooled = head.pooled(query, video)
    plain = pooled.unit().dot(unit(text.sentence).unsqueeze(1))[:, :, 0, 0].T
    vectors = pooled.materialize()[:, :, 0].transpose(0, 1)
    found = {
        "log_variance(caption,video)": log_radius.transpose(0, 1),
        "pooled_video(video,caption)": vectors,
        TRIALS: head.trials(query, video, draws)[0].permute(1, 2, 0),
        "similarity_query_conditioned": head.score(query, video, draws).similarity,
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
        scores[rows] = score_as_released(head, text[rows], video, text[own], draws[:, :, rows]).similarity
    return scores


def _training(case: ParityCase, head: TMASSHead, text: TextFeatures, video: VideoFeatures) -> dict[str, Tensor]:
    scale, rows = case_scale(case), case.input("train_caption")
    pooled = head.pooled(*head.prepare(text[rows], video)).materialize()[:, :, 0].transpose(0, 1)
    scores = head.train_scores(text[rows], video, case.input("train_sigma"))
    stochastic = info_nce(scale * scores.similarity)
    support = info_nce(scale * scores.support_similarity)
    totals = {name: stochastic + support * float(name[len(WEIGHTED) :]) for name in case.expected if WEIGHTED in name}
    return {
        "train.log_variance": scores.log_radius,
        "train.pooled_video(video,text)": pooled,
        "train.similarity": scores.similarity,
        "train.stochastic_text": scores.drawn,
        "train.support_similarity": scores.support_similarity,
        "train.support_text": scores.support,
        "loss.stochastic": stochastic,
        "loss.support": support,
        **totals,
    }
