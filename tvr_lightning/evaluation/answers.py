"""How well questions about videos are answered: accuracy as a torchmetrics module, and the record of an evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat

from tvr_lightning.evaluation.results import SelectOn, environment, write_json_and_csv
from tvr_lightning.evaluation.weights import Weights
from tvr_lightning.files import write_whole


class AnswerAccuracy(Metric):
    """Percentage of questions answered with the right word, a scalar.

    A question that comes twice, because a sampler padded the last batch, counts once. Of several devices each must be
    updated before they compute together, if only with B = 0 questions, since that says of which type its states are.
    """

    full_state_update = False
    higher_is_better = True
    index: list[Tensor]
    correct: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        for name in ("index", "correct"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, index: Tensor, given: Tensor, right: Tensor) -> None:
        """Take the answers to B questions.

        Args:
            index: (B,) int64, each question's place in its split.
            given: (B,) int64, number of the answer that was given.
            right: (B,) int64, number of the right answer; -1 where no known answer is right.
        """
        self.index.append(index)
        self.correct.append((given == right) & (right >= 0))

    def compute(self) -> Tensor:
        """Return the scalar percentage.

        Raises:
            ValueError: no question was answered.
        """
        index = dim_zero_cat(self.index) if len(self.index) else torch.zeros(0)
        if not len(index):
            raise ValueError("AnswerAccuracy has no questions. Call update before compute.")
        correct = dim_zero_cat(self.correct)
        distinct, where = index.unique(return_inverse=True)
        hit = torch.zeros_like(distinct, dtype=torch.float32).scatter_(0, where, correct.float())
        return 100.0 * hit.mean()


@dataclass
class AnswerEvaluation:
    """What one evaluation of question answering found.

    Attributes:
        accuracy: percentage of the answered questions whose answer is right; one whose right answer the model has
            never learnt counts as wrong.
        answerable: the same over the questions whose right answer is among the learnt ones.
        majority: accuracy of always giving the most frequent training answer.
        kinds: question word to its accuracy, most frequent word first.
        questions: how many were answered. asked: how many the split has.
        unknown_answers: how many of them have a right answer that the model never learnt.
        without_video: how many of the split could not be answered because their video was not read.
    """

    accuracy: float
    answerable: float
    majority: float
    kinds: dict[str, float]
    questions: int
    asked: int
    unknown_answers: int
    without_video: int

    @property
    def partial(self) -> bool:
        """Whether questions of the split went unanswered."""
        return self.questions < self.asked


def evaluate_answers(
    given: Sequence[int], right: Sequence[int], kinds: Sequence[str], asked: int, without_video: int
) -> AnswerEvaluation:
    """Compare answers with the right ones.

    Args:
        given: number of the answer to each of N distinct questions; numbers go by frequency in training, 0 is the most
            frequent.
        right: number of the right one; -1 where it is not among the learnt answers.
        kinds: question word of each.
        asked: number of questions of the split.
        without_video: how many of these had no video.

    Raises:
        ValueError: no question was answered.
    """
    if not given:
        raise ValueError(f"None of the {asked} questions was answered; {without_video} of them have no readable video.")
    hits = [a == b and b >= 0 for a, b in zip(given, right, strict=True)]
    known = [hit for hit, b in zip(hits, right, strict=True) if b >= 0]
    groups: dict[str, list[bool]] = {}
    for kind, hit in zip(kinds, hits, strict=True):
        groups.setdefault(kind, []).append(hit)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    return AnswerEvaluation(
        accuracy=_percentage(hits),
        answerable=_percentage(known) if known else 0.0,
        majority=100.0 * sum(b == 0 for b in right) / len(right),
        kinds={kind: _percentage(found) for kind, found in ordered},
        questions=len(hits),
        asked=asked,
        unknown_answers=len(hits) - len(known),
        without_video=without_video,
    )


def _percentage(hits: Sequence[bool]) -> float:
    return 100.0 * sum(hits) / len(hits)


def frequent_answers(answers: Sequence[str], most: int) -> list[str]:
    """Return the `most` most frequent answers, most frequent first, equally frequent ones by the alphabet."""
    counts = Counter(answers)
    return sorted(counts, key=lambda answer: (-counts[answer], answer))[:most]


@dataclass
class AnswerResults:
    """One evaluated run of question answering, with all that it depends on.

    Attributes:
        method: whose features were used. dataset, split, protocol: what was evaluated.
        trained_on: dataset that the weights were trained on, where the checkpoint says it.
        evaluation: what was found.
        learnt_answers: how many answers the model chooses from.
        weights: which weights these are, as their checkpoint says.
        select_on: which split chose them, None where nobody says. checkpoint: file of the weights, if any.
        skipped: files that could not be read, each with its reason.
        config: the resolved configuration. precision, seed: of the run.
        warnings: What a reader must know before comparing.
        preprocessing: how captions and frames reached the encoder: token positions requested and used, preparation.
        environment: package versions, git revision, machine, command, date.
    """

    method: str
    dataset: str
    split: str
    protocol: str
    trained_on: str | None
    evaluation: AnswerEvaluation
    learnt_answers: int
    select_on: SelectOn | None
    checkpoint: str | None
    skipped: list[str]
    config: dict[str, Any]
    precision: str
    seed: int | None
    weights: Weights = field(default_factory=lambda: Weights("unknown"))
    warnings: list[str] = field(default_factory=list)
    preprocessing: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=lambda: environment())
    schema: int = 1


def print_answer_results(results: AnswerResults, console: Console | None = None) -> None:
    """Print the table that closes a run, with what was left out under it."""
    console = console or Console()
    found = results.evaluation
    table = Table(title=f"{results.method} on {results.dataset} ({results.protocol})")
    columns = {"accuracy": found.accuracy, "majority answer": found.majority} | found.kinds
    for name in columns:
        table.add_column(name, justify="right")
    table.add_row(*[f"{value:.1f}" for value in columns.values()])
    console.print(table)
    for line in answer_captions(results):
        console.print(line, highlight=False, soft_wrap=True)


def answer_captions(results: AnswerResults) -> list[str]:
    """Return the sentences under a table: what was answered, which weights did it, what could not be answered."""
    found = results.evaluation
    lines = [
        f"{found.questions} of {found.asked} questions · {results.learnt_answers} answers",
        results.weights.caption(),
    ]
    if results.trained_on and results.trained_on != results.dataset:
        lines.append(f"Cross-domain: trained on {results.trained_on}, tested on {results.dataset}")
    if found.unknown_answers:
        lines.append(
            f"{found.unknown_answers} questions have an answer that is not in the training data; they count as wrong "
            f"({found.answerable:.1f} % of the others are right)"
        )
    if found.without_video:
        lines.append(f"{found.without_video} questions are omitted, since their videos could not be read")
    if found.partial:
        lines.append("PARTIAL: not all questions of the split were answered; not comparable with other results")
    lines.extend(f"Warning: {mark}" for mark in [*results.warnings, *results.weights.warnings()])
    if results.skipped:
        lines.append(f"Skipped {len(results.skipped)} files: " + "; ".join(results.skipped[:5]))
    return lines


def write_answer_results(results: AnswerResults, folder: Path) -> tuple[Path, Path]:
    """Write `results.json` (everything) and `results.csv` (one row) into `folder`; return both paths."""
    row = {
        "method": results.method,
        "dataset": results.dataset,
        "protocol": results.protocol,
        "weights": results.weights.kind,
        "select_on": results.select_on or "",
        "accuracy": results.evaluation.accuracy,
        "majority": results.evaluation.majority,
        **results.evaluation.kinds,
    }
    return write_json_and_csv(asdict(results), [row], folder)


def write_answers(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write answers as parquet, one row per question: question, video_id, answer, probability, right."""
    import pandas as pd

    path.parent.mkdir(parents=True, exist_ok=True)
    columns = ["question", "video_id", "answer", "probability", "right"]
    write_whole(path, pd.DataFrame(list(rows), columns=pd.Index(columns)).to_parquet(index=False))
