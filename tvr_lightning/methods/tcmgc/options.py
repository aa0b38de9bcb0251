"""The switches of TC-MGC: what the paper varies, and where its wording and its released code differ."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from tvr_lightning.layers.aggregation import SimilarityAggregation
from tvr_lightning.methods.tcmgc.reorganization import Reorganization
from tvr_lightning.training.losses import Reduction

Contrast = Literal["video_sentence", "video_word", "sentence_frame", "frame_word"]
ScoreAggregation = Literal["mean", "softmax", "lsa"]
ScoreScale = Literal["cosines", "logits"]
PairwiseForm = Literal["auto", "factorised", "dense"]


@dataclass
class AttentionConfig:
    """Language-video attention (section 3.2).

    Attributes:
        heads: attention heads (Table 12).
        dropout: on FC in training. Above 0, training builds every vector of every pair, block by block.
        projections: W_Q, W_K, W_V and W_O of Eqs. 2-6, which the released code leaves out.
        residual: around FC (Table 11).
    """

    heads: int = 1
    dropout: float = 0.3
    projections: bool = False
    residual: bool = True


@dataclass
class ReorganizationConfig:
    """What becomes of the similarities that are not kept (section 3.4, Tables 5-8); `off` keeps all.

    Attributes:
        video_word: words of the video-word vector.
        sentence_frame: frame slots of the sentence-frame vector.
        words: words of every frame slot of the frame-word matrix; reorganized first.
        frames: frame slots of every remaining word of the frame-word matrix.
    """

    video_word: Reorganization = "removal"
    sentence_frame: Reorganization = "fusion"
    words: Reorganization = "removal"
    frames: Reorganization = "removal"


@dataclass
class DecorrelationConfig:
    """Similarity decorrelation regularization (Eqs. 36-37, appendix A).

    Attributes:
        weight: alpha; 0 leaves the term out.
        pairs: whose variance is lowered: matching pairs, all others, or both (Table A.1).
        scores: variance of the `cosines` (Eq. 36), or of the `logits` as released, exp(2 logit_scale) times as large.
        unbiased: whether the variance of G scores divides by G - 1 (released) or by G.
    """

    weight: float = 0.5
    pairs: Literal["positives", "negatives", "all"] = "positives"
    scores: ScoreScale = "logits"
    unbiased: bool = True


@dataclass
class TCMGCConfig:
    """Switches of the head under the names of the arguments of `TCMGC`, which says what they mean.

    Raises:
        ValueError: options of which one makes another senseless.
    """

    contrasts: tuple[Contrast, ...] = get_args(Contrast)
    conditioning: bool = True
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    keep_rate: float = 0.1
    reorganization: ReorganizationConfig = field(default_factory=ReorganizationConfig)
    similarity_aggregation: SimilarityAggregation = "isa"
    softmax_lambda: float = 100.0
    aggregation: ScoreAggregation = "lsa"
    aggregation_on: ScoreScale = "logits"
    decorrelation: DecorrelationConfig = field(default_factory=DecorrelationConfig)
    loss_reduction: Reduction = "mean"
    interaction_matrices: bool = True
    mask_frames: bool = False
    mask_words: bool = False
    form: PairwiseForm = "auto"
    memory_budget: int | None = None

    def __post_init__(self) -> None:
        known = get_args(Contrast)
        if not self.contrasts or len(set(self.contrasts)) < len(self.contrasts) or set(self.contrasts) - set(known):
            raise ValueError(f"contrasts is {list(self.contrasts)}; name some of {', '.join(known)}, each once")
        self.contrasts = tuple(name for name in known if name in self.contrasts)
        if self.decorrelation.weight < 0:
            raise ValueError(f"decorrelation.weight is {self.decorrelation.weight}; it must be at least 0")
        if self.decorrelation.weight and len(self.contrasts) == 1:
            raise ValueError(
                f"decorrelation needs two contrasts, the variance of {self.contrasts[0]} alone is undefined: "
                "set decorrelation.weight to 0 or name more contrasts"
            )
        if self.softmax_lambda <= 0:
            raise ValueError(f"softmax_lambda is {self.softmax_lambda}; it must be above 0")
        if self.memory_budget is not None and self.memory_budget < 1:
            raise ValueError(f"memory_budget is {self.memory_budget} MiB; it must be at least 1")
        if not self.conditioning and self.attention != AttentionConfig():
            raise ValueError("conditioning is off, so no attention is built: leave the attention at its defaults")
        if self.form == "factorised" and self.conditioning and self.attention.dropout:
            raise ValueError(
                f"form: factorised never builds the elements that attention.dropout {self.attention.dropout} would "
                "zero: set attention.dropout to 0, or form to auto"
            )
