"""DRL: Disentangled Representation Learning for Text-Video Retrieval (Wang et al., 2022).

Weighted token-wise interaction (WTI) of words and frames, and channel decorrelation regularization (CDCR). Follows the
released code (foolwood/DRL, tvr/models/modeling.py).

Deviations:
- padding: released similarities of padded tokens enter the maxima as 0; here as released (`mask_fill: exclude` leaves
  them out).
- off-diagonal weight of CDCR: released 0.06 by default, 0 in its commands; here 0.06, and 0 in the recipes.
- cross-transformer interaction (xti): released an option; here left out.
- ties: released counts a tied query several times; here they are ranked by their expectation.
- gradient of the gather: released each device's own slice (`gather: own-slice`); here the exact one.
- precision: released CLIP in float16 with float32 masters (`encoder_precision: fp16-master`); here float32.
"""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from tvr_lightning.encoders.base import Encoder
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.features import PairedFeatures, Record, Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import COSINE_EPS, unit
from tvr_lightning.layers.pooling import masked_mean
from tvr_lightning.layers.temporal import TemporalLSTM, temporal_transformer
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.contrast import ContrastiveLearning
from tvr_lightning.pairwise import score_in_blocks
from tvr_lightning.training.distributed import Gather
from tvr_lightning.training.losses import info_nce
from tvr_lightning.training.optim import OptimizerConfig

Interaction = Literal["wti", "ti", "dp"]
MaskFill = Literal["zero", "exclude"]
TemporalEncoder = Literal["none", "seqLSTM", "seqTransf"]
DecorrelationTokens = Literal["none", "random", "matched", "weighted"]


@dataclass
class ChannelDecorrelation:
    """Channel decorrelation regularization (CDCR): correlations of the channels of matching words and frames.

    Attributes:
        tokens: which tokens are correlated. `random`: one of each text and one of each video (released: cdcr 1).
            `matched`: every word with its best frame, every frame with its best word (cdcr 2). `weighted`: these,
            weighted as in WTI (cdcr 3, the default there). `none` leaves the term out.
        weight: lambda, of the whole term (released: 0.001).
        on_diagonal: a1, of sum_k (C_kk - 1)^2 (published commands: 0.11 to 0.16).
        off_diagonal: a2, of the sum of the other C_kl^2 (argument default 0.06; published commands: 0).

    Raises:
        ValueError: a negative weight.
    """

    tokens: DecorrelationTokens = "weighted"
    weight: float = 0.001
    on_diagonal: float = 1.0
    off_diagonal: float = 0.06

    def __post_init__(self) -> None:
        if self.tokens not in get_args(DecorrelationTokens):
            raise ValueError(
                f"decorrelation.tokens is {self.tokens!r}; expected one of {', '.join(get_args(DecorrelationTokens))}"
            )
        if min(self.weight, self.on_diagonal, self.off_diagonal) < 0:
            raise ValueError(
                f"decorrelation.weight ({self.weight}), on_diagonal ({self.on_diagonal}) and off_diagonal "
                f"({self.off_diagonal}) must be at least 0"
            )


@dataclass
class PreparedTokens(Record):
    """Tokens of texts or videos as the interactions read them.

    Attributes:
        tokens: (B, T, D) unit vectors.
        mask: (B, T) bool, True where there is a token.
        weights: (B, T) weights that add up to 1 over the real tokens.
    """

    tokens: Tensor
    mask: Tensor
    weights: Tensor


def standardized(tokens: Tensor) -> Tensor:
    """Return tokens (T, D) with mean 0 and unbiased variance 1 over the tokens, channel by channel."""
    centred = tokens - tokens.mean(0)
    return centred / tokens.std(0).clamp(min=COSINE_EPS)


def channel_correlation(first: Tensor, second: Tensor, weights: Tensor | None = None) -> Tensor:
    """Correlation of every channel of some tokens with every channel of their partners (DRL, CDCR).

    Args:
        first, second: (T, D) tokens and their partners.
        weights: (T,) weight of each pair; 1 / T where it is not given.

    Returns:
        (D, D).
    """
    left = standardized(first)
    left = left / len(first) if weights is None else left * weights[:, None]
    return left.T @ standardized(second)


