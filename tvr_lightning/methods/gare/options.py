"""The switches of GARE: what the paper varies, and where its wording and its released code differ."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Side = Literal["text", "video"]
PairwiseForm = Literal["auto", "factorised", "dense"]


@dataclass
class PoolingConfig:
    """How the frames of a video become the vector that a text is compared with.

    Attributes:
        kind: `text` weighs the frames by their inner product with the text (released); `mean` is the paper's wording.
        temperature: what the inner products are divided by (released script: 3); None is 3, and only `text` has one.
    """

    kind: Literal["text", "mean"] = "text"
    temperature: float | None = None


@dataclass
class IncrementConfig:
    """The increment of every pair and where it goes (Eq. 7, Tables 4, 5 and 7).

    Attributes:
        corrected: the side that the increment is added to: t + increment, or the pooled video + increment.
        context: what psi attends to: `frames` (V_frame) or `words` (T_word).
        sign: eta; 1 asks with the gap v - t, -1 with t - v.
        query: `gap`, or `text`: psi reads t instead, the increment points along v - psi(t, V), and its length is
            exp(linear(cosines of t with the frames)) (Table 5, "no gap").
        dropout: inside psi, in training. Above 0, training builds every increment, block by block.
        mask_context: leave padding out of what psi attends to; by default padded words only, as padded frames are
            attended to in the released code.
    """

    corrected: Side = "text"
    context: Literal["frames", "words"] = "frames"
    sign: Literal[1, -1] = 1
    query: Literal["gap", "text"] = "gap"
    dropout: float = 0.3
    mask_context: bool | None = None


@dataclass
class BottleneckConfig:
    """Relaxed information bottleneck (Eq. 15, Tables 6 and 9).

    Attributes:
        weight: beta; 0 leaves the term out.
        anchor: each `video` has a Gaussian over the batch's texts, or each `text` one over the batch's videos.
        prior: standard deviation of the prior.
        normalize: whether increments are brought to unit length before.
        reduction: `sum` over D (released; weight 1e-4) or `mean` (paper; weight 0.07).
    """

    weight: float = 1e-4
    anchor: Side = "video"
    prior: float = 1.0
    normalize: bool = False
    reduction: Literal["sum", "mean"] = "sum"


@dataclass
class NormVarianceConfig:
    """Regularization of the lengths of the increments, the trust-region radii (Eq. 10, appendix C.3).

    Attributes:
        weight: lambda_eps; 0 leaves the term out.
        kind: minus the `variance`, or its smooth `log-sum-exp` form.
        floor: lambda, above which variance is not rewarded; None is 0.5, and only `variance` has one.
    """

    weight: float = 0.01
    kind: Literal["variance", "log-sum-exp"] = "variance"
    floor: float | None = None


@dataclass
class DirectionConfig:
    """Regularization of the directions of the increments (Eq. 11, appendix C.2).

    Attributes:
        weight: lambda_dir; 0 leaves the term out.
        kind: `log-mean-exp` of all pairs of directions, or `orthogonal`.
        alpha: scale of the former; None is 2, and only `log-mean-exp` has one.
    """

    weight: float = 0.01
    kind: Literal["log-mean-exp", "orthogonal"] = "log-mean-exp"
    alpha: float | None = None


@dataclass
class GAREConfig:
    """Switches of the head under the names of the arguments of `GARE`, which says what they mean.

    Raises:
        ValueError: a value out of range, or options of which one makes another senseless.
    """

    pooling: PoolingConfig = field(default_factory=PoolingConfig)
    use_increment: bool = True
    increment: IncrementConfig = field(default_factory=IncrementConfig)
    bottleneck: BottleneckConfig = field(default_factory=BottleneckConfig)
    norm_variance: NormVarianceConfig = field(default_factory=NormVarianceConfig)
    direction: DirectionConfig = field(default_factory=DirectionConfig)
    mask_frames: bool = False
    form: PairwiseForm = "auto"
    memory_budget: int | None = None

    def __post_init__(self) -> None:
        self._check_ranges()
        increment = self.increment
        if self.pooling.kind == "mean" and self.pooling.temperature is not None:
            raise ValueError("pooling.kind: mean has no temperature; drop pooling.temperature or use kind: text")
        if self.norm_variance.kind != "variance" and self.norm_variance.floor is not None:
            raise ValueError("norm_variance.kind: log-sum-exp has no floor; drop norm_variance.floor or use variance")
        if self.direction.kind != "log-mean-exp" and self.direction.alpha is not None:
            raise ValueError("direction.kind: orthogonal has no alpha; drop direction.alpha or use log-mean-exp")
        if increment.query == "text":
            for name, value, needed in (
                ("corrected", increment.corrected, "text"),
                ("context", increment.context, "frames"),
                ("sign", increment.sign, 1),
            ):
                if value != needed:
                    raise ValueError(
                        f"increment.query: text and increment.{name}: {value} conflict: the paper defines the query "
                        f"without gap with {name}: {needed} alone (Table 5)"
                    )
        parts = (increment, self.bottleneck, self.norm_variance, self.direction)
        if not self.use_increment and any(part != type(part)() for part in parts):
            raise ValueError(
                "use_increment is off, so there is nothing to shape: leave increment, bottleneck, norm_variance and "
                "direction at their defaults"
            )
        if self.form == "factorised" and self.use_increment and increment.dropout:
            raise ValueError(
                f"form: factorised never builds the elements that increment.dropout {increment.dropout} would zero: "
                "set increment.dropout to 0, or form to auto"
            )

    def _check_ranges(self) -> None:
        for name in ("bottleneck", "norm_variance", "direction"):
            if getattr(self, name).weight < 0:
                raise ValueError(f"{name}.weight is {getattr(self, name).weight}; it must be at least 0")
        for name, value in (
            ("pooling.temperature", self.pooling.temperature),
            ("bottleneck.prior", self.bottleneck.prior),
            ("norm_variance.floor", self.norm_variance.floor),
            ("direction.alpha", self.direction.alpha),
        ):
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}; it must be above 0")
        if self.increment.sign not in (1, -1):
            raise ValueError(f"increment.sign is {self.increment.sign}; eta is 1 or -1")
        if self.memory_budget is not None and self.memory_budget < 1:
            raise ValueError(f"memory_budget is {self.memory_budget} MiB; it must be at least 1")
