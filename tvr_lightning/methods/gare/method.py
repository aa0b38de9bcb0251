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
- ties, gradient of the gather, precision: released as CLIP4Clip; here as CLIP4Clip here.
- selection: released selects the best test R@1, every 150 steps; here uses the weights of the last step;
  `recipes/variants/select-on-test.yaml` selects as released.
"""

import math
import warnings
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from tvr_lightning.encoders.base import Encoder
from tvr_lightning.features import PairedFeatures, Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.temporal import temporal_transformer
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.gare.increments import Increments
from tvr_lightning.methods.gare.model import GAREHead, directional_diversity, norm_variance, relaxed_bottleneck
from tvr_lightning.methods.gare.options import GAREOptions, NoIncrement
from tvr_lightning.training.losses import info_nce

DIAGNOSED = 32
"""Number of pairs of a batch whose geometry is logged."""


class GARE(RetrievalModule):
    """GARE: a learned increment for each text-video pair, and frames pooled with the text.

    Args:
        encoder: encoder of texts and videos.
        gare: options of GARE.
    """

    def __init__(self, encoder: Encoder, *, gare: GAREOptions | None = None, **shared: Any) -> None:
        super().__init__(encoder, **shared)
        self.options = options = gare or GAREOptions()
        self.reads_padding = () if options.mask_frames and options.increment.words else ("frames",)
        if options.fixed_temperature is not None:
            self.temperature.logit_scale.data.fill_(-math.log(options.fixed_temperature))
            self.temperature.requires_grad_(False)
        self.temporal = temporal_transformer(encoder, options.temporal_layers, self.frames)
        head = GAREHead(encoder.dimension, self.words, self.frames, options)
        self.head = head.within(self.evaluation_config.memory_gib)

    @override
    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        return self.head(text, video)

    @override
    def compact_text(self, text: TextFeatures) -> TextFeatures:
        return text if self.options.increment.words else text.without_words()

    @override
    def losses(self, pairs: PairedFeatures) -> dict[str, Tensor]:
        options = self.options
        bottleneck, lengths, direction = options.bottleneck, options.norm_variance, options.direction
        shaped = not isinstance(options.increment, NoIncrement) and any(
            term.weight for term in (bottleneck, lengths, direction)
        )
        if shaped and len(pairs.text) < 2:
            warnings.warn("GARE: a batch of one pair has no variance, so only InfoNCE is trained on it", stacklevel=2)
            shaped = False
        scores = self.head(pairs.text, pairs.video, shaped)
        terms = {"info_nce": info_nce(self.contrastive_logits(self.temperature() * scores.similarity))}  # Eq. 9
        if not shaped:
            return terms
        # The regularization of Eq. 28
        found = Increments(scores.parts["increment"], bottleneck.axis)
        if bottleneck.weight:
            increment = scores.parts["increment"] if bottleneck.normalize else found
            terms["bottleneck"] = bottleneck.weight * relaxed_bottleneck(increment, bottleneck)
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
