"""Evaluation of video question answering: accuracies and result files."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.results import RunResults
from tvr_lightning.files import write_whole
from tvr_lightning.ranks import Ranks


def answer_ranks(index: Tensor, given: Tensor, right: Tensor) -> Ranks:
    """Return given answers (B,) as ranks, whose R@1 is the accuracy; `right` (B,) is -1 outside the vocabulary."""
    wrong = (given != right) | (right < 0)
    return Ranks(better=wrong.long(), tied=torch.ones_like(index), index=index)


@dataclass
class AnswerEvaluation:
    """Results of an evaluation of question answering.

    Attributes:
        accuracy: percentage of the answered questions whose answer is correct. Questions whose correct answer is not in
            the vocabulary count as wrong.
        answerable: the same percentage over the questions whose correct answer is in the vocabulary.
        majority: accuracy of always giving the most frequent training answer.
        kinds: accuracy per question word, most frequent word first.
        questions, asked: number of answered questions, and of all questions in the split.
        unknown_answers: number of answered questions whose correct answer is not in the vocabulary.
        without_video: number of questions in the split whose video could not be read.
    """

    accuracy: float
    answerable: float
    majority: float
    kinds: dict[str, float]
    questions: int
    asked: int
    unknown_answers: int
    without_video: int


def evaluate_answers(
    given: Sequence[int], right: Sequence[int], kinds: Sequence[str], asked: int, without_video: int
) -> AnswerEvaluation:
    """Compare predicted answers with the correct answers of N distinct questions, of which at least one was answered.

    Answers are numbered by frequency in training, from 0; -1 is a correct answer outside the vocabulary. `kinds` are
    the question words; the other arguments are those of `AnswerEvaluation`.
    """
    if not given:
        raise UserError(f"None of the {asked} questions was answered; {without_video} of them have no readable video.")
    correct = torch.tensor(right)
    known = correct >= 0
    hits = known & (torch.tensor(given) == correct)
    return AnswerEvaluation(
        accuracy=_percent(hits),
        answerable=_percent(hits[known]) if known.any() else 0.0,
        majority=_percent(correct == 0),
        kinds={word: _percent(hits[[kind == word for kind in kinds]]) for word in frequent_answers(kinds, len(kinds))},
        questions=len(hits),
        asked=asked,
        unknown_answers=int((~known).sum()),
        without_video=without_video,
    )


def _percent(hits: Tensor) -> float:
    return 100.0 * float(hits.double().mean())


def frequent_answers(answers: Sequence[str], most: int) -> list[str]:
    """Return the `most` most frequent answers in descending order of frequency, ties in alphabetical order."""
    counts = Counter(answers)
    return sorted(counts, key=lambda answer: (-counts[answer], answer))[:most]


@dataclass(kw_only=True)
class AnswerResults(RunResults):
    """Results and conditions of a run of question answering.

    Attributes:
        evaluation: accuracies.
        learned_answers: size of the answer vocabulary.
    """

    evaluation: AnswerEvaluation
    learned_answers: int

    @override
    def rows(self) -> list[dict[str, Any]]:
        row = {
            "method": self.method,
            "dataset": self.dataset,
            "protocol": self.protocol,
            "weights": self.weights.kind,
            "select_on": self.select_on or "",
            "accuracy": self.evaluation.accuracy,
            "majority": self.evaluation.majority,
        }
        return [row | self.evaluation.kinds]

    @override
    def table(self) -> dict[str, list[str]]:
        found = self.evaluation
        columns = {"accuracy": found.accuracy, "majority answer": found.majority} | found.kinds
        return {name: [f"{value:.1f}"] for name, value in columns.items()}

    @override
    def notes(self) -> list[str]:
        found = self.evaluation
        lines = [f"{found.questions} of {found.asked} questions · {self.learned_answers} answers"]
        if found.unknown_answers:
            lines.append(
                f"{found.unknown_answers} questions have an answer that is not in the training data; they count as "
                f"wrong ({found.answerable:.1f} % of the others are right)"
            )
        if found.without_video:
            lines.append(f"{found.without_video} questions are omitted, since their videos could not be read")
        if found.questions < found.asked:
            lines.append("PARTIAL: not all questions of the split were answered; not comparable with other results")
        return lines


def write_answers(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write answers to a Parquet file with one row per question: question, video_id, answer, probability, right."""
    import pandas as pd

    path.parent.mkdir(parents=True, exist_ok=True)
    columns = pd.Index(["question", "video_id", "answer", "probability", "right"])
    write_whole(path, pd.DataFrame(list(rows), columns=columns).to_parquet(index=False))
