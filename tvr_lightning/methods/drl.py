"""DRL: Disentangled Representation Learning for Text-Video Retrieval (Wang et al., 2022).

Weighted token-wise interaction (WTI) of words and frames, and channel decorrelation regularization (CDCR). Follows the
released code (foolwood/DRL, tvr/models/modeling.py).

Deviations:
- padding: released uses 0 as the similarity of padded tokens in the maxima; here as released (`mask_fill: exclude`
  leaves them out).
- off-diagonal weight of CDCR: released uses 0.06 by default and 0 in its commands; here 0.06, and 0 in the recipes.
- cross-transformer interaction (xti): released has it as an option; here left out.
- ties, gradient of the gather, precision, selection: released as CLIP4Clip; here as CLIP4Clip here.
"""

import warnings
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from tvr_lightning.encoders.base import Encoder
from tvr_lightning.errors import UserError
from tvr_lightning.features import FeatureBatch, PairedFeatures, Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import COSINE_EPS, unit
from tvr_lightning.layers.pooling import masked_mean
from tvr_lightning.layers.temporal import MeanP, SeqTransf, TemporalHeader
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.pair_head import PairHead
from tvr_lightning.option_types import ConfigVariant, NotNegative, Options, Range, Role, variant
from tvr_lightning.pairwise import token_similarities
from tvr_lightning.pairwise.tiles import loops_are_fast

MaskFill = Literal["zero", "exclude"]
DecorrelationTokens = Literal["random", "matched", "weighted"]


class DRLInteraction(ConfigVariant):
    """Interaction of words and frames that gives a score (released: --interaction)."""


class DotProduct(DRLInteraction):
    """Cosine of the last word with the pooled frames (DP)."""


class TokenWise(DRLInteraction):
    """Mean over the best matches of all tokens (TI).

    Attributes:
        mask_fill: value of padded tokens in the maxima: `zero` (released); `exclude` leaves them out.
    """

    mask_fill: MaskFill = "zero"


class MaxSim(TokenWise):
    """Sum over the words of their best matches among the frames, as in multi-vector models (ColBERT).

    Attributes:
        mask_fill: same as in `TokenWise`, but `exclude` by default.
        mean: whether the score is the mean over the words, so that scores of different captions can be compared.
    """

    mask_fill: MaskFill = "exclude"
    mean: bool = False


class WeightedTokenWise(TokenWise):
    """Weighted sum over the best matches of all tokens, with learned weights (WTI).

    Attributes:
        weight_layers: number of linear layers of the weighting networks (released: --wti_arch 2).
        mask_fill: same as in `TokenWise`.
    """

    weight_layers: Annotated[int, Range(at_least=1, at_most=3)] = 2


class DRLDecorrelation(ConfigVariant):
    """Regularization of the channels of matching words and frames in training."""


class NoDecorrelation(DRLDecorrelation):
    """No regularization: InfoNCE alone (released: --cdcr 0)."""


class ChannelDecorrelation(DRLDecorrelation):
    """Channel decorrelation regularization (CDCR): correlations of the channels of matching words and frames.

    Attributes:
        tokens: tokens that are correlated. `random`: one of each text and one of each video (released: --cdcr 1).
            `matched`: every word with its best frame, every frame with its best word (--cdcr 2). `weighted`: the same,
            weighted as in WTI (--cdcr 3, the released default).
        weight: weight lambda of the whole term (released: --cdcr_lambda 0.001); 0 omits it.
        on_diagonal: weight a1 of sum_k (C_kk - 1)^2 (released: --cdcr_alpha1 1; published commands: 0.11 to 0.16).
        off_diagonal: weight a2 of the sum of the other C_kl^2 (released: --cdcr_alpha2 0.06; published commands: 0).
    """

    tokens: DecorrelationTokens = "weighted"
    weight: NotNegative = 0.001
    on_diagonal: NotNegative = 1.0
    off_diagonal: NotNegative = 0.06


@dataclass
class DRLOptions(Options):
    """Options of DRL.

    Attributes:
        interaction: interaction of words and frames: `WeightedTokenWise` by default, `TokenWise`, `MaxSim`, or
            `DotProduct`.
        temporal_encoder: encoder of the frames before the interaction (released: --agg_module), by default `SeqTransf`.
        decorrelation: `ChannelDecorrelation` by default, or `NoDecorrelation`.
    """

    interaction: DRLInteraction = variant(WeightedTokenWise)
    temporal_encoder: TemporalHeader = variant(SeqTransf)
    decorrelation: Annotated[DRLDecorrelation, Role.TRAINING] = variant(ChannelDecorrelation)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        weighted = isinstance(self.decorrelation, ChannelDecorrelation) and self.decorrelation.tokens == "weighted"
        if weighted and not isinstance(self.interaction, WeightedTokenWise):
            raise UserError(
                f"decorrelation.tokens: weighted needs WTI's weights, but {type(self.interaction).__name__} has none. "
                "Choose matched or random, or decorrelation: NoDecorrelation"
            )


