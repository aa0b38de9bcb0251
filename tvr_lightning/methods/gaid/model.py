"""The equations of GAID, in the paper's order (Yang, Cao, He, Su).

t_i (N, D) are texts, v_j and a_j (M, F, D) the frames of a video and their audio. Fused frames and pooled videos of all
pairs are written as in the paper; `tvr_lightning.pairwise` represents them without computing every element. Perturbed
and support texts in training are those of `RegionHead`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from tvr_lightning.features import Scores, VideoFeatures
from tvr_lightning.layers.cosine import unit
from tvr_lightning.layers.pooling import masked_mean
from tvr_lightning.layers.stochastic import Radius
from tvr_lightning.methods.gaid.options import DASP, STP, GAIDOptions, GatedFusion, LossWeighting, NoPerturbation
from tvr_lightning.methods.tmass import RegionHead
from tvr_lightning.methods.xpool import Query
from tvr_lightning.pairwise import BlendedFrames, DenseFrames, DensePairVectors, PairFrames, Pairwise, PlainFrames
from tvr_lightning.pairwise.tiles import slices
from tvr_lightning.training.losses import LogitMap, info_nce, positive_weights


class GAIDHead(RegionHead):
    """Cosines (N, M) of perturbed texts and the videos that are fused and pooled for the texts."""

    def __init__(self, dimension: int, frames: int, options: GAIDOptions) -> None:
        fusion, perturbation = options.fusion, options.perturbation
        # STP uses the deviation of every pair in each trial; DASP's is computed when needed.
        extra = 4 * dimension if isinstance(perturbation, STP) else 8 * frames
        vectors = 2 if isinstance(fusion, GatedFusion) else 1
        super().__init__(dimension, frames, options.attention, basis=vectors, extra=extra)
        self.options = options
        self.gate = Gate(dimension, fusion) if isinstance(fusion, GatedFusion) else None
        self.radius = None if isinstance(perturbation, NoPerturbation) else Radius(frames, dimension)
        self.alpha = nn.Parameter(torch.tensor([0.5])) if isinstance(perturbation, DASP) else None
        if self.gate is not None:
            self.trains_paired = self.gate.text == "paired"
            if self.gate.of_pairs:  # every pair then has separate frames
                self.basis = dimension
                self.extra = extra + 6 * dimension * frames

    @override
    def score(self, text: Query, video: VideoFeatures, draws: Tensor | None = None) -> Scores:
        fused = self.fused(text.sentence, video)  # Eqs. 1-2
        if draws is not None:  # Eq. 3 for each of STP's samples (K, D), of which the best counts
            return Scores(self.trials(text, video, fused, draws)[0].amax(1).T)
        pooled = self.pooled(text, video, fused)  # z: cross-attention of the text and the fused frames
        sentence = self.normalized(text.sentence)
        if self.radius is None:
            return Scores(pooled.unit().dot(unit(sentence).unsqueeze(1))[:, :, 0, 0].T)
        cosines = fused.cosine(text.sentence)  # (m, n, F)
        return Scores(self.perturbed_cosines(sentence, cosines, video.frame_mask, pooled.unit().joined()).T)

    def perturbed_cosines(self, sentence: Tensor, cosines: Tensor, frame_mask: Tensor, pooled: Pairwise) -> Tensor:
        """Return cosines (M, N) of moved texts (Eq. 5) and videos `pooled` for them, at unit length.

        Texts (N, D) are moved by their cosines (M, N, F) with the frames, which have a mask (M, F).
        """
        rows = []
        # The moved texts (m, n, D) of a tile fit into a cache.
        for videos in slices(len(cosines), sentence.numel(), sentence.device):
            row = []
            for texts in slices(len(sentence), (videos.stop - videos.start) * self.dimension, sentence.device):
                std = self.std(cosines[videos, texts], frame_mask[videos, None])
                moved = DensePairVectors(self.perturbed(sentence[texts], std).unsqueeze(2))
                row.append(pooled[videos, texts, :].inner(moved) / moved.norm())
            rows.append(torch.cat(row, dim=1))
        return torch.cat(rows)[..., 0]

    @override
    def fused(self, text: Tensor, video: VideoFeatures, paired: bool = False) -> PairFrames:
        # Fused frames of every pair, or of every video with its paired text (M, D) (Eqs. 1-2).
        if self.gate is None or video.audio is None:
            return super().fused(text, video)
        gate = self.gate(video, text, paired)  # Eq. 1
        away = video.audio - video.frames  # Eq. 2: g a + (1 - g) v
        if paired or self.gate.text == "none":
            return PlainFrames(video.frames + gate * away)
        if self.gate.of_pairs:
            return DenseFrames(video.frames.unsqueeze(1) + gate * away.unsqueeze(1))
        return BlendedFrames([(None, video.frames), (gate, away)])

    @override
    def normalized(self, text: Tensor) -> Tensor:
        # Unchanged (released), or at unit length (paper).
        return unit(text) if self.options.normalize_text else text

    @override
    def perturbed(self, text: Tensor, std: Tensor, sigma: Tensor | None = None) -> Tensor:
        if self.alpha is None:
            return super().perturbed(text, std, sigma)  # Eq. 3
        if sigma is None:  # inference
            return torch.addcmul(text, self.alpha, std)  # Eq. 5: t + alpha std
        return torch.addcmul(text, 1 + self.alpha * (sigma - 1), std)  # Eq. 4: t + (alpha sigma + 1 - alpha) std


class Gate(nn.Module):
    """Gate of the audio in each frame: g = sigmoid(W_g [v; a; t] + b_g) (Eq. 1)."""

    def __init__(self, dimension: int, options: GatedFusion) -> None:
        super().__init__()
        self.dimension = dimension
        self.level = options.level
        self.text = options.text
        self.of_pairs = self.text != "none" and self.level == "token"
        parts = 2 if self.text == "none" else 3
        values = dimension if self.level == "token" else 1
        self.linear = nn.Linear(parts * dimension, values)

    def forward(self, video: VideoFeatures, text: Tensor, paired: bool = False) -> Tensor:
        """Return g of every pair for texts (N, D): (M, F, N), or (M, N, F, D) for tokens.

        Without texts, and with `paired` texts (M, D), one per video, g depends on the video only: (M, F or 1, E).
        """
        # https://github.com/YangBowenn/GAID/blob/21ee64cd8662f697eaa0bfaa03d8133e8bf9905b/model/clip_stochastic.py#L78-L82
        logits = self.of_video(video)
        if self.text == "none":
            return logits.sigmoid()
        by_text = self.of_text(text)
        if paired:
            return (logits + by_text.unsqueeze(1)).sigmoid()
        if self.of_pairs:
            return (logits.unsqueeze(1) + by_text.unsqueeze(1)).sigmoid()
        return (logits + by_text.T).sigmoid().expand(-1, video.frames.shape[1], -1)

    def of_video(self, video: VideoFeatures) -> Tensor:
        """Return the logits of M videos: (M, F, E), or (M, 1, E) for samples. E is 1, or D for tokens."""
        assert video.audio is not None  # checked by the method
        both = torch.cat([video.frames, video.audio], dim=-1)
        if self.level == "sample":
            both = masked_mean(both, video.frame_mask).unsqueeze(1)
        return F.linear(both, self.linear.weight[:, : 2 * self.dimension], self.linear.bias)

    def of_text(self, text: Tensor) -> Tensor:
        """Return the contribution (N, E) of N texts (N, D) to the logits."""
        return F.linear(text, self.linear.weight[:, 2 * self.dimension :])


def branch_losses(
    cosines: Tensor, scale: Tensor, weighting: LossWeighting, contrast: LogitMap | None = None
) -> list[Tensor]:
    """Return L_pert and, with support texts, L_sup, from cosines (1 or 2, B, B), without lambda (Eqs. 8-9)."""
    # https://github.com/YangBowenn/GAID/blob/21ee64cd8662f697eaa0bfaa03d8133e8bf9905b/trainer/trainer_stochastic.py#L62-L78
    weight = pair_weights(cosines[0], weighting)
    logits = scale * cosines
    return [info_nce(contrast(matrix) if contrast else matrix, weight=weight) for matrix in logits]


def pair_weights(similarity: Tensor, weighting: LossWeighting) -> Tensor | None:
    """Return the weights (B,) of the matching pairs in the loss, without gradient; None for equal weights.

    `released` divides each pair's own cosine by their sum; `positive` counts negative ones as 0.
    """
    if weighting == "uniform":
        return None
    if weighting == "released":
        return positive_weights(similarity)
    own = similarity.detach().diagonal().clamp(min=0)
    total = own.sum()
    return torch.where(total > 0, own / total.clamp(min=torch.finfo(own.dtype).tiny), 1 / len(own))
