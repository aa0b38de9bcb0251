"""TC-MGC: Text-Conditioned Multi-Grained Contrastive Learning for Text-Video Retrieval (Jing, Yang, Chu, 2025).

The equations are in `model.py`, in the order of section 3 of the paper. Defaults are those of the released code
(JingXiaolun/TC-MGC, modeling_tcmgc.py, module_xpool.py).

Deviations:
- interaction matrices: paper has none (Eqs. 12, 15); released learns G and L; here as released
  (`interaction_matrices`).
- projections: paper has W_Q, W_K, W_V and W_O (Eqs. 2-6); released has none; here as released
  (`attention.projections`).
- temporal encoder: paper 3 layers; released 4; here as released (`temporal_layers`).
- factor in the softmaxes over slots: paper none in Eqs. 18-29, 100 in Table 13; released 100; here 100
  (`softmax_lambda`).
- scale of LSA: paper computes weights from cosines (Eq. 31); released from logits; here as released (`aggregation_on`).
- scale of SDR: paper uses the variance of cosines (Eq. 36); released of logits; here as released
  (`decorrelation.scores`).
- InfoNCE: paper sum of both directions (Eq. 35); released their mean; here as released (`loss_reduction`).
- LSA matrix: paper G x G (Eq. 32); released undefined (`logit_weight`); here the paper's, initialized as the identity.
- padding: released keeps padded words and frames; here as released (`mask_words`, `mask_frames`).
- repeated work: released computes all text-conditioned vectors twice; here once.
- optimizer: paper Adam (section 4.1); released BertAdam; here as released (`optimizer`).
- precision: released trains CLIP's matrices as float16 parameters with float16 moments, so that a rate of 1e-7 moves
  CLIP about 40 times as far as in float32 (benchmarks/results/precision.md); here as released
  (`encoder_precision: float16`), and `recipes/variants/float32.yaml` for bf16 and FSDP.
- undefined switch: released reads `frame_features_conversion_flag`, which is never set; here it is off.
- selection: released selects the best test R@1 of the epochs; here uses the weights of the last step;
  `recipes/variants/tcmgc-select-on-test.yaml` selects as released.
- gradient of the gather: released uses each device's own slice (`gather: own-slice`); here the exact gradient.
- draws of dropout: released draws for every pair; here too, or for every video, whose pairs then lose the same elements
  (`attention.dropout_per: video`).
- ties: released counts a tied query several times; here ranks ties by their expected rank.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from tvr_lightning.encoders.base import Encoder
from tvr_lightning.features import PairedFeatures, Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.temporal import temporal_transformer
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.tcmgc.model import TCMGCHead
from tvr_lightning.methods.tcmgc.options import TCMGCOptions
from tvr_lightning.training.losses import info_nce


class TCMGC(RetrievalModule):
    """TC-MGC: language-video attention, four contrasts, similarity reorganization, ISA, LSA and SDR.

    Args:
        encoder: encoder of texts and videos.
        tcmgc: options of TC-MGC.
        shared: arguments of `RetrievalModule`.

    Raises:
        UserError: Options, sizes, and keep rate conflict.
    """

    def __init__(self, encoder: Encoder, *, tcmgc: TCMGCOptions | None = None, **shared: Any) -> None:
        super().__init__(encoder, **shared)
        self.options = options = tcmgc or TCMGCOptions()
        masked = {"words": options.mask_words, "frames": options.mask_frames}
        self.reads_padding = tuple(part for part, mask in masked.items() if not mask)
        layers = options.temporal_layers
        self.temporal = temporal_transformer(encoder, layers, self.frames) if layers else None
        self.head = TCMGCHead(encoder.dimension, self.words, self.frames, options).within(
            self.evaluation_config.memory_gib
        )

    def encode_video(self, video: VideoFeatures) -> VideoFeatures:
        """Relate the frames (M, F, D) over time (Eq. 1), and keep CLIP's own if they are contrasted."""
        clip_frames = video.frames if self.options.attention is None else None
        frames = video.frames if self.temporal is None else self.temporal(video.frames, video.frame_mask)
        return dataclasses.replace(video, frames=frames, clip_frames=clip_frames)

    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        """Return the aggregated cosines (N, M) of the contrasts, and the contrasts as `parts`."""
        return self.head(text, video, self.temperature())

    def losses(self, pairs: PairedFeatures) -> dict[str, Tensor]:
        """Return InfoNCE and the weighted decorrelation of B matching pairs, scalars (Eqs. 33-37)."""
        scores, scale = self.score(pairs.text, pairs.video), self.temperature()
        logits = self.contrastive_logits(scale * scores.similarity)
        terms = {"info_nce": info_nce(logits, reduction=self.options.loss_reduction)}
        weight = self.options.decorrelation.weight
        if weight:
            terms["decorrelation"] = weight * self.head.decorrelation(scores, scale)
        return terms