@dataclass
class PreparedTokens(FeatureBatch):
    """Prepared tokens of B texts or videos: unit vectors, and weights that add up to 1 over the valid tokens."""

    tokens: Tensor  # (B, T, D)
    mask: Tensor  # (B, T) bool
    weights: Tensor  # (B, T)


def prepared(tokens: Tensor, mask: Tensor, network: nn.Module | None) -> PreparedTokens:
    """Return unit tokens with weights from unnormalized tokens (B, T, D); without a network, weights are uniform."""
    mask = mask.bool()
    logits = tokens.new_zeros(mask.shape) if network is None else network(tokens).squeeze(-1)
    # The lowest finite number, because minus infinity gives NaN for an item without tokens.
    weights = logits.masked_fill(~mask, torch.finfo(logits.dtype).min).softmax(-1)
    return PreparedTokens(unit(tokens), mask, weights)


def token_weights(dimension: int, layers: int) -> nn.Module:
    """Return the network that maps a token (D,) to its unnormalized weight (1,): 1 to 3 linear layers with ReLU."""
    linear = [*(nn.Linear(dimension, dimension) for _ in range(layers - 1)), nn.Linear(dimension, 1)]
    for layer in linear:
        nn.init.normal_(layer.weight, std=0.02)
        nn.init.zeros_(layer.bias)
    modules = [module for layer in linear for module in (layer, nn.ReLU())]
    return linear[0] if layers == 1 else nn.Sequential(*modules[:-1])


class DRLHead(PairHead):
    """Scores (N, M) of words and frames on the scale of a cosine, and channel decorrelation of matching pairs."""

    def __init__(self, dimension: int, interaction: DRLInteraction | None = None) -> None:
        super().__init__(dimension, side="both")
        self.interaction = interaction = interaction or WeightedTokenWise()
        self.fills_zero = not isinstance(interaction, TokenWise) or interaction.mask_fill == "zero"
        self.word_weights: nn.Module | None = None
        self.frame_weights: nn.Module | None = None
        if isinstance(interaction, WeightedTokenWise):
            self.word_weights = token_weights(dimension, interaction.weight_layers)
            self.frame_weights = token_weights(dimension, interaction.weight_layers)

    @override
    def prepare(self, text: TextFeatures, video: VideoFeatures) -> tuple[PreparedTokens, PreparedTokens]:
        words = prepared(text.words, text.word_mask, self.word_weights)
        return words, prepared(video.frames, video.frame_mask, self.frame_weights)

    @override
    def pair_numbers(self, text: PreparedTokens, video: PreparedTokens) -> int:
        # Similarities, and masked copies in both directions.
        return 4 * text.mask.shape[1] * video.mask.shape[1]

    @override
    def score(self, text: PreparedTokens, video: PreparedTokens, *given: Any) -> Scores:
        if not isinstance(self.interaction, TokenWise):
            last = (text.mask.sum(1) - 1).clamp(min=0)
            sentence = text.tokens[torch.arange(len(text), device=last.device), last]
            return Scores(sentence @ unit(masked_mean(video.tokens, video.mask)).T)
        similarity = token_similarities(video.tokens, text.tokens)  # (F, m, W, n)
        word_mask, frame_mask = text.mask.T, video.mask.T[:, :, None, None]
        of_words = self._best(similarity, word_mask, frame_mask, 0)  # (m, W, n)
        if isinstance(self.interaction, MaxSim):
            weights = text.weights if self.interaction.mean else text.mask.to(text.weights)
            return Scores((of_words * weights.T).sum(1).T)
        of_frames = self._best(similarity, frame_mask, word_mask, 2)  # (F, m, n)
        text_to_video = (of_words * text.weights.T).sum(1)
        video_to_text = (of_frames * video.weights.T.unsqueeze(-1)).sum(0)
        return Scores((text_to_video + video_to_text).T / 2)

    def _best(self, similarity: Tensor, own: Tensor, others: Tensor, dim: int) -> Tensor:
        """Return the largest similarity with the other side's tokens along `dim`; 0 for padded tokens."""
        reads = loops_are_fast(own.device) and not torch.is_grad_enabled()  # otherwise, reading waits for the device
        if reads and bool(own.all()) and bool(others.all()):
            return similarity.amax(dim)
        if self.fills_zero:
            return similarity.masked_fill(~(own & others), 0.0).amax(dim)
        best = similarity.masked_fill(~others, -torch.inf).amax(dim)
        return torch.where((own & others).any(dim), best, 0.0)

    def correlations(self, text: TextFeatures, video: VideoFeatures, tokens: DecorrelationTokens) -> Tensor | None:
        """Return the channel correlation (D, D) of B matching pairs, or None for B < 2 with random tokens."""
        words, frames = self.prepare(text, video)
        if tokens == "random":
            return token_correlation(words, frames, _random_token(words.mask), _random_token(frames.mask))
        similarity = torch.einsum("bwd,bfd->bwf", words.tokens, frames.tokens)
        both = words.mask[:, :, None] & frames.mask[:, None, :]
        similarity = similarity.masked_fill(~both, 0.0 if self.fills_zero else -torch.inf)
        weighted = tokens == "weighted"
        of_words = best_correlation(words, frames, similarity.argmax(2), weighted)
        of_frames = best_correlation(frames, words, similarity.argmax(1), weighted)
        return (of_words + of_frames) / 2


