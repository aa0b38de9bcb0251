"""Video question answering on a retrieval method's features (DPDV, Supplement, Section B and Table 4).

The paper applies its partition and its dual views to question and video, and leaves the rest of the model open. No
code is public.

Deviations:
- classifier: paper not stated; here, as HBI and EMCL-QA (main_vqa.py, modeling_qa.py), an MLP over the 1,500 most
  frequent answers on the concatenation of the pooled question and the pooled video.
- partition: paper "directly applies" it; here pools the Spot half of the frames (DPDV, Eq. 3). The Recover-Path needs
  captions of the video, which test videos do not have.
- micro view: paper not stated; here selects for every word of the question its most similar patch of these frames, the
  inner maximum of DPDV's Eq. 5, and averages the patches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from tvr_lightning.data.batch import PairBatch, TextBatch, VideoBatch
from tvr_lightning.data.msrvtt_qa import QuestionRecord
from tvr_lightning.data.records import SplitName
from tvr_lightning.encoders.audio import AudioEncoder
from tvr_lightning.encoders.base import Encoder
from tvr_lightning.encoders.tuning import FineTuning, Tuning
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.answers import AnswerEvaluation, answer_ranks, evaluate_answers, frequent_answers
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.evaluation.loop import Collection
from tvr_lightning.features import FeatureBatch, IndexedFeatures, TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import unit
from tvr_lightning.layers.pooling import masked_mean
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.dpdv.model import spot_frames
from tvr_lightning.methods.dpdv.options import ProperFraction
from tvr_lightning.option_types import Count, Dropout, Role, check
from tvr_lightning.ranks import Ranks
from tvr_lightning.training.checkpoints import CheckpointError, read_checkpoint
from tvr_lightning.training.distributed import gather_batches, gather_tensor, world_size
from tvr_lightning.training.module import RecipeModule
from tvr_lightning.training.optim import OptimizerConfig

FramePooling = Literal["spot", "mean"]
Inputs = Literal["both", "question", "video"]


class AnswerHead(nn.Module):
    """Pooling of a question and its video, and an MLP that scores every answer.

    Args:
        dimension: Dimension D of the features.
        answers: Number of answers A.
        hidden: Width of the MLP.
        dropout: Dropout rate before both linear layers.
        pooling: `spot` averages the frames most similar to the question (DPDV, Eq. 3), `mean` averages all frames.
        spot_ratio: Share of a video's frames that `spot` selects, at least one frame (paper: half).
        micro: Whether to add the patches most similar to the question's words.
        inputs: Inputs that the answer depends on. `question` measures the accuracy of the question text alone.
    """

    def __init__(
        self,
        dimension: int,
        answers: Count,
        hidden: Count = 1024,
        dropout: Dropout = 0.1,
        pooling: FramePooling = "spot",
        spot_ratio: ProperFraction = 0.5,
        micro: bool = False,
        inputs: Inputs = "both",
    ) -> None:
        super().__init__()
        self.pooling = pooling
        self.spot_ratio = spot_ratio
        self.micro = micro
        self.inputs = inputs
        check(self, dimension=dimension, answers=answers, hidden=hidden, dropout=dropout)
        if pooling == "mean" and spot_ratio != 0.5:
            raise UserError(f"spot_ratio {spot_ratio} is an option of pooling: spot. Remove it for pooling: mean.")
        if micro and inputs != "both":
            raise UserError(f"micro relates words and patches, so inputs must be both, not {inputs}")
        width = dimension * (3 if micro else 2)
        self.classify = nn.Sequential(
            nn.LayerNorm(width),
            nn.Dropout(dropout),
            nn.Linear(width, hidden),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, answers),
        )

    def forward(self, text: TextFeatures, video: VideoFeatures) -> Tensor:
        """Return the logits (B, A) of the answers to B questions about B videos, row by row."""
        chosen = self.spotted(text.sentence, video) if self.pooling == "spot" else video.frame_mask
        question, macro = text.sentence, masked_mean(video.frames, chosen)
        # Multiplied by 0 rather than left out, so that shapes stay and every parameter gets a gradient.
        if self.inputs == "question":
            macro = 0.0 * macro
        elif self.inputs == "video":
            question = 0.0 * question
        parts = [question, macro]
        if self.micro:
            assert video.patches is not None
            parts.append(words_patches(text, video.patches, chosen))
        return self.classify(torch.cat(parts, dim=-1))

    def spotted(self, sentence: Tensor, video: VideoFeatures) -> Tensor:
        """Return a mask (B, F) of the frames of each video most similar to its question (B, D) (DPDV, Eq. 3)."""
        similarity = torch.einsum("bd,bfd->bf", unit(sentence), unit(video.frames))
        return spot_frames(similarity, video.frame_mask.bool(), self.spot_ratio)


def words_patches(text: TextFeatures, patches: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean (B, D) of the patches most similar to each word of B questions (DPDV, Eq. 5, inner maximum).

    Patches (B, F, P, D) are those of the frames in the mask `chosen` (B, F).
    """
    flat = patches.flatten(1, 2)
    cosine = unit(text.words) @ unit(flat).mT
    usable = chosen.repeat_interleave(patches.shape[2], dim=1).unsqueeze(1)
    best = cosine.masked_fill(~usable, -torch.inf).argmax(dim=-1)
    taken = flat.gather(1, best.unsqueeze(-1).expand(-1, -1, flat.shape[-1]))
    return masked_mean(taken, text.word_mask)


