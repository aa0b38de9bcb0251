"""Run cards: whole or not there, and refused by name where they cannot be used."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from metric_rows import summarize
from run_cards import make_answers, make_card

from tvr_lightning.errors import UserError
from tvr_lightning.reproduce.report.sources import run_of_card
from tvr_lightning.reproduce.report.uncertainty import compare_runs, measure
from tvr_lightning.reproduce.runs.card import ranks_of, read_card, read_cards
from tvr_lightning.reproduce.runs.plan import PlannedRun, Setting, make_plan
from tvr_lightning.reproduce.tables import load_table

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.fixture
def card(tmp_path):
    plan = make_plan([load_table("gare-1", RECIPES)], Setting(RECIPES, tmp_path, fixture_videos=20), ["gare"])
    return make_card(next(iter(plan.runs.values())), tmp_path / "cards", quality=2.0)


@pytest.fixture
def path(card, tmp_path) -> Path:
    return tmp_path / "cards" / f"{card.key}.json"


def test_a_card_comes_back_as_it_was_written(card, path):
    assert read_card(path) == card
    assert read_cards(path.parent) == {card.key: card}
    assert read_cards(path.parent / "absent") == {}


def test_the_stored_ranks_give_the_metrics_of_the_card(card, path):
    for direction in ("text_to_video", "video_to_text"):
        ranks, video = ranks_of(path.with_suffix(".parquet"), direction)
        assert summarize(ranks, (1, 5, 10)) == pytest.approx(card.metrics(direction))
        assert torch.equal(video, torch.arange(60))


def test_a_half_written_card_is_refused(path):
    path.write_text(path.read_text()[:100])
    with pytest.raises(UserError, match="is incomplete") as error:
        read_cards(path.parent)
    assert str(path) in str(error.value)


def test_a_card_without_its_ranks_is_refused(path):
    path.with_suffix(".parquet").unlink()
    with pytest.raises(UserError, match="is incomplete: its status is finished"):
        read_card(path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"schema": 2}, "has schema 2, but this version reads schema 5"), ({"loss": 1.0}, "unknown fields loss")],
)
def test_a_card_of_another_version_is_refused(path, changes, said):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=said):
        read_card(path)


def test_a_card_that_is_no_object_is_refused(path):
    path.write_text("[]")
    with pytest.raises(UserError, match="has schema None"):
        read_card(path)


def test_two_cards_that_claim_the_same_line_are_refused(card, path):
    shutil.copy(path, path.with_name("copy.json"))
    with pytest.raises(UserError, match=f"copy.json is the card of run {card.key}.*would have two cards") as error:
        read_cards(path.parent)
    assert "gare-1/gare" in str(error.value)


def test_question_answering_has_an_accuracy_and_no_ranks(card, path):
    card = make_answers(PlannedRun(**card.run), path.parent, right=19)
    assert read_card(path).accuracy() == 47.5
    assert read_card(path).metrics("text_to_video") == {}
    run = run_of_card(card, path.parent)
    found = measure([run], "text_to_video", "accuracy")
    assert found.mean == 47.5
    assert 20 < found.interval.low < 47.5 < found.interval.high < 75
    assert measure([run], "text_to_video", "R@1") is None
    same = compare_runs([run], [run], "text_to_video", "accuracy")
    assert (same.difference.low, same.difference.high, same.p_value) == (0, 0, 1)
