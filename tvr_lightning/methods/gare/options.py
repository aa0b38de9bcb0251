"""Options of GARE: variants of the paper, and differences between its wording and its released code.

Sources are equations and tables of the paper (Xiao, 2025) and the files of musicman217/GARE-text-video-retrieval.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from typing_extensions import override

from tvr_lightning.errors import UserError
from tvr_lightning.option_types import (
    ConfigVariant,
    Dropout,
    Layers,
    NotNegative,
    Options,
    Positive,
    Range,
    Role,
    variant,
)

Side = Literal["text", "video"]


class Pooling(ConfigVariant):
    """Pooling of the frames of a video to the vector that a text is compared with."""


class TextPooling(Pooling):
    """Weighted mean of the frames, with weights from their inner products with the text (modeling.py).

    Attributes:
        temperature: divisor of the inner products (released script: --temp 3).
    """

    temperature: Positive = 3.0


class MeanPooling(Pooling):
    """Mean of the frames (section 2.1)."""


class Increment(ConfigVariant):
    """Increment that is added to the text or the video of every pair."""

    corrected = "text"
    dropout = 0.0

    @property
    def words(self) -> bool:
        """Whether psi attends to words."""
        return isinstance(self, GapIncrement) and self.context == "words"


class NoIncrement(Increment):
    """No increment: the baseline of Table 3."""


class GapIncrement(Increment):
    """Increment from the gap of video and text, which is the query of psi (Eq. 7).

    Attributes:
        corrected: side that the increment is added to (Table 7).
        context: features that psi attends to, `frames` (V_frame), including padding as in the released code
            (psi_module.py), or `words` (T_word), without padding (Table 4).
        sign: eta; 1 queries with the gap v - t, -1 with t - v (Table 7).
        dropout: dropout rate of the elements inside psi in training (psi_module.py).
    """

    corrected: Side = "text"
    context: Literal["frames", "words"] = "frames"
    sign: Literal[1, -1] = 1
    dropout: Dropout = 0.3


class TextIncrement(Increment):
    """Increment from the text alone, in the direction v - psi(t, V) (Table 5, "no gap").

    Its length is exp(linear(cosines of the text with the frames)).

    Attributes:
        dropout: same as in `GapIncrement`.
    """

    dropout: Dropout = 0.3


@dataclass
class Bottleneck(Options):
    """Relaxed information bottleneck (Eq. 15).

    Attributes:
        weight: beta; 0 omits the term (released: 1e-4; section 3.1: 0.07, for the mean).
        anchor: `video` for a Gaussian per video over the batch's texts, or `text` for one per text over its videos
            (Table 9).
        prior: standard deviation of the prior (Table 6).
        normalize: whether increments are first normalized to unit length (Table 6).
        reduction: `sum` over D (modeling.py), or the `mean` (the paper).
    """

    weight: NotNegative = 1e-4
    anchor: Side = "video"
    prior: Positive = 1.0
    normalize: bool = False
    reduction: Literal["sum", "mean"] = "sum"

    @property
    def axis(self) -> int:
        """Axis of the increments (N, M, D) over which the distribution of an anchor is computed."""
        return 0 if self.anchor == "video" else 1


class Regularization(ConfigVariant):
    """Regularization of the increments.

    Attributes:
        weight: lambda_eps or lambda_dir; 0 omits the term (appendix F; modeling.py).
    """

    weight: NotNegative = 0.01


class NormRegularization(Regularization):
    """Regularization of the spread of the increments' lengths, the trust-region radii."""


class Variance(NormRegularization):
    """Negative variance of the lengths (Eq. 10).

    Attributes:
        weight: lambda_eps; 0 omits the term.
        floor: lambda, the variance above which there is no further reward (Fig. 5; modeling.py).
    """

    floor: Positive = 0.5


class LogSumExp(NormRegularization):
    """Smooth form of the variance (appendix C.3)."""


class DirectionRegularization(Regularization):
    """Regularization of the differences between the directions of a text's increments."""


class LogMeanExp(DirectionRegularization):
    """Logarithm of the mean agreement (Eq. 11).

    Attributes:
        weight: lambda_dir; 0 omits the term.
        alpha: scale of the agreement (Table 8; section 3.1).
    """

    alpha: Positive = 2.0


class Orthogonal(DirectionRegularization):
    """Mean square of the cosines (appendix C.2)."""


@dataclass
class GAREOptions(Options):
    """Options of GARE.

    Attributes:
        temporal_layers: number of blocks of the temporal transformer (section 3.1; main_retrieval.py: 4, on MSVD 0).
        pooling: pooling of the frames to the vector that is compared with a text; `TextPooling` by default.
        increment: increment that is added to the text or the video of a pair; `GapIncrement` by default.
        bottleneck: relaxed information bottleneck (Eq. 15).
        norm_variance: regularization of the increments' lengths (Eq. 10); `Variance` by default.
        direction: regularization of the increments' directions (Eq. 11); `LogMeanExp` by default.
        mask_frames: leave padded frames out of the pooling's softmax and of the mean of the frames. The released code
            removes their weights after the softmax, and counts them in the mean (modeling.py).
        fixed_temperature: fixed value of tau (section 3.1: 0.01); None learns CLIP's (modeling.py).
    """

    temporal_layers: Layers = 4
    pooling: Pooling = variant(TextPooling)
    increment: Increment = variant(GapIncrement)
    bottleneck: Annotated[Bottleneck, Role.TRAINING] = field(default_factory=Bottleneck)
    norm_variance: Annotated[NormRegularization, Role.TRAINING] = variant(Variance)
    direction: Annotated[DirectionRegularization, Role.TRAINING] = variant(LogMeanExp)
    mask_frames: bool = False
    fixed_temperature: Annotated[float, Range(at_least=0.01)] | None = None  # 1 / temperature is kept at or below 100

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        shaping = (self.bottleneck, self.norm_variance, self.direction)
        if isinstance(self.increment, NoIncrement) and shaping != (Bottleneck(), Variance(), LogMeanExp()):
            raise UserError(
                "increment is NoIncrement, so bottleneck, norm_variance, and direction have no effect. Leave them at "
                "their defaults."
            )