@dataclass
class GivenAnswers(FeatureBatch):
    """Answers to N questions."""

    answer: Tensor  # (N,) int64, numbers of the answers
    probability: Tensor  # (N,)


class VideoQuestionAnswering(RecipeModule):
    """Video question answering with the most frequent training answers, on any method's features.

    The answers are learned from the training questions and stored in the checkpoint. Training questions with rarer
    answers are left out of the loss, and test questions with unknown answers count as wrong. Both are counted and
    reported. Only the layers of the method that compute features are trained. Layers that only score pairs get no
    gradient, so several devices need `trainer.strategy: ddp_find_unused_parameters_true`.

    Args:
        encoder: encoder of texts and videos.
        method: retrieval method whose `encode_text` and `encode_video` are used: a class that takes the encoder.
        optimizer: optimizer, learning rates, and schedule.
        tuning: choice of the encoder's weights that are trained, as for other methods.
        answers: number A of the most frequent training answers that can be predicted (HBI, EMCL-QA: 1,500).
        pretrained: retrieval checkpoint of the same method to start from; None starts from the encoder.
        hidden, dropout, pooling, spot_ratio, micro, inputs: see `AnswerHead`.
    """

    monitor = "val/accuracy"
    logged_metrics = ("accuracy", "answerable", "majority")
    trains_all_parameters = False

    def __init__(
        self,
        encoder: Encoder,
        method: Callable[[Encoder], RetrievalModule],
        optimizer: Annotated[OptimizerConfig | None, Role.TRAINING] = None,
        tuning: Annotated[Tuning | None, Role.TRAINING] = None,
        answers: int = 1500,
        pretrained: Annotated[str | None, Role.TRAINING, Role.FILE] = None,
        hidden: int = 1024,
        dropout: Dropout = 0.1,
        pooling: FramePooling = "spot",
        spot_ratio: float = 0.5,
        micro: bool = False,
        inputs: Inputs = "both",
    ) -> None:
        super().__init__(optimizer)
        self.method = method(encoder)
        self.words = self.method.words
        self.frames = self.method.frames
        self.needs_patches = self.method.needs_patches
        defaults = {"optimizer": OptimizerConfig(), "evaluation": EvaluationConfig()}
        unused = [name for name, default in defaults.items() if getattr(self.method, f"{name}_config") != default]
        unused += ["tuning"] if self.method.tuning != FineTuning() else []
        unused += ["gather"] if self.method.gather != "global" else []
        unused += ["released_devices"] if self.method.released_devices is not None else []
        unused += ["contrast"] if self.method.contrast.name else []
        if micro and not self.method.needs_patches:
            raise UserError(
                f"micro: {type(self.method).__name__} has no patches. Choose another method or micro: false"
            )
        if self.optimizer_config.gradient_cache is not None:
            raise UserError(
                "optimizer.gradient_cache is for losses over a whole batch, but questions are answered one by one. Set "
                "it to null, and set trainer.accumulate_grad_batches if a batch does not fit in memory."
            )
        if unused:
            raise UserError(
                f"model.init_args.method.init_args has {' and '.join(unused)}, which question answering does not use. "
                "Remove them (the optimizer and the tuning are set in model.init_args)."
            )
        self.method.tuning = tuning or FineTuning()
        self.method.tuning.apply(encoder)
        self.answers = answers
        self.pretrained = pretrained
        self.head = AnswerHead(encoder.dimension, answers, hidden, dropout, pooling, spot_ratio, micro, inputs)
        self.vocabulary: list[str] = []
        self.evaluation: AnswerEvaluation | None = None
        self.hits: tuple[Ranks, Tensor] | None = None
        self.predictions: list[dict[str, Any]] | None = None
        self._training_right = self._asked_right = torch.zeros(0, dtype=torch.int64)
        self._asked: list[QuestionRecord] = []
        self.encoded = Collection()
        self._bank: tuple[VideoFeatures, Tensor] | None = None
        self._given: list[IndexedFeatures[GivenAnswers]] = []

    @property
    def encoder(self) -> Encoder:  # type: ignore[override]
        """The method's encoder."""
        return self.method.encoder

    @property
    def audio_encoder(self) -> AudioEncoder | None:
        """Audio encoder of the method, if it uses audio."""
        return getattr(self.method, "audio_encoder", None)

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if not hasattr(data, "questions"):
            raise UserError(f"{type(data).__name__} has captions but no questions. Set data.class_path to MSRVTTQA")
        if stage != "fit":
            return
        given = [question.answer for question in data.questions("train")]
        self.vocabulary = frequent_answers(given, self.answers)
        known = set(self.vocabulary)
        rare = sum(answer not in known for answer in given)
        rank_zero_info(
            f"The model learns {len(self.vocabulary)} answers. {rare} of {len(given)} training questions have a rarer "
            "answer and are excluded from the loss."
        )
        if self.pretrained is not None:
            self.method.load_weights(read_checkpoint(Path(self.pretrained)))

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["answers"] = list(self.vocabulary)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "answers" not in checkpoint:
            raise CheckpointError(
                "The checkpoint contains a retrieval method without answers. Pass it to `tvr fit` as "
                "model.init_args.pretrained, or use the checkpoint of a question answering run."
            )
        self.vocabulary = list(checkpoint["answers"])
        super().on_load_checkpoint(checkpoint)

    def logits(self, text: TextFeatures, video: VideoFeatures) -> Tensor:
        """Return the logits (B, K) of the K learned answers to B questions, each about its video, in float32."""
        with torch.autocast(self.device.type, enabled=False):
            return self.head(text.float(), video.float())[:, : len(self.vocabulary)]

    # Training

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        _, self._training_right = self._numbered("train")

    @override
    def training_step(self, batch: PairBatch, batch_idx: int) -> Tensor:
        self.encoded.skipped.update(batch.video.skipped)
        logits = self.logits(self.method.text_features(batch.text), self.method.video_features(batch.video))
        right = self._training_right.to(logits.device)[batch.text.index]
        # Over all devices, whose gradients are averaged, because each has another number of rare answers.
        counted = gather_tensor((right >= 0).sum().reshape(1)).sum().clamp(min=1)
        loss = world_size() * F.cross_entropy(logits, right, ignore_index=-1, reduction="sum") / counted
        loss = self.total_loss({"cross_entropy": loss}, batch)
        self.log("train/loss", loss.detach(), prog_bar=True, sync_dist=world_size() > 1)
        return loss

    def _numbered(self, name: SplitName) -> tuple[list[QuestionRecord], Tensor]:
        """Return the questions of a split and the numbers (N,) of their correct answers, -1 if unknown."""
        questions = self.trainer.datamodule.questions(name)  # type: ignore[attr-defined]
        number = {answer: place for place, answer in enumerate(self.vocabulary)}
        return questions, torch.tensor([number.get(question.answer, -1) for question in questions])

    # Evaluation: first each video is encoded once, then each question is answered on the device of its batch

    @override
    def on_validation_epoch_start(self) -> None:
        self._start("val")

    @override
    def on_test_epoch_start(self) -> None:
        self._start("test")

    on_predict_epoch_start = on_test_epoch_start

    def _start(self, name: SplitName) -> None:
        if not self.vocabulary:
            raise CheckpointError(
                "The model has not learned any answers. Pass the checkpoint of a run: --ckpt_path FILE"
            )
        self._asked, self._asked_right = self._numbered(name)
        self.encoded.clear()
        self._given.clear()
        self._bank = None

    @override
    def validation_step(self, batch: TextBatch | VideoBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        if isinstance(batch, VideoBatch):
            self.encoded.add(self.method, batch)
            return
        if self._bank is None:
            self._bank = self._video_bank()
        videos, place = self._bank
        rows = place[[self._asked[i].video for i in batch.index.tolist()]]
        there = rows >= 0
        # Answers without a video are computed and discarded, because devices that shard weights must compute together.
        logits = self.logits(self.method.text_features(batch), videos[rows.clamp(min=0)])
        probability, given = (found[there] for found in logits.softmax(-1).max(-1))
        index = batch.index[there]
        self._given.append(IndexedFeatures(index, GivenAnswers(given, probability)))

    test_step = validation_step

    def _video_bank(self) -> tuple[VideoFeatures, Tensor]:
        """Return the videos read by all devices, and the row of each video of the split, -1 if it was not read."""
        videos = self.encoded.joined("videos", self.device).distinct()
        count = 1 + max(question.video for question in self._asked)
        place = torch.full((max(count, int(videos.index[-1]) + 1),), -1, device=videos.index.device)
        place[videos.index] = torch.arange(len(videos), device=videos.index.device)
        return videos.features, place

    def _answered(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return index, answer number, and probability (N,) of the distinct answered questions."""
        gathered = gather_batches(self._given, self.device)
        if gathered is None:
            empty = torch.zeros(0, dtype=torch.int64)
            return empty, empty, torch.zeros(0)
        given = gathered.distinct().to("cpu")
        return given.index, given.features.answer, given.features.probability

    def _evaluate(self, stage: str) -> None:
        index, given, _ = self._answered()
        right = self._asked_right[index]
        asked = [self._asked[i] for i in index.tolist()]
        self.hits = answer_ranks(index, given, right), torch.tensor([each.video for each in asked], dtype=torch.int64)
        unread = 0 if self._bank is None else sum(int(self._bank[1][each.video]) < 0 for each in self._asked)
        kinds = [question.kind for question in asked]
        self.evaluation = evaluate_answers(given.tolist(), right.tolist(), kinds, len(self._asked), unread)
        # Equal on all devices, of which the maximum is exact.
        for name in self.logged_metrics:
            self.log(f"{stage}/{name}", getattr(self.evaluation, name), sync_dist=True, reduce_fx="max")

    @override
    def on_predict_epoch_end(self) -> None:
        videos = self.trainer.datamodule.read_split("test").videos  # type: ignore[attr-defined]
        answered = zip(*(tensor.tolist() for tensor in self._answered()), strict=True)
        self.predictions = [
            {
                "question": self._asked[index].text,
                "video_id": videos[self._asked[index].video].video_id,
                "answer": self.vocabulary[given],
                "probability": probability,
                "right": self._asked[index].answer,
            }
            for index, given, probability in answered
        ]
