"""GARE: Rebalancing Contrastive Alignment with Bottlenecked Semantic Increments in Text-Video Retrieval (Xiao, 2025).

The equations are in `model.py`, in the order of section 2 of the paper. Defaults are those of the released code
(musicman217/GARE-text-video-retrieval, tvr/models/modeling.py and psi_module.py).

Deviations:
- pooling: paper uses the mean of the frames as the video side of the cosine; released uses their mean weighted by
  softmax(t . V / 3); here as released (`pooling`).
- mean of the frames in the gap: released counts padded frames; here as released (`mask_frames`).
- information bottleneck: paper 0.07 times the mean over D; released 1e-4 times the sum; here as released
  (`bottleneck`).
- norm variance below its floor: paper -lambda; released 0; here 0 (the gradient is zero either way).
- temperature: paper 0.01; released learns CLIP's, at most 100; here as released (`fixed_temperature`).
- optimizer: paper Adam (section 3.1) and AdamW (appendix H.5); released BertAdam; here as released (`optimizer`).
- augmentation: paper mentions none; released RandAugment; here as released (`data.init_args.augmentation`).
- corrected videos, words as context, the query without gap: paper has them in Tables 4, 5 and 7; released does not;
  here options, including choices for what the paper leaves open.
- schedule on ActivityNet: released plans 5 epochs (`t_total`) and trains 10, so that the cosine rises again and ends at
  the peak rate; here as released (`schedule_epochs: 5` in the recipe; null in
  `recipes/variants/gare-activitynet-paper.yaml`).
- temporal transformer on MSVD: paper mentions no exception; released uses none; here as released (`temporal_layers: 0`
  in the recipe).
- precision: released trains CLIP's matrices as float16 parameters with float16 moments, so that a rate of 1e-7 moves
  CLIP about 40 times as far as in float32 (benchmarks/results/precision.md); here as released
  (`encoder_precision: float16`), and `recipes/variants/float32.yaml` for bf16 and FSDP.
- selection: released selects the best test R@1, every 150 steps; here uses the weights of the last step;
  `recipes/variants/gare-select-on-test.yaml` selects as released.
- gradient of the gather: released uses each device's own slice (`gather: own-slice`); here the exact gradient.
- draws of dropout: released draws for every pair; here too, or for every video, whose pairs then lose the same elements
  (`increment.dropout_per: video`).
- ties: released counts a tied query several times; here ranks ties by their expected rank.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import torch
from torch import Tensor

from tvr_lightning.encoders.base import Encoder
from tvr_lightning.features import PairedFeatures, Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.temporal import temporal_transformer
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.gare.increments import Increments
from tvr_lightning.methods.gare.model import (
    GAREHead,
    anchored,
    directional_diversity,
    norm_variance,
    relaxed_bottleneck,
)
from tvr_lightning.methods.gare.options import GAREOptions, NoIncrement
from tvr_lightning.training.losses import info_nce

DIAGNOSED = 32
"""Number of pairs of a batch whose geometry is logged."""


class GARE(RetrievalModule):
    """GARE: a learned increment for each text-video pair, and frames pooled with the text.

    Args:
        encoder: encoder of texts and videos.
        gare: options of GARE.
        shared: arguments of `RetrievalModule`.
    """

    def __init__(self, encoder: Encoder, *, gare: GAREOptions | None = None, **shared: Any) -> None:
        super().__init__(encoder, **shared)
        self.options = options = gare or GAREOptions()
        self.reads_padding = () if options.mask_frames else ("frames",)
        if options.fixed_temperature is not None:
            self.temperature.logit_scale.data.fill_(-math.log(options.fixed_temperature))
            self.temperature.requires_grad_(False)
        layers = options.temporal_layers
        self.temporal = temporal_transformer(encoder, layers, self.frames) if layers else None
        self.head = GAREHead(encoder.dimension, self.words, self.frames, options).within(
            self.evaluation_config.memory_gib
        )

    def encode_video(self, video: VideoFeatures) -> VideoFeatures:
        """Relate the frames (M, F, D) over time, unless there are no temporal layers."""
        if self.temporal is None:
            return video
        return dataclasses.replace(video, frames=self.temporal(video.frames, video.frame_mask))

    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        """Return cosines (N, M) of corrected texts and pooled videos, or of texts and corrected videos."""
        return self.head(text, video)

    def compact_text(self, text: TextFeatures) -> TextFeatures:
        """Drop the words of N texts unless psi attends to them."""
        return text if self.options.increment.words else text.without_words()

    def losses(self, pairs: PairedFeatures) -> dict[str, Tensor]:
        """Return InfoNCE (Eq. 9) and the weighted regularization of increments (Eq. 28), scalars, for B matching pairs.

        The variances of a single pair are undefined, so their terms are left out, with a warning.
        """
        options = self.options
        bottleneck, lengths, direction = options.bottleneck, options.norm_variance, options.direction
        shaped = not isinstance(options.increment, NoIncrement) and any(
            term.weight for term in (bottleneck, lengths, direction)
        )
        if shaped and len(pairs.text) < 2:
            warnings.warn("GARE: a batch of one pair has no variance, so only InfoNCE is trained on it", stacklevel=2)
            shaped = False
        scores = self.head(pairs.text, pairs.video, shaped)
        terms = {"info_nce": info_nce(self.contrastive_logits(self.temperature() * scores.similarity))}
        if not shaped:
            return terms
        increment = scores.parts["increment"]
        plain = bool(bottleneck.weight) and not bottleneck.normalize
        found = Increments(increment, anchored(bottleneck) if plain else None, bool(lengths.weight or direction.weight))
        if bottleneck.weight:
            terms["bottleneck"] = bottleneck.weight * relaxed_bottleneck(found if plain else increment, bottleneck)
        if lengths.weight:
            terms["norm_variance"] = lengths.weight * norm_variance(found, lengths)
        if direction.weight:
            terms["direction"] = direction.weight * directional_diversity(found, direction)
        return terms

    @torch.no_grad()
    def diagnostics(self, pairs: PairedFeatures) -> dict[str, Tensor]:
        """Return means of the geometry of the increments over some pairs (Fig. 8), matching or not, without dropout."""
        if isinstance(self.options.increment, NoIncrement) or self.options.increment.corrected == "video":
            return {}
        text, video = pairs.text[:DIAGNOSED], pairs.video[:DIAGNOSED]
        own = torch.eye(len(text), dtype=torch.bool, device=self.device)
        self.head.eval()
        found = self.head.geometry(text, video)
        self.head.train()
        kinds = {"matching": own} if len(text) < 2 else {"matching": own, "other": ~own}
        return {f"{name}-{kind}": value[mask].mean() for name, value in found.items() for kind, mask in kinds.items()}