def decorrelation_sums(correlation: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum_k (C_kk - 1)^2 and the sum of C_kl^2 over k != l, of a (D, D) correlation."""
    diagonal = correlation.diagonal()
    return (diagonal - 1).square().sum(), correlation.square().sum() - diagonal.square().sum()


def token_weights(dimension: int, layers: int) -> nn.Module:
    """Build the network from a token (D,) to its unnormalised weight (1,), 1 to 3 linear layers with ReLU between."""
    linear: list[nn.Module] = [nn.Linear(dimension, dimension) for _ in range(layers - 1)]
    linear.append(nn.Linear(dimension, 1))
    for layer in linear:
        assert isinstance(layer, nn.Linear)
        nn.init.normal_(layer.weight, std=0.02)
        nn.init.zeros_(layer.bias)
    if layers == 1:
        return linear[0]
    modules = [module for layer in linear for module in (layer, nn.ReLU())]
    return nn.Sequential(*modules[:-1])


class DRLHead(nn.Module):
    """Words and frames to scores, and channel decorrelation of matching ones.

    Args:
        dimension: D.
        interaction: `wti` weighs the best match of every token by a learnt weight, `ti` takes their plain mean, `dp` is
            the cosine of the last word with the pooled frames.
        weight_layers: linear layers of the weighting networks, 1 to 3 (released: wti_arch).
        mask_fill: what padded tokens enter the maxima with, 0 as released or not at all.
    """

    def __init__(
        self, dimension: int, interaction: Interaction = "wti", weight_layers: int = 2, mask_fill: MaskFill = "zero"
    ) -> None:
        super().__init__()
        self.interaction = interaction
        self.mask_fill = mask_fill
        if interaction == "wti":
            self.word_weights = token_weights(dimension, weight_layers)
            self.frame_weights = token_weights(dimension, weight_layers)

    def prepare_words(self, text: TextFeatures) -> PreparedTokens:
        """Return unit words (N, W, D) with their mask and weights (N, W)."""
        network = self.word_weights if self.interaction == "wti" else None
        return _prepared(text.words, text.word_mask.bool(), network)

    def prepare_frames(self, video: VideoFeatures) -> PreparedTokens:
        """Return unit frames (M, F, D) with their mask and weights (M, F)."""
        network = self.frame_weights if self.interaction == "wti" else None
        return _prepared(video.frames, video.frame_mask.bool(), network)

    def forward(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        """Score N texts against M videos, block by block.

        Args:
            text: words (N, W, D) with their mask.
            video: frames (M, F, D) with their mask.

        Returns:
            `similarity` (N, M) on the scale of a cosine.
        """
        words, frames = self.prepare_words(text), self.prepare_frames(video)
        if self.interaction == "dp":
            last = (words.mask.sum(1) - 1).clamp(min=0)
            sentence = words.tokens[torch.arange(len(words), device=last.device), last]
            return Scores(sentence @ unit(masked_mean(frames.tokens, frames.mask)).T)
        # The similarities themselves, and masked copies of them in either direction.
        pair_bytes = 4 * words.tokens.element_size() * words.mask.shape[1] * frames.mask.shape[1]
        budget = 2**20 * (64 if words.tokens.device.type == "cpu" else 1024)
        return score_in_blocks(self._score_block, words, frames, pair_bytes, budget)

    def _score_block(self, words: PreparedTokens, frames: PreparedTokens) -> Scores:
        similarity = torch.einsum("nwd,mfd->nmwf", words.tokens, frames.tokens)
        word_mask, frame_mask = words.mask[:, None, :, None], frames.mask[None, :, None, :]
        of_words = self._best(similarity, word_mask, frame_mask, 3)  # (n, m, W)
        of_frames = self._best(similarity, frame_mask, word_mask, 2)  # (n, m, F)
        text_to_video = torch.einsum("nmw,nw->nm", of_words, words.weights)
        video_to_text = torch.einsum("nmf,mf->nm", of_frames, frames.weights)
        return Scores((text_to_video + video_to_text) / 2)

    def _best(self, similarity: Tensor, own: Tensor, others: Tensor, dim: int) -> Tensor:
        """Largest similarity over the other side's tokens along `dim`; 0 for tokens that are not there."""
        if self.mask_fill == "zero":
            return similarity.masked_fill(~(own & others), 0.0).amax(dim)
        best = similarity.masked_fill(~others, -torch.inf).amax(dim)
        there = (own & others).any(dim)
        return torch.where(there, best, 0.0)

    def correlations(self, text: TextFeatures, video: VideoFeatures, tokens: DecorrelationTokens) -> Tensor | None:
        """Channel correlation (D, D) of B matching texts and videos; None with too few tokens for a variance.

        Args:
            text, video: B texts and their B videos.
            tokens: which tokens are correlated, see `ChannelDecorrelation`.
        """
        words, frames = self.prepare_words(text), self.prepare_frames(video)
        if tokens == "random":
            return self.token_correlation(words, frames, _random_token(words.mask), _random_token(frames.mask))
        if min(int(words.mask.sum()), int(frames.mask.sum())) < 2:
            return None
        similarity = torch.einsum("bwd,bfd->bwf", words.tokens, frames.tokens)
        both = words.mask[:, :, None] & frames.mask[:, None, :]
        similarity = similarity.masked_fill(~both, 0.0 if self.mask_fill == "zero" else -torch.inf)
        return (
            _matched(words, frames, similarity.argmax(2), tokens)
            + _matched(frames, words, similarity.argmax(1), tokens)
        ) / 2

    def token_correlation(
        self, words: PreparedTokens, frames: PreparedTokens, word: Tensor, frame: Tensor
    ) -> Tensor | None:
        """Channel correlation (D, D) of one `word` (B,) and one `frame` (B,) of every pair; None for B < 2."""
        if len(words) < 2:
            return None
        row = torch.arange(len(words), device=word.device)
        return channel_correlation(words.tokens[row, word], frames.tokens[row, frame])


def _prepared(tokens: Tensor, mask: Tensor, network: nn.Module | None) -> PreparedTokens:
    """Weights from the tokens as they are, before they are brought to unit length; evenly without a network."""
    logits = tokens.new_zeros(mask.shape) if network is None else network(tokens).squeeze(-1)
    # The smallest number instead of minus infinity: an item without tokens must not turn into NaN.
    weights = logits.masked_fill(~mask, torch.finfo(logits.dtype).min).softmax(-1)
    return PreparedTokens(unit(tokens), mask, weights)


def _random_token(mask: Tensor) -> Tensor:
    """Draw the position (B,) of one real token per item."""
    return torch.multinomial(mask.float() + 1e-12, 1).squeeze(1)


def _matched(own: PreparedTokens, others: PreparedTokens, best: Tensor, tokens: DecorrelationTokens) -> Tensor:
    """Correlation of every real token with the token of the other side at `best` (B, T) of the same pair."""
    partners = others.tokens.gather(1, best[..., None].expand(-1, -1, own.tokens.shape[-1]))
    weights = own.weights[own.mask] / len(own) if tokens == "weighted" else None
    return channel_correlation(own.tokens[own.mask], partners[own.mask], weights)


class DRL(RetrievalModule):
    """DRL: weighted token-wise interaction with channel decorrelation.

    Args:
        encoder: media to features.
        optimizer: optimiser, learning rates, schedule.
        evaluation: how scores become a table.
        words: text positions W, SOT and EOT included.
        frames: frames F per video.
        gather: which negatives and which gradient several devices give.
        contrast: what else the contrastive loss does with logits.
        interaction: `wti`, `ti` (token-wise without weights) or `dp` (dot product of sentence and pooled video).
        weight_layers: linear layers of WTI's weighting networks, 1 to 3 (released: wti_arch 2); None is 2.
        mask_fill: padded tokens enter the maxima as `zero` (released), or `exclude` leaves them out; None is zero.
        temporal_encoder: of the frames before the interaction (released: agg_module).
        temporal_layers: blocks of seqTransf (released: 4) or layers of seqLSTM (released: 1).
        decorrelation: channel decorrelation; None is the released default with `wti` and none otherwise.

    Raises:
        ValueError: a value out of range, or an option that the interaction does not use.
    """

    def __init__(
        self,
        encoder: Encoder,
        optimizer: OptimizerConfig | None = None,
        evaluation: EvaluationConfig | None = None,
        words: int = 32,
        frames: int = 12,
        gather: Gather = "global",
        contrast: ContrastiveLearning | None = None,
        interaction: Interaction = "wti",
        weight_layers: int | None = None,
        mask_fill: MaskFill | None = None,
        temporal_encoder: TemporalEncoder = "seqTransf",
        temporal_layers: int | None = None,
        decorrelation: ChannelDecorrelation | None = None,
    ) -> None:
        super().__init__(encoder, optimizer, evaluation, words, frames, gather, contrast)
        self._check(interaction, weight_layers, mask_fill, temporal_encoder, temporal_layers, decorrelation)
        self.temporal: nn.Module | None = None
        if temporal_encoder == "seqTransf":
            self.temporal = temporal_transformer(encoder, temporal_layers or 4, frames)
        elif temporal_encoder == "seqLSTM":
            self.temporal = TemporalLSTM(encoder.dimension, layers=temporal_layers or 1)
        if decorrelation is None:
            decorrelation = ChannelDecorrelation("weighted" if interaction == "wti" else "none")
        self.decorrelation = decorrelation
        self.reads_padding = ("words", "frames") if interaction != "dp" and mask_fill != "exclude" else ()
        self.head = DRLHead(encoder.dimension, interaction, weight_layers or 2, mask_fill or "zero")

    @staticmethod
    def _check(
        interaction: Interaction,
        weight_layers: int | None,
        mask_fill: MaskFill | None,
        temporal_encoder: TemporalEncoder,
        temporal_layers: int | None,
        decorrelation: ChannelDecorrelation | None,
    ) -> None:
        for name, value, choices in (
            ("interaction", interaction, get_args(Interaction)),
            ("mask_fill", mask_fill or "zero", get_args(MaskFill)),
            ("temporal_encoder", temporal_encoder, get_args(TemporalEncoder)),
        ):
            if value not in choices:
                raise ValueError(f"{name} is {value!r}; expected one of {', '.join(choices)}")
        if weight_layers is not None and (interaction != "wti" or not 1 <= weight_layers <= 3):
            raise ValueError(f"weight_layers is {weight_layers} with interaction {interaction}; 1 to 3, with wti only")
        if interaction == "dp" and mask_fill is not None:
            raise ValueError("interaction: dp takes no maxima over tokens; drop mask_fill, or use wti or ti")
        if temporal_layers is not None and (temporal_encoder == "none" or temporal_layers < 1):
            raise ValueError(
                f"temporal_layers is {temporal_layers} with temporal_encoder {temporal_encoder}; expected at least 1, "
                "with seqTransf or seqLSTM only"
            )
        if decorrelation is not None and decorrelation.tokens == "weighted" and interaction != "wti":
            raise ValueError(
                f"decorrelation.tokens: weighted needs WTI's weights, which interaction {interaction} has not; "
                "choose matched, random or none"
            )

    def encode_video(self, video: VideoFeatures) -> VideoFeatures:
        """Relate the frames (M, F, D) over time."""
        if self.temporal is None:
            return video
        return dataclasses.replace(video, frames=self.temporal(video.frames, video.frame_mask))

    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        """Score any N texts against any M videos; `similarity` (N, M) is on the scale of a cosine."""
        return self.head(text, video)

    def losses(self, pairs: PairedFeatures) -> dict[str, Tensor]:
        """Return scalars: InfoNCE and the weighted channel decorrelation of B matching pairs.

        With fewer than two tokens there is no variance to standardise by: decorrelation is left out, with a warning.
        """
        similarity = self.score(pairs.text, pairs.video).similarity
        terms = {"info_nce": info_nce(self.contrastive_logits(self.temperature() * similarity))}
        config = self.decorrelation
        if config.tokens == "none" or config.weight == 0:
            return terms
        correlation = self.head.correlations(pairs.text, pairs.video, config.tokens)
        if correlation is None:
            warnings.warn("DRL: too few tokens for a variance; decorrelation is left out of this step", stacklevel=2)
            return terms
        on_diagonal, off_diagonal = decorrelation_sums(correlation)
        weighted = config.on_diagonal * on_diagonal + config.off_diagonal * off_diagonal
        return terms | {"decorrelation": config.weight * weighted}
