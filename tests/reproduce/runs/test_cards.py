"""Run cards: reading, errors, and the command that repeats the run."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from metric_rows import summarize
from run_cards import RECIPES, keys_of, make_answers, make_card, plan_of

from tvr_lightning.cli import main
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.intervals import read_ranks
from tvr_lightning.reproduce.report.sources import compare_runs, measure, run_of_card
from tvr_lightning.reproduce.runs.card import read_card, read_cards
from tvr_lightning.reproduce.runs.plan import PlannedRun


@pytest.fixture
def card(tmp_path):
    (run,) = plan_of("gare-1", tmp_path, ["gare"], fixture_videos=20).runs.values()
    return make_card(run, tmp_path / "cards", quality=2.0)


@pytest.fixture
def path(card, tmp_path) -> Path:
    return tmp_path / "cards" / f"{card.key}.json"


def test_a_card_and_its_ranks_are_read_as_they_were_written(card, path):
    assert read_card(path) == card
    assert read_cards(path.parent) == {card.key: card}
    assert read_cards(path.parent / "absent") == {}
    for direction in ("text_to_video", "video_to_text"):
        ranks, video = read_ranks(path.with_suffix(".parquet"), direction)
        assert summarize(ranks, (1, 5, 10)) == pytest.approx(card.metrics(direction))
        assert torch.equal(video, torch.arange(60))


def changed(**changes):
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: path.write_text(path.read_text()[:100]), "{path}.* is incomplete"),
        (lambda path: path.with_suffix(".parquet").unlink(), "is incomplete: its status is finished"),
        (changed(schema=2), "has schema 2, but this version reads schema 5"),
        (changed(loss=1.0), "unknown fields loss"),
        (lambda path: path.write_text("[]"), "has schema None"),
        (
            lambda path: shutil.copy(path, path.with_name("copy.json")),
            "copy.json is the card of run {path.stem}.*gare-1/gare.*would have two cards",
        ),
    ],
)
def test_unusable_cards_are_refused(path, spoil, said):
    spoil(path)
    with pytest.raises(UserError, match=said.format(path=path)):
        read_cards(path.parent)


def test_a_card_of_question_answering_has_an_accuracy(card, path):
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


@pytest.mark.parametrize(("share", "short"), [("nothing", False), ("nothing", True), ("encoder", True)])
def test_the_command_of_a_card_plans_the_same_run(tmp_path, capsys, share, short):
    overlay = tmp_path / "a short one.yaml"
    overlay.write_text("trainer: {max_epochs: 1}\n")
    options = {"fixture_videos": 20, "overlay": overlay if short else None, "seeds": (0, 3), "share": share}
    plan = plan_of("gare-1", tmp_path / "fixture", **options)
    (_, key) = keys_of(plan, "gare-1/gare")
    card = make_card(plan.runs[key], tmp_path / "cards", 1.0)
    for needed in plan.runs[key].needs.values():
        make_card(plan.runs[needed], tmp_path / "cards", 1.0)
    words = shlex.split(run_of_card(card, tmp_path / "cards").command)
    assert words[0] == "tvr"
    assert main([*words[1:], f"--out={tmp_path}", f"--recipes={RECIPES}", "--dry_run"]) == 0
    said = capsys.readouterr().out
    assert "gare-1/gare" in said
    assert said.endswith("nothing left to run\n")
