"""GAID: Frame-Level Gated Audio-Visual Integration with Directional Perturbation (Yang, Cao, He, Su).

Read beside the method section of the paper. Defaults are those of the released code (YangBowenn/GAID,
model/clip_stochastic.py, modules/stochastic_module.py, modules/loss.py) but for its evaluation, which leaks.

Deviations:
- protocol: paper conditions on the query; released fuses AND pools each test video under its OWN caption, so that
  ground truth leaks twice; here both follow the query. `protocol: as-released` is theirs, and its results say "leaks
  ground truth".
- gate: paper conditions on the query; released trains it on the own caption (`gate_text: paired`); here the query's
  gate is trained as it is tested.
- sigma: paper N(0, 1); released U[0, 1); here as released (`prior`).
- text: paper normalised; released not; here as released (`normalize_text`).
- loss: paper plain InfoNCE; released weighted by each pair's own similarity, where a negative one rewards a bad match;
  here as released, but a pair of negative similarity has weight 0 (`loss_weighting`).
- support text: paper "along the variance direction"; released towards the mean of the pooled videos, each dimension as
  far as its radius; here as released.
- temperature: released detaches it, so that it stays CLIP's 100; here as released.
- silence: released feeds zeros, and wav2vec2's projection then adds its bias; here a frame without sound is zero
  behind the projection too.
- audio of other lengths than 30 s: released pads and cuts to 30 s; here `data.init_args.audio_align` decides.
- several captions per video, as released: released fuses under the first caption and pools under that of the query's
  number; here both take the one of the query's number.
- fusion of samples and tokens: paper Table 5; released not; here after the paper's description.
- optimiser: paper Adam (Table 8); released AdamW; here as released (`optimizer`).
- gather: released none; here over all devices (`gather`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tvr_lightning.data.batch import VideoBatch
from tvr_lightning.encoders.audio import AudioEncoder
from tvr_lightning.encoders.base import Encoder
from tvr_lightning.encoders.tiny import TinyClipEncoder
from tvr_lightning.encoders.whisper import TinyWhisperEncoder, WhisperEncoder
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.features import PairedFeatures, Record, Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import COSINE_EPS, unit
from tvr_lightning.layers.gate import Gate
from tvr_lightning.layers.stochastic import (
    Prior,
    Radius,
    Trials,
    drawn_text,
    support_text,
    trial_cosines,
    trial_draws,
)
from tvr_lightning.methods.base import Protocol, RetrievalModule
from tvr_lightning.methods.contrast import ContrastiveLearning
from tvr_lightning.methods.xpool import CrossAttentionConfig, PairwiseForm, block_budget, check_form, chosen_form
from tvr_lightning.pairwise import DensePairVectors, GatedAttention, Pairwise, score_in_blocks
from tvr_lightning.pairwise.gated import blended_square
from tvr_lightning.training.distributed import Gather
from tvr_lightning.training.losses import LogitMap, info_nce, positive_weights
from tvr_lightning.training.optim import OptimizerConfig

Fusion = Literal["none", "sample", "frame", "token"]
GateText = Literal["query", "paired", "none"]
Perturbation = Literal["none", "stp", "dasp"]
LossWeighting = Literal["positive", "released", "uniform"]


@dataclass
class GAIDConfig:
    """Switches of the head under the names of the arguments of `GAID`, which says what they mean.

    Raises:
        ValueError: options of which one makes another senseless.
    """

    fusion: Fusion = "frame"
    gate_text: GateText | None = None
    perturbation: Perturbation = "dasp"
    prior: Prior | None = None
    trials: Trials | None = None
    support_weight: float | None = None
    loss_weighting: LossWeighting = "positive"
    normalize_text: bool = False
    attention: CrossAttentionConfig = field(default_factory=CrossAttentionConfig)
    form: PairwiseForm = "auto"
    memory_budget: int | None = None

    def __post_init__(self) -> None:
        if self.fusion == "none" and self.gate_text is not None:
            raise ValueError(f"gate_text: {self.gate_text} conflicts with fusion: none, which has no gate; drop it")
        if self.perturbation == "none":
            given = [name for name in ("prior", "trials") if getattr(self, name) is not None]
            if given or self.support_weight:
                raise ValueError(
                    f"{' and '.join(given) or f'support_weight {self.support_weight}'} conflicts with perturbation: "
                    "none, which leaves texts as they are; drop it, or use perturbation: dasp"
                )
        if self.trials is not None and self.perturbation != "stp":
            raise ValueError(
                f"trials {self.trials} conflicts with perturbation: {self.perturbation}, which is deterministic at "
                "evaluation; drop trials, or use perturbation: stp"
            )
        if self.support_weight is not None and self.support_weight < 0:
            raise ValueError(f"support_weight is {self.support_weight}; it must be at least 0")
        if self.form == "factorised" and self.fusion == "token" and self.gate_text != "none":
            raise ValueError(
                "form: factorised conflicts with fusion: token, whose gate has a number per dimension and pair; use "
                "form: auto"
            )
        check_form(self.form, self.attention.dropout, self.memory_budget)
        self.gate_text = self.gate_text or "query"
        self.prior = self.prior or Prior()
        self.trials = self.trials or 20
        if self.support_weight is None:
            self.support_weight = 0.0 if self.perturbation == "none" else 0.8


@dataclass
class GateQuery(Record):
    """What the head needs of N texts.

    Attributes:
        sentence: (N, D).
        queries: (N, 1, D) what the texts attend with.
        gate: (N, E) what they add to the gate's logits; None without fusion.
    """

    sentence: Tensor
    queries: Tensor
    gate: Tensor | None


@dataclass
class Candidate(Record):
    """M videos, and under the released protocol the texts that describe them."""

    video: VideoFeatures
    own: GateQuery | None = None


class GAIDHead(nn.Module):
    """Gated fusion, attention under the text, and directional perturbation.

    Scores of N texts and M videos are cosines (N, M).

    Args:
        dimension: D.
        frames: F, which the radius is tied to.
        config: switches.
    """

    def __init__(self, dimension: int, frames: int, config: GAIDConfig | None = None) -> None:
        super().__init__()
        self.dimension, self.frames = dimension, frames
        self.config = config = config or GAIDConfig()
        self.gate = None if config.fusion == "none" else Gate(dimension, config.fusion, config.gate_text != "none")
        self.attention = GatedAttention(dimension, config.attention.heads, config.attention.dropout)
        self.radius = None if config.perturbation == "none" else Radius(frames, dimension)
        self.alpha = nn.Parameter(torch.tensor([0.5])) if config.perturbation == "dasp" else None

    @property
    def form(self) -> type[Pairwise]:
        """The form of pair vectors that the options, the sizes and the mode (training or not) ask for."""
        config = self.config
        vectors = config.attention.heads * self.frames * (2 if self.gate is not None else 1)
        return chosen_form(config.form, self.attention.dropout if self.training else 0.0, vectors, self.dimension)

    def prepared(self, text: TextFeatures) -> GateQuery:
        """Return what the texts ask and gate with."""
        gate = None if self.gate is None else self.gate.of_text(text.sentence)
        return GateQuery(text.sentence, self.attention.queries(text.sentence.unsqueeze(1)), gate)

    # Fusion and pooling

    def own_frames(self, video: VideoFeatures, gate_text: Tensor | None) -> Tensor:
        """Return fused frames (M, F, D) under one text per video, or under none.

        Args:
            video: M videos with audio (M, F, D).
            gate_text: (M, E) the gate's logits of one text per video; None where texts have no say.
        """
        if self.gate is None or video.audio is None:
            return video.frames
        logits = self.gate.of_video(video)
        gate = (logits if gate_text is None else logits + gate_text.unsqueeze(1)).sigmoid()
        return video.frames + gate * (video.audio - video.frames)

    def condition(
        self, query: GateQuery, video: VideoFeatures, gate_text: Tensor | None = None
    ) -> tuple[Pairwise, Tensor]:
        """Fuse and pool M videos for N texts.

        Args:
            query: N texts.
            video: M videos with audio (M, F, D).
            gate_text: (M, E) logits of the videos' own texts, if these gate them in the queries' place.

        Returns:
            z of all pairs, and the cosines (M, N, F) of the texts with the fused frames.
        """
        queries = self.form.from_texts(query.queries, videos=len(video))
        by_query = self.gate is not None and self.gate.text and gate_text is None
        if not by_query:
            frames = self.own_frames(video, gate_text)
            cosines = (unit(frames) @ unit(query.sentence).T).transpose(1, 2)
            return self.attention(queries, frames, video.frame_mask), cosines
        assert self.gate is not None
        assert query.gate is not None
        assert video.audio is not None
        difference = video.audio - video.frames
        if self.gate.level == "token":
            logits = self.gate.of_video(video).unsqueeze(1) + query.gate.unsqueeze(1)  # (M, N, F, D)
            fused = torch.addcmul(video.frames.unsqueeze(1), logits.sigmoid(), difference.unsqueeze(1))
            cosines = torch.einsum("nd,mnfd->mnf", unit(query.sentence), unit(fused))
            return self.attention.each_pair(query.queries[:, 0], fused, video.frame_mask), cosines
        logits = self.gate.of_video(video) + query.gate.T  # (M, F or 1, N)
        gate = logits.sigmoid().expand(-1, video.frames.shape[1], -1)
        pooled = self.attention.blended(queries, video.frames, difference, gate, video.frame_mask)
        text = unit(query.sentence)
        products = video.frames @ text.T + gate * (difference @ text.T)
        length = blended_square(video.frames, difference, gate).sqrt().clamp(min=COSINE_EPS)
        return pooled, (products / length).transpose(1, 2)

    # Evaluation

    def forward(
        self, text: TextFeatures, video: VideoFeatures, seed: int = 0, own_text: TextFeatures | None = None
    ) -> Scores:
        """Score N texts against M videos, block by block.

        Args:
            text: N texts.
            video: M videos with audio (M, F, D) where there is fusion.
            seed: of the trials of perturbation `stp`.
            own_text: the M videos' own captions: the released protocol, which fuses and pools the videos for these.

        Returns:
            `similarity` (N, M), cosines.
        """
        text, video = text.float(), video.float()
        own = None if own_text is None else self.prepared(own_text.float())
        with torch.autocast(text.sentence.device.type, enabled=False):
            return score_in_blocks(
                lambda query, candidate: self._score_block(query, candidate, seed),
                self.prepared(text),
                Candidate(video, own),
                self._pair_bytes(text.sentence.element_size()),
                block_budget(self.config.memory_budget, text.sentence.device),
            )

    def _score_block(self, query: GateQuery, candidate: Candidate, seed: int) -> Scores:
        video, own = candidate.video, candidate.own
        pooled, cosines = self.condition(query, video, None if own is None else own.gate)
        text = unit(query.sentence) if self.config.normalize_text else query.sentence
        target = None
        if own is not None:
            frames = self.own_frames(video, own.gate)
            target = self.attention.each_pair(own.queries, frames.unsqueeze(1), video.frame_mask).materialize()[0]
        if self.radius is None:
            return Scores(_cosines(text, None, 1.0, pooled, target).T)
        radius = self.radius(cosines, video.frame_mask.unsqueeze(1)).exp()  # (M, N, D)
        if self.alpha is not None:  # Eq. 5
            return Scores(_cosines(text, radius, self.alpha, pooled, target).T)
        assert self.config.prior is not None
        assert self.config.trials is not None
        draws = trial_draws(self.config.prior, self.config.trials, self.dimension, seed).to(text)
        best = trial_cosines(text, radius, pooled.materialize()[:, :, 0].transpose(0, 1), draws).max(1)
        if target is None:
            return Scores(best.values.T)
        drawn = drawn_text(text, radius, draws, best.indices)
        return Scores((unit(drawn) * unit(target)).sum(-1).T)

    def _pair_bytes(self, element: int) -> int:
        basis = 2 * self.config.attention.heads * self.frames + 3
        vectors = self.dimension if self.form is DensePairVectors else basis
        if self.config.fusion == "token" and self.config.gate_text != "none":
            vectors = self.dimension * (self.frames + 1)
        return element * (6 * vectors + (0 if self.radius is None else 4 * self.dimension))

    # Training

    def perturbed(self, text: Tensor, radius: Tensor, draw: Tensor) -> Tensor:
        """Return the texts (B, D) of training: t + sigma R (STP, Eq. 3) or t + (alpha sigma + 1 - alpha) R (Eq. 4).

        Args:
            text: (B, D).
            radius: (B, D), R, the paper's std.
            draw: (B, D), sigma.
        """
        return text + (draw if self.alpha is None else self.alpha * draw + 1 - self.alpha) * radius

    def train_cosines(self, text: TextFeatures, video: VideoFeatures, draw: Tensor | None = None) -> Tensor:
        """Score B matching pairs with perturbed and with support texts.

        Args:
            text: B texts.
            video: their B videos.
            draw: (B, D), sigma; drawn from the prior where it is not given.

        Returns:
            (2, B texts, B videos) cosines, perturbed texts first; (1, B, B) without perturbation.
        """
        query = self.prepared(text)
        pooled, cosines = self.condition(query, video, query.gate if self.config.gate_text == "paired" else None)
        sentence = unit(text.sentence) if self.config.normalize_text else text.sentence
        texts = [sentence]
        if self.radius is not None:
            assert self.config.prior is not None
            draw = self.config.prior.draw(tuple(sentence.shape)) if draw is None else draw
            own = cosines.diagonal(dim1=0, dim2=1).T  # (B, F): every text with its own video
            log_radius = self.radius(own, video.frame_mask)
            mean = pooled.materialize().mean(0)[:, 0]  # of each video over the texts
            texts = [
                self.perturbed(sentence, log_radius.exp(), draw.to(sentence)),
                support_text(sentence, mean, log_radius),
            ]
        return pooled.unit().dot(unit(torch.stack(texts, dim=1)))[..., 0].permute(2, 1, 0)

    def losses(
        self, pairs: PairedFeatures, scale: Tensor, draw: Tensor | None = None, contrast: LogitMap | None = None
    ) -> dict[str, Tensor]:
        """Return the weighted terms of Eqs. 8-10 for B matching pairs.

        Args:
            pairs: B matching pairs.
            scale: exp(logit_scale), scalar.
            draw: (B, D), as for `train_cosines`.
            contrast: maps logits (B, B) to those that InfoNCE sees; as they are where it is not given.
        """
        cosines = self.train_cosines(pairs.text, pairs.video, draw)
        perturbation, *support = self.branch_losses(cosines, scale, contrast)
        terms = {"perturbation": perturbation}
        if self.config.support_weight:
            terms["support"] = self.config.support_weight * support[0]
        return terms

    def branch_losses(self, cosines: Tensor, scale: Tensor, contrast: LogitMap | None = None) -> list[Tensor]:
        """Return InfoNCE of each branch, unweighted by lambda (Eqs. 8-9).

        Args:
            cosines: (1 or 2, B, B) as `train_cosines` gives; the perturbed texts' weigh the pairs of both branches.
            scale: exp(logit_scale), scalar.
            contrast: as for `losses`.
        """
        weight = pair_weights(cosines[0], self.config.loss_weighting)
        logits = [scale * matrix for matrix in cosines]
        return [info_nce(contrast(matrix) if contrast else matrix, weight=weight) for matrix in logits]


def pair_weights(similarity: Tensor, weighting: LossWeighting) -> Tensor | None:
    """Return the weight of each matching pair in the loss, without gradient.

    Args:
        similarity: (B, B) cosines of B matching pairs.
        weighting: `released` divides each pair's own similarity by their sum (trainer/trainer_stochastic.py);
            `positive` counts negative ones as 0, and weighs all alike where none is positive; `uniform` weighs all
            alike.

    Returns:
        (B,) weights that add up to 1, or None for equal weights.
    """
    if weighting == "uniform":
        return None
    if weighting == "released":
        return positive_weights(similarity)
    own = similarity.detach().diagonal().clamp(min=0)
    total = own.sum()
    return torch.where(total > 0, own / total.clamp(min=torch.finfo(own.dtype).tiny), 1 / len(own))


def _cosines(
    text: Tensor, radius: Tensor | None, factor: Tensor | float, pooled: Pairwise, target: Tensor | None
) -> Tensor:
    """Return (M, N) cosines of t + factor R with z of every pair, or with a target (M, 1, D) per video."""
    if target is None:
        products = pooled.dot(text.unsqueeze(1))[:, :, 0, 0]
        length = pooled.norm()[..., 0]
    else:
        products = target[:, 0] @ text.T
        length = target.norm(dim=-1)
    square = text.square().sum(-1)
    if radius is not None:
        along = pooled.dot_pairs(radius)[..., 0] if target is None else (radius @ target.transpose(1, 2))[..., 0]
        products = products + factor * along
        cross = torch.einsum("mnd,nd->mn", radius, text)
        square = square + factor * (2 * cross + factor * radius.norm(dim=-1).square())
    return products / (square.clamp(min=COSINE_EPS**2).sqrt() * length.clamp(min=COSINE_EPS))


class GAID(RetrievalModule):
    """GAID: frames that listen as the query asks, and a text that is moved along its cross-modal deviation.

    Args:
        encoder: media to features.
        optimizer: optimiser, learning rates, schedule.
        evaluation: how scores become a table; its seed also makes the trials of `stp`.
        words: text positions W, SOT and EOT included.
        frames: frames F per video; the perturbation is tied to it.
        gather: which negatives and which gradient several devices give.
        contrast: what else the contrastive loss does with logits.
        audio_encoder: sound to features, frozen; `data.init_args.audio` must name its kind. By default what goes with
            the encoder: a TinyWhisperEncoder with a TinyClipEncoder, else Whisper base with OpenAI's weights.
        fusion: one gate per `frame` (the paper), per `sample`, per `token` (dimension), or `none`: no sound (Table 5).
        gate_text: which text opens the gate in training: the `query` of every pair, the `paired` caption alone
            (released), or `none`. Evaluation takes the query, or no text after training with none.
        perturbation: `dasp` (Eqs. 4-5), `stp` with the best of several trials as in T-MASS (Eq. 3), or `none`.
        prior: of sigma.
        trials: of `stp` at evaluation (default 20), or `mean`.
        support_weight: lambda of Eq. 10 (default 0.8).
        loss_weighting: `positive` weighs pairs by their own similarity; `released` lets negative ones weigh negatively,
            which diverges from random weights; `uniform` weighs all alike (Eqs. 8-9).
        normalize_text: perturb the text at unit length (paper).
        attention: cross-attention of texts and frames.
        protocol: `query` fuses and pools every video for the query; `as-released` for its own caption, which leaks
            ground truth.
        form: `factorised` never builds a vector per pair in pooling, `dense` does, `auto` takes the cheaper that
            options allow.
        memory_budget: memory for one block of pairs in MiB; by default 64 on a CPU, 1024 elsewhere.

    Raises:
        ValueError: switches that do not fit each other.
        MissingWeightsError: Whisper's weights are not where it looks for them.
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
        audio_encoder: AudioEncoder | None = None,
        fusion: Fusion = "frame",
        gate_text: GateText | None = None,
        perturbation: Perturbation = "dasp",
        prior: Prior | None = None,
        trials: Trials | None = None,
        support_weight: float | None = None,
        loss_weighting: LossWeighting = "positive",
        normalize_text: bool = False,
        attention: CrossAttentionConfig | None = None,
        protocol: Protocol = "query",
        form: PairwiseForm = "auto",
        memory_budget: int | None = None,
    ) -> None:
        super().__init__(encoder, optimizer, evaluation, words, frames, gather, contrast)
        config = GAIDConfig(
            fusion=fusion,
            gate_text=gate_text,
            perturbation=perturbation,
            prior=prior,
            trials=trials,
            support_weight=support_weight,
            loss_weighting=loss_weighting,
            normalize_text=normalize_text,
            attention=attention or CrossAttentionConfig(),
            form=form,
            memory_budget=memory_budget,
        )
        if fusion == "none" and audio_encoder is not None:
            raise ValueError("audio_encoder conflicts with fusion: none, which hears nothing; drop one of both")
        self.protocol = protocol
        self.head = GAIDHead(encoder.dimension, frames, config)
        self.audio_encoder: AudioEncoder | None = None
        self.audio_projection: nn.Linear | None = None
        if fusion != "none":
            self.audio_encoder = audio_encoder or audio_companion(encoder)
            if self.audio_encoder.dimension != encoder.dimension:
                self.audio_projection = nn.Linear(self.audio_encoder.dimension, encoder.dimension)
        # The released loss detaches it, and distributed training refuses parameters that wait for a gradient.
        self.temperature.requires_grad_(False)

    @classmethod
    def required_files(cls, *, encoder: Any, audio_encoder: Any, fusion: Fusion, **options: Any) -> list[Path]:
        """Return the files of the audio encoder that goes with an encoder where a recipe names none."""
        if fusion == "none" or audio_encoder is not None or encoder.class_path.endswith(TinyClipEncoder.__name__):
            return []
        return WhisperEncoder.required_files(size="base", weights="openai")

    def video_features(self, batch: VideoBatch) -> VideoFeatures:
        """Encode picture and sound of M videos; without sound, the error names the option that reads it."""
        video = self.encoder.encode_video(batch.video)
        if self.audio_encoder is not None:
            audio, audio_mask = self.audio_encoder.encode_audio(batch.video)
            video = dataclasses.replace(video, audio=audio, audio_mask=audio_mask)
        return self.encode_video(video)

    def encode_video(self, video: VideoFeatures) -> VideoFeatures:
        """Bring audio (M, F, D_a) to (M, F, D), zero where there is no sound.

        Raises:
            ValueError: fusion, but no audio.
        """
        if self.head.gate is None:
            return dataclasses.replace(video, audio=None, audio_mask=None)
        if video.audio is None or video.audio_mask is None:
            raise ValueError(
                f"fusion: {self.head.config.fusion} needs sound, but these videos have none: set data.init_args.audio "
                "to whisper or wav2vec2 (as the audio encoder), or model.init_args.fusion to none"
            )
        audio = video.audio if self.audio_projection is None else self.audio_projection(video.audio)
        return dataclasses.replace(video, audio=audio * video.audio_mask.unsqueeze(-1))

    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        """Score any N texts against any M videos.

        Returns:
            `similarity` (N, M), cosines of perturbed texts and the videos fused and pooled for the texts.
        """
        return self.head(text, video, self.evaluation_config.seed)

    def score_as_released(self, text: TextFeatures, video: VideoFeatures, own_text: TextFeatures) -> Scores:
        """Score N texts against M videos that are fused and pooled for their own captions: ground truth leaks.

        Args:
            text: N texts.
            video: M videos.
            own_text: the caption of each video.
        """
        return self.head(text, video, self.evaluation_config.seed, own_text)

    def compact_text(self, text: TextFeatures) -> TextFeatures:
        """Drop the words of N texts: the sentence alone is read."""
        return text.without_words()

    def losses(self, pairs: PairedFeatures) -> dict[str, Tensor]:
        """Return scalars: the weighted terms of perturbed and support texts for B matching pairs (Eqs. 8-10)."""
        return self.head.losses(pairs, self.temperature(), contrast=self.contrastive_logits)


def audio_companion(encoder: Encoder) -> AudioEncoder:
    """Return the audio encoder that goes with an encoder where a recipe names none."""
    return TinyWhisperEncoder(seed=0) if isinstance(encoder, TinyClipEncoder) else WhisperEncoder("base", "openai")
