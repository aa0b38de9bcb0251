"""Plans of runs: their keys, what they need, and what they share; and the cards of runs that have ended."""

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from metric_rows import summarize
from run_cards import RECIPES, keys_of, make_answers, make_card, plan_of

from tvr_lightning.cli import main
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.intervals import read_ranks
from tvr_lightning.reproduce.report.sources import compare_runs, measure, run_of_card
from tvr_lightning.reproduce.runs import plan as planning
from tvr_lightning.reproduce.runs.card import read_card, read_cards
from tvr_lightning.reproduce.runs.plan import PlannedRun, Setting, data_fingerprint, make_plan
from tvr_lightning.reproduce.tables import load_table


@pytest.fixture
def setting(tmp_path) -> Setting:
    return Setting(RECIPES, tmp_path, fixture_videos=20)


def plan(setting, *names, only=()):
    return make_plan([load_table(name, RECIPES) for name in names], setting, only)


def runs_of(made, claim):
    return [made.runs[key] for key in keys_of(made, claim)]


def test_a_run_that_several_tables_need_is_planned_once(setting):
    made = plan(setting, "gare-1", "dpdv-1")
    (run,) = runs_of(made, "gare-1/x-pool")
    assert keys_of(made, "dpdv-1/x-pool") == [run.key]
    assert run.claims == ["gare-1/x-pool", "dpdv-1/x-pool"]


def test_backbones_share_a_run_only_on_synthetic_data(setting):
    names = ("tc-mgc-1b/x-pool", "tc-mgc-1b/x-pool-b16")
    synthetic = plan(setting, "tc-mgc-1b")
    assert keys_of(synthetic, names[0]) == keys_of(synthetic, names[1])
    real = plan(replace(setting, fixture_videos=None), "tc-mgc-1b")
    assert keys_of(real, names[0]) != keys_of(real, names[1])
    (run,) = runs_of(real, names[1])
    assert run.configs[-1].endswith("vit-b-16.yaml")
    assert run.fingerprints["weights"].startswith("ViT-B-16")


def test_every_run_uses_the_synthetic_dataset_of_its_own_layout(setting):
    made = plan(setting, "gare-1", "ncl-1", "gaid-1")
    assert runs_of(made, "ncl-1/ncl")[0].dataset == "activitynet"
    assert runs_of(made, "gaid-1/gaid-didemo")[0].dataset == "didemo"
    assert {run.dataset for run in made.runs.values()} == {"msrvtt", "activitynet", "didemo"}
    (run,) = plan(setting, "dpdv-s4").runs.values()
    configs = ["dpdv-vqa", "fixture", "fixture-vqa"]
    assert (run.dataset, [Path(path).stem for path in run.configs]) == ("msrvtt", configs)


def test_seeds_overlays_data_and_settings_change_the_key(setting, tmp_path):
    def key(changed: Setting, run="gare") -> str:
        return keys_of(plan(changed, "gare-1", only=[run]), f"gare-1/{run}")[-1]

    def overlaid(content):
        overlay.write_text(content)
        return key(replace(setting, overlay=overlay))

    overlay = tmp_path / "overlay.yaml"
    real = replace(setting, fixture_videos=None)
    keys = {
        key(setting), key(setting, "baseline"), key(replace(setting, seeds=(1,))), key(replace(setting, seeds=(2,))),
        key(replace(setting, fixture_videos=40)), key(real), overlaid("trainer: {max_epochs: 1}\n"),
    }  # fmt: skip
    assert len(keys) == 7
    assert key(setting) == key(setting)
    assert overlaid("# a comment\ntrainer:\n  max_epochs: 1\n") in keys
    assert overlaid("trainer: {max_epochs: 2}\n") not in keys
    (tmp_path / "msrvtt").mkdir()
    (tmp_path / "msrvtt" / "captions.json").write_text("{}")
    (tmp_path / "elsewhere").mkdir()
    assert key(replace(real, root=tmp_path / "elsewhere")) in keys  # both data folders are absent


def test_the_fingerprint_of_data_covers_annotations_and_videos_and_follows_links_once(tmp_path):
    disk, found = tmp_path / "disk", set()
    disk.mkdir()
    (disk / "back").symlink_to(disk)
    for name, caption, video in (("a", "x", b"1"), ("b", "y", b"1"), ("c", "x", b"22")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "captions.json").write_text(caption)
        (tmp_path / name / "videos").symlink_to(disk)
        (disk / "video1.mp4").write_bytes(video)
        found.add(data_fingerprint(tmp_path / name))
    assert len(found) == 3
    assert data_fingerprint(tmp_path / "absent") == "absent"


def test_a_new_version_of_results_or_audit_changes_the_keys(setting, monkeypatch):
    now = set(plan(setting, "gare-1", only=["gare"]).runs)
    for name in ("RESULTS_VERSION", "AUDIT_VERSION"):
        with monkeypatch.context() as patch:
            patch.setattr(planning, name, getattr(planning, name) + 1)
            assert not now & set(plan(setting, "gare-1", only=["gare"]).runs)


