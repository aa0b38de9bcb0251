"""NCL: Normalized Contrastive Learning for Text-Video Retrieval (Park et al., EMNLP 2022).

A loss and a test-time normalization for any method's scores: Sinkhorn biases a_i for texts and b_j for videos make
every text and every video of a batch equally likely to be retrieved. The paper applies it to CLIP4Clip with mean
pooling, as recipes/ncl.yaml does. There is no public code; this follows the paper, whose equations are in `model.py`.

Deviations:
- Sinkhorn: paper runs it on exp(S) (Fig. 4), which overflows float32 at CLIP's temperature of 0.01; here on logarithms,
  otherwise equal.
- gradient of the biases: paper not stated, Fig. 4 taken literally differentiates them; here constants in the backward
  pass, which is exact at convergence (`detach_biases`).
- scope of the biases: paper a batch; here the whole gathered batch, not each device's part.
- queues: paper the last training queries; here training features, enqueued after each optimizer step, used as far as
  the queue is filled; `bank: training-split` encodes training texts and videos again instead.
- test: paper computes biases from training queries, or from the test queries as an oracle (Table 5); here either or
  none, selected by `evaluation.normalization`, with the four iterations and the learned temperature of training.
- gradient of the loss: paper Eq. 28 misses a factor; here, with the temperature,
  dL/db_j = -(1 - sum_i P_t2v(v_j | t_i)) / (2 B gamma).
- optimizer: paper Adam (appendix B); released CLIP4Clip, which it builds on, BertAdam; here as CLIP4Clip (`optimizer`).
- gradient of the gather and precision of its base: released as CLIP4Clip; here as CLIP4Clip here.
- marginals: paper Eqs. 8 and 9 have them exchanged; here rows add up to 1/m, columns to 1/n.
- Support-Set Bottlenecks: paper also applies NCL to it (Table 4); here it is not built, because only the introduction
  of that paper (arXiv 2010.02824) was available; `recipes/tables/ncl-4.yaml` runs NCL on X-CLIP, DRL, and X-Pool.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.evaluation.normalization import Bank
from tvr_lightning.features import PairedFeatures, TextFeatures, VideoFeatures
from tvr_lightning.methods.contrast import ContrastiveLearning, EmptyQueueError, Losses
from tvr_lightning.methods.ncl.model import normalized_logits
from tvr_lightning.methods.ncl.queue import FeatureQueue
from tvr_lightning.option_types import Count, Range, check


class NCL(ContrastiveLearning):
    """Normalized contrastive learning for any method, set as its `contrast`.

    InfoNCE uses the method's logits with Sinkhorn biases, and other loss terms are unchanged. Queues store the last
    training texts and videos for `SinkhornBias` at test time, which recipes set as `evaluation.normalization`.

    Args:
        normalize_loss: whether training uses the biases; false trains the method unchanged and only fills the queues,
            for normalization at test time.
        iterations: number of Sinkhorn iterations in the loss (section 3.3: 4, the default).
        detach_biases: treat the biases as constants in the backward pass (not stated); None is true.
        queue_size: number K of training texts and of training videos to store (section 4.2 and Fig. 5: 16384); 0 stores
            none. A queue contains the inputs of the method's `score`: one vector each for CLIP4Clip, or words and
            frames for methods that use them.
        bank: source of the training queries at test time: the `queue`, or the `training-split`, encoded again with the
            final weights and limited to `evaluation.bank_size`.
    """

    name = "NCL"

    def __init__(
        self,
        normalize_loss: bool = True,
        iterations: Count | None = None,
        detach_biases: bool | None = None,
        queue_size: Annotated[int, Range(at_least=0)] = 16384,
        bank: Literal["queue", "training-split"] = "queue",
    ) -> None:
        super().__init__()
        if not normalize_loss and (iterations is not None or detach_biases is not None):
            raise UserError(
                "normalize_loss: false computes no biases in training. Remove iterations and detach_biases."
            )
        self.normalize_loss = self.needs_all_logits = normalize_loss
        self.iterations = 4 if iterations is None else iterations
        self.detach_biases = detach_biases is not False
        self.queue_size = queue_size
        self.bank_source = bank
        check(self, bank=bank)
        self.remembers = queue_size > 0
        self._asked = False
        self.text_queue = FeatureQueue(queue_size) if queue_size else None
        self.video_queue = FeatureQueue(queue_size) if queue_size else None

    @override
    def forward(self, logits: Tensor, temperature: Callable[[], Tensor]) -> Tensor:
        self._asked = True
        if not self.needs_all_logits:
            return logits
        return normalized_logits(logits, self.iterations, self.detach_biases, temperature())  # section 3.3

    @override
    def terms(self, losses: Losses, pairs: PairedFeatures) -> dict[str, Tensor]:
        self._asked = False
        found = losses(pairs)
        if self.needs_all_logits and not self._asked:
            name = getattr(losses, "__qualname__", "the loss")
            raise UserError(f"{name} passes no logits through contrastive_logits, so NCL cannot normalize them")
        return found

    @override
    def check(self, evaluation: EvaluationConfig) -> None:
        normalizer = evaluation.normalization
        if self.bank_source == "queue" and not self.remembers and normalizer is not None and normalizer.needs_bank:
            raise UserError(
                f"{normalizer.name} needs training queries. Set queue_size above 0, or bank: training-split"
            )

    @override
    def remember(self, text: TextFeatures, video: VideoFeatures) -> None:
        if self.text_queue is not None and self.video_queue is not None:  # section 3.4
            self.text_queue.push(text)
            self.video_queue.push(video)

    @override
    def bank(self) -> Bank | None:
        if self.bank_source == "training-split":
            return None
        if self.text_queue is None or self.video_queue is None or not len(self.text_queue):
            raise EmptyQueueError(
                "NCL's queues of training queries are empty. Train first, test the checkpoint of a run, or set "
                "model.init_args.contrast.init_args.bank to training-split."
            )
        return Bank(self.text_queue.records(TextFeatures), self.video_queue.records(VideoFeatures))

    @override
    def make_room(self, checkpoint: dict[str, Any], prefix: str, path: str | Path | None) -> None:
        if not self.remembers:
            return
        # ModelParallelStrategy has loaded the weights, but no new buffers, which are then read from the file.
        loaded = "state_dict" not in checkpoint
        saved = torch.load(str(path), map_location="cpu", mmap=True, weights_only=True) if loaded else checkpoint
        weights = saved["state_dict"]
        for name, queue in (("text_queue.", self.text_queue), ("video_queue.", self.video_queue)):
            assert queue is not None
            start = prefix + name
            if loaded:
                own = {key.removeprefix(start): value for key, value in weights.items() if key.startswith(start)}
                queue.load_state_dict(own)
            else:
                queue.adopt(weights, start)
