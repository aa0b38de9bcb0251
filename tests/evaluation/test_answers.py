"""Accuracy of answers: which answers count, what is counted separately, and what is written."""

import csv
import json

import pandas as pd
import pytest
import torch

from tvr_lightning.evaluation.answers import (
    AnswerResults,
    answer_ranks,
    evaluate_answers,
    frequent_answers,
    write_answers,
)
from tvr_lightning.evaluation.results import print_results, write_results


def results(evaluation, **changes):
    values = {
        "method": "Question answering with CLIP4Clip", "dataset": "MSRVTT-QA", "split": "official", "protocol": "open",
        "trained_on": "MSRVTT-QA", "evaluation": evaluation, "learned_answers": 3, "select_on": "last",
        "checkpoint": None, "skipped": [], "config": {}, "precision": "32-true", "seed": 0,
    }  # fmt: skip
    return AnswerResults(**(values | changes))


def printed(made, capsys) -> str:
    print_results(made)
    return capsys.readouterr().out


def test_the_recall_of_answers_is_their_accuracy_and_unknown_answers_are_wrong():
    ranks = answer_ranks(torch.arange(5), torch.tensor([4, 0, 1, 2, -1]), torch.tensor([4, 1, 1, 2, -1]))
    assert ranks.found_within(1).tolist() == [1.0, 0.0, 1.0, 1.0, 0.0]


def test_omitted_questions_are_counted_printed_and_written(tmp_path, capsys):
    kinds = ["what", "what", "who", "who"]
    found = evaluate_answers([0, 1, 2, 0], [0, 1, -1, 1], kinds, asked=7, without_video=2)
    assert (found.accuracy, found.majority) == (50.0, 25.0)
    assert found.answerable == pytest.approx(200 / 3)
    assert (found.questions, found.asked, found.unknown_answers, found.without_video) == (4, 7, 1, 2)
    made = results(found, trained_on="MSR-VTT", skipped=["clip [x].mp4: broken"], method="Answers [all]")
    said = printed(made, capsys)
    for part in (
        "50.0", "4 of 7 questions", "1 questions have an answer that is not in the training data",
        "2 questions are omitted", "PARTIAL", "trained on MSR-VTT, tested on MSRVTT-QA", "clip [x].mp4: broken",
        "Answers [all]",
    ):  # fmt: skip
        assert part in said
    json_path, csv_path = write_results(made, tmp_path)
    assert json.loads(json_path.read_text())["evaluation"]["without_video"] == 2
    (row,) = csv.DictReader(csv_path.read_text().splitlines())
    assert (float(row["accuracy"]), float(row["what"]), float(row["who"])) == (50.0, 100.0, 0.0)
    complete = printed(results(evaluate_answers([0], [0], ["what"], 1, 0)), capsys)
    assert not any(word in complete for word in ("PARTIAL", "trained on", "Skipped", "training data"))
    with pytest.raises(ValueError, match="None of the 5 questions was answered; 5 of them"):
        evaluate_answers([], [], [], asked=5, without_video=5)


def test_frequent_answers_are_sorted_by_count_and_then_alphabetically():
    given = ["dog", "man", "man", "cat", "cat", "bird"]
    assert frequent_answers(given, 3) == ["cat", "man", "bird"]
    assert frequent_answers(given, 100) == ["cat", "man", "bird", "dog"]


def test_answers_are_written_one_row_each(tmp_path):
    row = {"question": "who", "video_id": "video1", "answer": "man", "probability": 0.5, "right": "dog"}
    write_answers(tmp_path / "new" / "a.parquet", [row, row])
    assert pd.read_parquet(tmp_path / "new" / "a.parquet").to_dict("records") == [row, row]