def _random_token(mask: Tensor) -> Tensor:
    """Sample the position (B,) of one valid token per item."""
    return torch.multinomial(mask.float() + 1e-12, 1).squeeze(1)


def token_correlation(words: PreparedTokens, frames: PreparedTokens, word: Tensor, frame: Tensor) -> Tensor | None:
    """Return the channel correlation (D, D) of one word (B,) and one frame (B,) per pair, or None for B < 2."""
    if len(words) < 2:
        return None
    row = torch.arange(len(words), device=word.device)
    return channel_correlation(words.tokens[row, word], frames.tokens[row, frame])


def best_correlation(own: PreparedTokens, others: PreparedTokens, best: Tensor, weighted: bool) -> Tensor:
    """Return the channel correlation of valid tokens and their `best` (B, T) tokens of the other side."""
    partners = others.tokens.gather(1, best[..., None].expand(-1, -1, own.tokens.shape[-1]))
    weights = own.weights.flatten() / len(own) if weighted else None
    return channel_correlation(own.tokens.flatten(0, 1), partners.flatten(0, 1), weights, own.mask.flatten())


def channel_correlation(
    first: Tensor, second: Tensor, weights: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """Return the correlation (D, D) of tokens (T, D) and their partners (DRL, CDCR).

    The weights (T,) are by default equal over the tokens in a mask (T,), by default all.
    """
    valid = first.new_ones(len(first), 1) if mask is None else mask.unsqueeze(1).to(first.dtype)
    weight = valid / valid.sum() if weights is None else weights.unsqueeze(1)
    return (standardized(first, valid) * weight).T @ standardized(second, valid)


def standardized(tokens: Tensor, valid: Tensor) -> Tensor:
    """Return tokens (T, D) scaled per channel to mean 0 and unbiased variance 1 over the valid (T, 1); others are 0."""
    count = valid.sum()  # a mask as an index would wait for the device
    centered = (tokens - (tokens * valid).sum(0) / count) * valid
    variance = centered.square().sum(0) / (count - 1).clamp(min=1)
    return centered / variance.clamp(min=COSINE_EPS**2).sqrt()


def decorrelation_sums(correlation: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum_k (C_kk - 1)^2 and the sum of C_kl^2 over k != l for a correlation (D, D)."""
    diagonal = correlation.diagonal()
    return (diagonal - 1).square().sum(), correlation.square().sum() - diagonal.square().sum()


class DRL(RetrievalModule):
    """DRL: weighted token-wise interaction with channel decorrelation.

    Args:
        encoder: encoder of texts and videos.
        drl: options of DRL.
    """

    def __init__(self, encoder: Encoder, *, drl: DRLOptions | None = None, **shared: Any) -> None:
        super().__init__(encoder, **shared)
        self.options = options = drl or DRLOptions()
        self.needs_frames = not isinstance(options.temporal_encoder, MeanP)
        self.temporal = options.temporal_encoder.module(encoder, self.frames)
        self.head = DRLHead(encoder.dimension, options.interaction).within(self.evaluation_config.memory_gib)
        if isinstance(options.interaction, TokenWise) and options.interaction.mask_fill == "zero":
            self.reads_padding = ("words", "frames")

    @override
    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        return self.head(text, video)

    @override
    def losses(self, pairs: PairedFeatures) -> dict[str, Tensor]:
        terms = super().losses(pairs)
        options = self.options.decorrelation
        if not isinstance(options, ChannelDecorrelation) or options.weight == 0:
            return terms
        correlation = self.head.correlations(pairs.text, pairs.video, options.tokens)
        if correlation is None:
            warnings.warn("DRL: too few tokens for a variance; this step omits decorrelation", stacklevel=2)
            return terms
        on_diagonal, off_diagonal = decorrelation_sums(correlation)
        weighted = options.on_diagonal * on_diagonal + options.off_diagonal * off_diagonal
        return terms | {"decorrelation": options.weight * weighted}