@pytest.mark.parametrize(
    ("run", "section", "option"),
    [
        ("gare-1/gare", "data", "extra_captions: FILE"),
        ("gare-1/gare", "data", "features: FILE"),
        ("gaid-1/gaid", "model", "audio_encoder: {class_path: WhisperEncoder, init_args: {weights: FILE}}"),
        ("gare-1/gare", "model", "encoder: {init_args: {trained_in: FILE}}"),
        ("gare-1/gare", "model", "encoder: {class_path: ClipEncoder, init_args: {weights: FILE}}"),
        ("dpdv-s4/dpdv-vqa", "model", "pretrained: FILE"),
        ("gare-1/gare", "model", "encoder: {class_path: ClipEncoder, init_args: {architecture: local-dir:FOLDER}}"),
        ("gare-1/gare", "model", "encoder: {class_path: ClipEncoder, init_args: {tokenizer: FOLDER}}"),
    ],
)
def test_the_key_covers_the_content_of_files_in_options(setting, tmp_path, run, section, option):
    file, overlay = tmp_path / "model" / "open_clip_model.safetensors", tmp_path / "overlay.yaml"
    file.parent.mkdir()
    named = option.replace("FILE", str(file)).replace("FOLDER", str(file.parent))
    overlay.write_text(f"{section}: {{init_args: {{{named}}}}}")
    keys, fingerprints = set(), set()
    for content in ("weights", "WEIGHTS"):  # of the same size
        file.write_text(content)
        planned = plan(replace(setting, overlay=overlay), run.partition("/")[0], only=[run])
        (one,) = runs_of(planned, run)
        keys.add(one.key)
        fingerprints.add(one.fingerprints["files"])
    assert len(keys) == 2
    assert "FOLDER" in option or (len(fingerprints) == 2 and "none" not in fingerprints)


def test_weights_set_to_null_are_random(setting, tmp_path):
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("model: {init_args: {encoder: {init_args: {weights: null}}}}\n")
    real = replace(setting, fixture_videos=None)
    for changed, said in ((real, "ViT-B-32: tag openai"), (replace(real, overlay=overlay), "ViT-B-32: random")):
        (run,) = plan(changed, "gare-1", only=["gare"]).runs.values()
        assert run.fingerprints["weights"] == said


def test_each_seed_is_a_run(setting):
    made = plan(replace(setting, seeds=(0, 1, 2)), "gare-1", only=["gare"])
    assert [run.seed for run in runs_of(made, "gare-1/gare")] == [0, 1, 2]
    own, two = (list(plan(each, "gare-1", only=["gare"]).runs) for each in (setting, replace(setting, seeds=(42, 43))))
    assert two[0] == own[0]


def test_only_selects_runs_and_the_training_that_they_need(setting):
    made = plan(setting, "gaid-1", only=["gaid-dsl-b16"])
    assert [run.verb for run in made.runs.values()] == ["fit", "test"]
    train, test = made.runs.values()
    assert test.needs == {"weights": train.key}
    assert not keys_of(made, "gaid-1/x-pool")
    with pytest.raises(UserError, match=r"'gadi' is not a run of these tables\. Available: gaid-1/"):
        plan(setting, "gaid-1", only=["gadi"])
    with pytest.raises(UserError, match="gaid-b16 leaves no run"):
        plan(replace(setting, share="features"), "gaid-1", only=["gaid-b16"])


def test_runs_that_share_an_encoder_need_the_run_that_trains_it(setting):
    made = plan(replace(setting, share="encoder"), "gare-1", "gaid-1")
    (shared,) = (run for run in made.runs.values() if run.name == "shared/encoder")
    assert (shared.dataset, shared.needs, shared.claims) == ("msrvtt", {}, [])
    assert {run.dataset for run in made.runs.values()} == {"msrvtt", "didemo"}
    for run in made.runs.values():
        if run is not shared:
            assert run.needs["encoder"] == shared.key
            assert any(path.endswith("fixture-shared.yaml") for path in run.configs)
    assert {run.verb for run in made.runs.values()} == {"fit", "test"}


def test_runs_that_read_the_same_data_share_stored_features(setting):
    made = plan(replace(setting, share="features"), "gare-1", "gaid-1")
    assert [run.dataset for run in made.runs.values() if run.verb == "extract"] == ["msrvtt", *3 * ["didemo"]]
    assert not keys_of(made, "gaid-1/gaid-b16")
    (run,) = runs_of(made, "gaid-1/gaid")
    store, encoder = (made.runs[run.needs[name]] for name in ("features", "encoder"))
    assert store.needs == {"encoder": encoder.key}
    assert store.claims == []
    assert list(made.runs).index(encoder.key) < list(made.runs).index(store.key) < list(made.runs).index(run.key)
    assert run.key not in plan(setting, "gaid-1").runs
    reading = {}
    for run in made.runs.values():
        if "features" in run.needs and run.dataset == "didemo":
            data = made.runs[run.needs["features"]].settings["data"]["init_args"]
            reading[run.name.removeprefix("gaid-1/")] = (data["split"], data["seconds"])
    assert reading["x-clip-didemo"] == ("lists", 31.0)
    assert reading["t-mass-didemo"] == reading["t-mass-didemo-as-released"] == ("tmass", 31.0)
    assert reading["gaid-didemo"] == ("tmass", None)
    further = plan(replace(setting, share="features"), "gare-2").runs.values()
    stores = [run.settings["data"]["init_args"] for run in further if run.verb == "extract"]
    assert {store["annotated_end"] for store in stores if "annotated_end" in store} == {True}


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


@pytest.mark.parametrize(("share", "short"), [("nothing", False), ("encoder", True)])
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
