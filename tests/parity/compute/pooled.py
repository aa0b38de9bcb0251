"""Cases of heads from embeddings whose videos are pooled by the text: X-Pool, T-MASS and GAID."""

import dataclasses

import torch
from parity.compute.features import case_scale, embedded, load_head
from torch.nn import functional as F

from tvr_lightning.authors.families import gaid_options
from tvr_lightning.authors.names import GAID, TMASS, XPOOL
from tvr_lightning.layers.cosine import unit
from tvr_lightning.layers.stochastic import support_text
from tvr_lightning.methods.gaid.model import GAIDHead, branch_losses
from tvr_lightning.methods.tmass import TMASSHead, TMASSOptions, score_as_released
from tvr_lightning.methods.xpool import XPoolHead, XPoolOptions
from tvr_lightning.training.losses import info_nce

WEIGHTED = "loss.total_support_weight_"


def attention_of(case):
    """Return the attention that a case's metadata describe, without dropout as in evaluation."""
    return XPoolOptions(heads=int(case.config.get("num_mha_heads", 1)), dropout=0.0)


def pooled_of(head, text, video):
    """Return the pooled videos (M, N, D)."""
    return head.pooled(*head.prepare(text, video)).materialize()[:, :, 0].transpose(0, 1)


def weighted_totals(case, first, support):
    return {name: first + support * float(name[len(WEIGHTED) :]) for name in case.expected if WEIGHTED in name}


def compute_xpool(case):
    text, video = embedded(case)
    head = load_head(XPoolHead(text.sentence.shape[1], video.frames.shape[1], attention_of(case)), case, XPOOL)
    return {"pooled_video(video,text)": pooled_of(head, text, video), "similarity": head(text, video).similarity}


def compute_tmass(case):
    text, video = embedded(case)
    options = TMASSOptions(attention_of(case))
    head = load_head(TMASSHead(text.sentence.shape[1], video.frames.shape[1], options), case, TMASS)
    draws = case.inputs["eval_sigma(video,trial,caption)"]  # each pair has its own
    frames = head.fused(text.sentence, video)
    pooled = head.pooled(head.prepare(text, video)[0], video)

    def pair(i, j):
        """Cosines (K,) of the samples of a pair and its score."""
        sides = head.prepare(text[i : i + 1], video[j : j + 1])
        cosines, _ = head.trials(*sides, head.fused(text.sentence[i : i + 1], sides[1]), draws[j, :, i])
        return cosines.flatten(), head.score(*sides, draws[j, :, i]).similarity

    cosines, scores = zip(*(pair(i, j) for i in range(len(text)) for j in range(len(video))), strict=True)
    shape = len(text), len(video)
    found = {
        "log_variance(caption,video)": head.radius(
            frames.cosine(text.sentence), video.frame_mask.unsqueeze(1)
        ).transpose(0, 1),
        "pooled_video(video,caption)": pooled.materialize()[:, :, 0].transpose(0, 1),
        "similarity_trials_query_conditioned(trial,caption,video)": torch.stack(cosines, 1).unflatten(1, shape),
        "similarity_query_conditioned": torch.cat(scores).view(shape),
        "similarity_as_released": _as_released(case, head, text, video, draws),
        "similarity_mean_text_query_conditioned": pooled.unit().dot(unit(text.sentence).unsqueeze(1))[:, :, 0, 0].T,
    }
    if "train_sigma" not in case.inputs:
        return found
    text, sigma = text[case.inputs["train_caption"]], case.inputs["train_sigma"]
    pooled = pooled_of(head, text, video)
    own = head.fused(text.sentence, video).cosine(text.sentence).diagonal(dim1=0, dim2=1).T
    std = head.std(own, video.frame_mask)
    cosines = head.train_cosines(text, video, sigma)
    stochastic, support = (info_nce(case_scale(case) * matrix) for matrix in cosines)
    return found | {
        "train.log_variance": head.radius(own, video.frame_mask),
        "train.pooled_video(video,text)": pooled,
        "train.similarity": cosines[0],
        "train.stochastic_text": head.perturbed(text.sentence, std, sigma),
        "train.support_similarity": cosines[1],
        "train.support_text": support_text(text.sentence, pooled.mean(1), std),
        "loss.stochastic": stochastic,
        "loss.support": support,
        **weighted_totals(case, stochastic, support),
    }


def _as_released(case, head, text, video, draws):
    """Scores (N, M) by the released protocol: caption s of a query and videos pooled with their caption s."""
    owner, slot = case.inputs["caption_video"], case.inputs["caption_slot"]
    scores = text.sentence.new_zeros(len(text), len(video))
    for i in range(len(text)):
        for j in range(len(video)):
            (caption,) = ((owner == j) & (slot == slot[i])).nonzero().flatten().tolist()
            sides = text[i : i + 1], video[j : j + 1], text[caption : caption + 1]
            scores[i, j] = score_as_released(head, *sides, draws[j, :, i]).similarity
    return scores


def compute_gaid(case):
    """Audio vectors (M, T, D_a) are pooled to the frames as released; the own caption of video i is caption i."""
    text, video = embedded(case)
    dimension, frames = video.frames.shape[2], video.frames.shape[1]
    audio = case.inputs["audio_features"]
    if "linear.weight" in case.checkpoint:
        audio = F.linear(audio, case.checkpoint.pop("linear.weight"), case.checkpoint.pop("linear.bias"))
    video.audio = F.adaptive_avg_pool1d(audio.mT, frames).mT
    options = dataclasses.replace(gaid_options(), attention=attention_of(case))
    head = load_head(GAIDHead(dimension, frames, options), case, GAID)
    by_video, by_text = head.gate.of_video(video), head.gate.of_text(text.sentence)
    count = min(len(text), len(video))
    found = {
        "gate_paired": (by_video[:count] + by_text[:count].unsqueeze(1)).sigmoid().squeeze(-1),
        "gate_pairwise": (by_video.squeeze(-1) + by_text.unsqueeze(1)).sigmoid(),
        "similarity_as_released": score_as_released(head, text, video, text[: len(video)], None).similarity,
        "similarity_query_conditioned": head(text, video).similarity,
    }
    if "sigma" not in case.inputs:
        return found
    cosines = head.train_cosines(text[:count], video[:count], case.inputs["sigma"][:count])
    perturbation, support = branch_losses(cosines, case_scale(case), "released")
    return found | {
        "train.similarity": cosines[0],
        "train.support_similarity": cosines[1],
        "loss.perturbation": perturbation,
        "loss.support": support,
        **weighted_totals(case, perturbation, support),
    }
