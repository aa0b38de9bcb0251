"""Options of TC-MGC: variants of the paper, and differences between its wording and its released code.

Sources are equations and tables of the paper (Jing, Yang, Chu, 2025) and the files of JingXiaolun/TC-MGC.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from typing_extensions import override

from tvr_lightning.errors import UserError
from tvr_lightning.layers.aggregation import ISA, Aggregation
from tvr_lightning.methods.checks import distinct
from tvr_lightning.methods.tcmgc.reorganization import Reorganization
from tvr_lightning.methods.xpool import XPoolOptions
from tvr_lightning.option_types import Layers, NotNegative, Options, Range, Role, variant
from tvr_lightning.training.losses import Reduction

Contrast = Literal["video_sentence", "video_word", "sentence_frame", "frame_word"]
ScoreAggregation = Literal["mean", "softmax", "lsa"]
ScoreScale = Literal["cosines", "logits"]


@dataclass
class LanguageVideoAttention(XPoolOptions):
    """Language-video attention (section 3.2), X-Pool's with more options (Table 12 varies its heads; module_xpool.py).

    Attributes:
        projections: use W_Q, W_K, W_V, and W_O of Eqs. 2-6, which the released code omits.
        residual: residual connection around FC (Table 11).
    """

    projections: bool = False
    residual: bool = True


@dataclass
class SlotReorganization(Options):
    """Handling of the similarities that are not kept (section 3.4, Tables 5-8); `off` keeps all.

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
class Decorrelation(Options):
    """Similarity decorrelation regularization (Eqs. 36-37, appendix A).

    Attributes:
        weight: alpha; 0 omits the term.
        pairs: pairs whose variance is reduced: matching pairs, all others, or both (Table A.1).
        scores: scores of the variance: `cosines` (Eq. 36), or `logits` as released, exp(2 logit_scale) times as large.
        unbiased: whether the variance of G scores divides by G - 1 (released) or by G.
    """

    weight: NotNegative = 0.5
    pairs: Literal["positives", "negatives", "all"] = "positives"
    scores: ScoreScale = "logits"
    unbiased: bool = True


@dataclass
class TCMGCOptions(Options):
    """Options of TC-MGC.

    Attributes:
        temporal_layers: number of blocks of the temporal transformer (released: 4, the paper: 3); 0 builds none
            (Table 10).
        contrasts: contrasts to use out of the four (Table 9), always in the paper's order.
        attention: language-video attention; None uses no conditioning on the text: the video is then the mean of its
            unit frames and the frames are CLIP's own, as in X-CLIP (Table 4).
        keep_rate: r, share of the slots that reorganization keeps, k = int(slots r) (Fig. B.1).
        reorganization: handling of the slots that are not kept.
        similarity_aggregation: aggregation over the slots: `ISA` by default (section 3.5), `SoftmaxAggregation` (Table
            4), or `MeanAggregation`. Its softmax_lambda is Table 13's; 1 follows the wording of Eqs. 18-29.
        aggregation: aggregation over the contrasts: `lsa` (Eqs. 31-32), plain `softmax`, or `mean` (Figs. 7-8).
        aggregation_on: scores that determine the weights of the contrasts: `logits` (released) or `cosines` (Eq. 31).
        decorrelation: regularization of the scores (Eqs. 36-37).
        loss_reduction: `mean` (released) or `sum` (Eq. 35) of both directions of InfoNCE.
        interaction_matrices: use the released code's D x D matrices G and L between text and video in the
            video-sentence and frame-word contrasts, which Eqs. 12 and 15 do not have.
        mask_frames: leave padded frames out of attention and contrasts; the released code keeps them.
        mask_words: leave padded words out of the contrasts; the released code keeps them.
    """

    temporal_layers: Layers = 4
    contrasts: tuple[Contrast, ...] = get_args(Contrast)
    attention: LanguageVideoAttention | None = field(default_factory=LanguageVideoAttention)
    keep_rate: Annotated[float, Range(above=0, at_most=1)] = 0.1
    reorganization: SlotReorganization = field(default_factory=SlotReorganization)
    similarity_aggregation: Aggregation = variant(ISA)
    aggregation: ScoreAggregation = "lsa"
    aggregation_on: ScoreScale = "logits"
    decorrelation: Annotated[Decorrelation, Role.TRAINING] = field(default_factory=Decorrelation)
    loss_reduction: Annotated[Reduction, Role.TRAINING] = "mean"
    interaction_matrices: bool = True
    mask_frames: bool = False
    mask_words: bool = False

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.contrasts = distinct("contrasts", self.contrasts, Contrast)
        if self.decorrelation.weight and len(self.contrasts) == 1:
            raise UserError(
                f"decorrelation needs two contrasts, since the variance of {self.contrasts[0]} alone is undefined. "
                "Set decorrelation.weight to 0 or add contrasts."
            )
        coarse = {"video_sentence", "video_word"} & set(self.contrasts)
        if self.temporal_layers and self.attention is None and not coarse:
            raise UserError(
                "Without attention, the frame contrasts use CLIP's frames, so nothing would use the temporal encoder. "
                "Set temporal_layers to 0."
            )
