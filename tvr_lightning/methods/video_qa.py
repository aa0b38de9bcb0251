"""Video question answering on a retrieval method's features (DPDV, Supplement, Section B and Table 4).

The paper applies its partition and its dual views to question and video, and leaves the rest of the model open. There
is no public code.

Deviations:
- classifier: paper not stated; here, as HBI and EMCL-QA (main_vqa.py, modeling_qa.py), an MLP over the 1,500 most
  frequent answers on the concatenation of the pooled question and the pooled video.
- partition: paper "directly applies" it; here pools the Spot half of the frames (DPDV, Eq. 3). The Recover-Path needs
  captions of the video, which test videos do not have.
- micro view: paper not stated; here selects for every word of the question its most similar patch of these frames, the
  inner maximum of DPDV's Eq. 5, and averages the patches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn import functional as F

from tvr_lightning.data.batch import PairBatch, TextBatch, VideoBatch
from tvr_lightning.data.msrvtt_qa import QuestionRecord
from tvr_lightning.data.records import SplitName
from tvr_lightning.encoders.audio import AudioEncoder
from tvr_lightning.encoders.base import Encoder
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.answers import AnswerEvaluation, answer_ranks, evaluate_answers, frequent_answers
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.evaluation.loop import Collection
from tvr_lightning.evaluation.metrics import RecallAtK
from tvr_lightning.evaluation.ranks import Ranks
from tvr_lightning.features import FeatureBatch, IndexedFeatures, TextFeatures, VideoFeatures
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.video_qa_head import AnswerHead, FramePooling, Inputs
from tvr_lightning.training.checkpoints import CheckpointError
from tvr_lightning.training.distributed import gather_batches, gather_tensor, world_size
from tvr_lightning.training.module import RecipeModule
from tvr_lightning.training.optim import OptimizerConfig


@dataclass
class _Given(FeatureBatch):
    """Answers to N questions: answer numbers (N,) int64 and probabilities (N,)."""

    answer: Tensor
    probability: Tensor


class VideoQuestionAnswering(RecipeModule):
    """Video question answering with the most frequent training answers, on any method's features.

    Titles: "DPDV" (anonymous ACL submission), Supplement Table 4. The module docstring lists the deviations.

    The answers are learned from the training questions and stored in the checkpoint. Training questions with rarer
    answers are left out of the loss, and test questions with unknown answers count as wrong. Both are counted and
    reported. Only the layers of the method that compute features are trained. Layers that only score pairs get no
    gradient, so several devices need `trainer.strategy: ddp_find_unused_parameters_true`.

    Args:
        encoder: encoder of texts and videos.
        method: retrieval method whose `encode_text` and `encode_video` are used: a class that takes the encoder.
        optimizer: optimizer, learning rates, and schedule.
        answers: number A of the most frequent training answers that can be predicted (HBI, EMCL-QA: 1,500).
        pretrained: retrieval checkpoint of the same method to start from; None starts from the encoder.
        hidden, dropout, pooling, spot_ratio, micro, inputs: see `AnswerHead`.

    Raises:
        UserError: `micro` is set for a method without patches, options of the method or the optimizer have no effect
            on answering, or `AnswerHead` rejects its options.
    """

    monitor = "val/accuracy"
    trains_all_parameters = False

    def __init__(
        self,
        encoder: Encoder,
        method: Callable[[Encoder], RetrievalModule],
        optimizer: OptimizerConfig | None = None,
        answers: int = 1500,
        pretrained: str | None = None,
        hidden: int = 1024,
        dropout: float = 0.1,
        pooling: FramePooling = "spot",
        spot_ratio: float = 0.5,
        micro: bool = False,
        inputs: Inputs = "both",
    ) -> None:
        super().__init__(optimizer)
        self.method = method(encoder)
        if micro and not self.method.needs_patches:
            raise UserError(
                f"micro: {type(self.method).__name__} has no patches. Choose another method or micro: false"
            )
        self._check_options()
        self.answers = answers
        self.pretrained = pretrained
        self.head = AnswerHead(encoder.dimension, answers, hidden, dropout, pooling, spot_ratio, micro, inputs)
        self.accuracy = RecallAtK(1)
        self.vocabulary: list[str] = []
        self.evaluation: AnswerEvaluation | None = None
        self.hits: tuple[Ranks, Tensor] | None = None
        self.predictions: list[dict[str, Any]] | None = None
        self._training_right = torch.zeros(0, dtype=torch.int64)
        self._asked: list[QuestionRecord] = []
        self._asked_right = torch.zeros(0, dtype=torch.int64)
        self.encoded = Collection()
        self._bank: tuple[VideoFeatures, Tensor] | None = None
        self._given: list[IndexedFeatures[_Given]] = []

    def _check_options(self) -> None:
        """Reject options that have no effect, because the method only computes features here."""
        if self.optimizer_config.gradient_cache is not None:
            raise UserError(
                "optimizer.gradient_cache is for losses over a whole batch, but questions are answered one by one. Set "
                "it to null, and set trainer.accumulate_grad_batches if a batch does not fit in memory."
            )
        unused = {"optimizer": OptimizerConfig(), "evaluation": EvaluationConfig()}
        wrong = [name for name, default in unused.items() if getattr(self.method, f"{name}_config") != default]
        wrong += ["gather"] if self.method.gather != "global" else []
        wrong += ["contrast"] if self.method.contrast.name else []
        if wrong:
            raise UserError(
                f"model.init_args.method.init_args has {' and '.join(wrong)}, which question answering does not use. "
                "Remove them (the optimizer is set in model.init_args.optimizer)."
            )

    @property
    def encoder(self) -> Encoder:  # type: ignore[override]
        """The method's encoder."""
        return self.method.encoder

    @property
    def words(self) -> int:  # type: ignore[override]
        """Number of token positions of the method."""
        return self.method.words

    @property
    def audio_encoder(self) -> AudioEncoder | None:
        """Audio encoder of the method, if it uses audio."""
        return getattr(self.method, "audio_encoder", None)

    @property
    def needs_patches(self) -> bool:
        """Whether stored features must contain patches."""
        return self.method.needs_patches

    @property
    def skipped(self) -> list[str]:
        """Files that could not be read so far, each with the reason, over all devices."""
        return self.encoded.skipped_anywhere()

    def setup(self, stage: str) -> None:
        """Select the answers, and load the retrieval checkpoint if there is one.

        Raises:
            UserError: The data have captions instead of questions.
            CheckpointError: `pretrained` contains another method, or one with other sizes.
            StoreError: Stored features were computed with another encoder.
            UserError: The encoder's precision conflicts with the trainer's precision or strategy.
        """
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
            self._load_pretrained(Path(self.pretrained))

    def _load_pretrained(self, path: Path) -> None:
        if not path.is_file():
            raise CheckpointError(f"model.init_args.pretrained: there is no checkpoint {path.absolute()}")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        self.method.on_load_checkpoint(checkpoint)
        self.method.load_state_dict(checkpoint["state_dict"])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the answers with the weights."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["answers"] = list(self.vocabulary)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the answers of the checkpoint, and check its tensors.

        Raises:
            CheckpointError: The checkpoint contains a retrieval method, or tensors of other sizes.
        """
        if "answers" not in checkpoint:
            raise CheckpointError(
                "The checkpoint contains a retrieval method without answers. Pass it to `tvr fit` as "
                "model.init_args.pretrained, or use the checkpoint of a question answering run."
            )
        self.vocabulary = list(checkpoint["answers"])
        super().on_load_checkpoint(checkpoint)

    def logits(self, text: TextFeatures, video: VideoFeatures) -> Tensor:
        """Return the logits (B, K) of the learned answers to B questions about B videos, in float32.

        K is min(A, number of learned answers). Row i of `text` is the question about video i.
        """
        with torch.autocast(self.device.type, enabled=False):
            return self.head(text.float(), video.float())[:, : len(self.vocabulary)]

    # Training

    def on_train_start(self) -> None:
        """Set the numbers of the correct answers of the training questions."""
        super().on_train_start()
        _, self._training_right = self._numbered("train")

    def training_step(self, batch: PairBatch, batch_idx: int) -> Tensor:
        """Return the cross-entropy of the correct answers, a scalar. Questions with rare answers are ignored."""
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

    def on_validation_epoch_start(self) -> None:
        """Set the numbers of the correct answers of the validation questions."""
        self._start("val")

    def on_test_epoch_start(self) -> None:
        """Set the numbers of the correct answers of the test questions."""
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
        self.accuracy.reset()

    def validation_step(self, batch: TextBatch | VideoBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Encode one batch of unique videos, or answer one batch of questions."""
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
        self.accuracy.update(answer_ranks(index, given, self._asked_right.to(index.device)[index]))
        self._given.append(IndexedFeatures(index, _Given(given, probability)))

    test_step = validation_step

    def predict_step(self, batch: TextBatch | VideoBatch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Encode or answer one batch and return its indices, because Lightning expects a value."""
        self.validation_step(batch, batch_idx, dataloader_idx)
        return batch.index

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
        video = torch.tensor([self._asked[i].video for i in index.tolist()], dtype=torch.int64)
        self.hits = answer_ranks(index, given, right), video
        seen = self._bank[1] if self._bank is not None else torch.zeros(0)
        without = sum(int(seen[question.video]) < 0 for question in self._asked) if len(seen) else 0
        self.evaluation = evaluate_answers(
            given.tolist(),
            right.tolist(),
            [self._asked[i].kind for i in index.tolist()],
            len(self._asked),
            without,
        )
        self.log(f"{stage}/accuracy", self.accuracy)
        others = {"answerable": self.evaluation.answerable, "majority": self.evaluation.majority}
        # Equal on all devices, of which the maximum is exact.
        self.log_dict({f"{stage}/{name}": value for name, value in others.items()}, sync_dist=True, reduce_fx="max")

    def on_validation_epoch_end(self) -> None:
        """Evaluate the answers and log the accuracy."""
        self._evaluate("val")

    def on_test_epoch_end(self) -> None:
        """Evaluate the answers and log the accuracy."""
        self._evaluate("test")

    def on_predict_epoch_end(self) -> None:
        """Store one row per question: question, video_id, answer, probability, right."""
        videos = self.trainer.datamodule.read_split("test").videos  # type: ignore[attr-defined]
        rows = []
        for index, given, probability in zip(*(tensor.tolist() for tensor in self._answered()), strict=True):
            question = self._asked[index]
            rows.append(
                {
                    "question": question.text,
                    "video_id": videos[question.video].video_id,
                    "answer": self.vocabulary[given],
                    "probability": probability,
                    "right": question.answer,
                }
            )
        self.predictions = rows
