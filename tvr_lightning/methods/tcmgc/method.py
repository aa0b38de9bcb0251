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
- ties, gradient of the gather, precision: released as CLIP4Clip; here as CLIP4Clip here.
- undefined switch: released reads `frame_features_conversion_flag`, which is never set; here it is off.
- selection: released selects the best test R@1 of the epochs; here uses the weights of the last step;
  `recipes/variants/select-on-test.yaml` selects as released.
"""

import dataclasses
from typing import Any

from torch import Tensor
from typing_extensions import override

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
    """

    def __init__(self, encoder: Encoder, *, tcmgc: TCMGCOptions | None = None, **shared: Any) -> None:
        super().__init__(encoder, **shared)
        self.options = options = tcmgc or TCMGCOptions()
        masked = {"words": options.mask_words, "frames": options.mask_frames}
        self.reads_padding = tuple(part for part, mask in masked.items() if not mask)
        self.temporal = temporal_transformer(encoder, options.temporal_layers, self.frames)
        head = TCMGCHead(encoder.dimension, self.words, self.frames, options)
        self.head = head.within(self.evaluation_config.memory_gib)

    @override
    def encode_video(self, video: VideoFeatures) -> VideoFeatures:
        # Without attention, CLIP's own frames are contrasted.
        clip_frames = video.frames if self.options.attention is None else None
        return dataclasses.replace(super().encode_video(video), clip_frames=clip_frames)  # Eq. 1

    @override
    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        return self.head(text, video, self.temperature())

    @override
    def losses(self, pairs: PairedFeatures) -> dict[str, Tensor]:
        scores = self.score(pairs.text, pairs.video)
        scale = self.temperature()
        logits = self.contrastive_logits(scale * scores.similarity)
        terms = {"info_nce": info_nce(logits, reduction=self.options.loss_reduction)}  # Eqs. 33-35
        weight = self.options.decorrelation.weight
        if weight:
            terms["decorrelation"] = weight * self.head.decorrelation(scores, scale)  # Eqs. 36-37
        return terms
