"""Evaluations of trained weights use the options of their training, and tables name the weights."""

import json
import re
import shutil

import pandas as pd
import pytest
import torch
from small_run import small_run

from tvr_lightning.cli import main
from tvr_lightning.config.recipe import Recipe
from tvr_lightning.evaluation.weights import weights_of
from tvr_lightning.runs.closing import new_layers, starting_weights
from tvr_lightning.runs.run import Run
from tvr_lightning.training.checkpoints import CONVERTED, RECORD, CheckpointError

LAMBDA = "model.init_args.tcmgc.similarity_aggregation.init_args.softmax_lambda"
PROTOCOL = "1k-A, one caption per video"
QUICK = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--model.init_args.evaluation.audit=0"]


@pytest.fixture(scope="module")
def run(msrvtt, tmp_path_factory):
    """Folder of a run with an option that changes scores but not the shape of any tensor."""
    runs = tmp_path_factory.mktemp("runs")
    more = ["--data.init_args.holdout=4", "--results.select_on=val", "--model.init_args.evaluation.recall=[1,2,3]"]
    assert main(["fit", *small_run(msrvtt, runs, *more, f"--{LAMBDA}=1", recipe="tcmgc")]) == 0
    return runs / "tcmgc-msrvtt" / "version_0"


@pytest.fixture
def checkpoint(run):
    return run / "checkpoints" / "best.ckpt"


@pytest.fixture
def saved(checkpoint):
    return torch.load(checkpoint, weights_only=True)


@pytest.fixture
def recipe(msrvtt, tmp_path):
    """The recipe of the run, without its option."""
    return small_run(msrvtt, tmp_path / "runs", recipe="tcmgc")


def results(folder):
    (path,) = folder.glob("**/results.json")
    return json.loads(path.read_text())


def evaluate(runs, checkpoint, *words, command="test"):
    assert main([command, f"--ckpt_path={checkpoint}", *QUICK, *words, f"--results.directory={runs}"]) == 0
    return results(runs)


def printed(capsys):
    return " ".join(capsys.readouterr().out.split())


def test_a_test_of_a_checkpoint_repeats_the_table_of_its_run(run, checkpoint, capsys):
    first = results(run)
    assert main(["test", f"--ckpt_path={checkpoint}", *QUICK]) == 0
    again = run / "test" / "version_0"
    assert {path.name for path in again.iterdir()} >= {"log.txt", "ranks.parquet", "run.md", "results.csv"}
    second = results(again)
    for name in ("text_to_video", "video_to_text", "seed", "weights", "select_on", "protocol"):
        assert second[name] == first[name]
    assert first["protocol"] == f"{PROTOCOL}, trained on 9k"
    for section in ("model", "data"):
        assert second["config"][section]["init_args"] == first["config"][section]["init_args"]
    assert second["checkpoint"] == str(checkpoint)
    assert (first["select_on"], first["weights"]["kind"]) == ("val", "best")
    where = f"(epoch {first['weights']['epoch']}, step {first['weights']['step']}) of {run}"
    chosen = "selected by val/t2v_R@1 on the validation split · select_on: val"
    assert f"weights of the best epoch {where}, {chosen}" in printed(capsys).replace("/ ", "/")


def test_an_option_that_changes_scores_needs_override(checkpoint, recipe, tmp_path, capsys):
    assert main(["test", f"--ckpt_path={checkpoint}", *recipe]) == 2
    error = capsys.readouterr().err
    assert f"{LAMBDA} 100.0 (the checkpoint: 1.0)" in error
    assert "--override" in error
    assert not (tmp_path / "runs").exists()
    found = evaluate(tmp_path / "runs", checkpoint, *recipe, "--override")
    aggregation = found["config"]["model"]["init_args"]["tcmgc"]["similarity_aggregation"]
    assert aggregation["init_args"] == {"softmax_lambda": 100.0}
    assert found["weights"]["overridden"] == [f"{LAMBDA} 100.0 (the checkpoint: 1.0)"]
    assert f"Warning: scored with another option than in training: {LAMBDA}" in printed(capsys)


def test_other_options_may_differ_and_only_the_test_set_needs_to_be_present(saved, msrvtt, tmp_path, caplog):
    """The checkpoint's weights replace those that the encoder would start from, which need not be present either."""
    reduced = tmp_path / "data" / "msrvtt"
    reduced.mkdir(parents=True)
    for name in ("MSRVTT_JSFUSION_test.csv", "videos"):
        (reduced / name).symlink_to(msrvtt / "msrvtt" / name)
    saved["hyper_parameters"]["encoder"]["init_args"]["trained_in"] = "nowhere.ckpt"
    torch.save(saved, tmp_path / "moved.ckpt")
    more = [
        f"--data.init_args.root={tmp_path / 'data'}", "--data.init_args.eval_batch_size=2",
        "--model.init_args.optimizer.lr=1", "--model.init_args.evaluation.recall=[1]",
        "--model.init_args.tcmgc.attention.dropout=0", "--model.init_args.tcmgc.decorrelation.weight=0",
        "--model.init_args.tcmgc.loss_reduction=sum",
    ]  # fmt: skip
    with caplog.at_level("INFO"):
        found = evaluate(tmp_path / "runs", tmp_path / "moved.ckpt", *more)
    assert found["weights"]["overridden"] == []
    for change in (
        "data.init_args.eval_batch_size 2 (the checkpoint: 64)", "tcmgc.attention.dropout 0.0 (the checkpoint: 0.3)",
        "data.init_args.root", "model.init_args.optimizer.lr", "evaluation.recall",
    ):  # fmt: skip
        assert change in caplog.text


def test_options_left_at_their_defaults_equal_explicit_ones(saved, recipe, tmp_path):
    saved["hyper_parameters"]["tcmgc"] = None
    torch.save(saved, tmp_path / "defaults.ckpt")
    assert Recipe.parse([], recipe, tmp_path / "defaults.ckpt").changes == {}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--data.init_args.frames=3", "data.init_args.frames 3"),
        ("--config=clip4clip", "the checkpoint contains TCMGC, but the recipe builds CLIP4Clip"),
    ],
)
def test_another_method_or_another_way_to_read_the_same_dataset_is_refused(option, message, checkpoint):
    with pytest.raises(CheckpointError, match=message):
        Recipe.parse([], [option], checkpoint)


def test_the_best_checkpoint_names_the_split_on_which_it_was_chosen(finished_run, tmp_path, capsys):
    shutil.copy(finished_run / "checkpoints" / "best.ckpt", tmp_path / "renamed.ckpt")
    normalization = "--model.init_args.evaluation.normalization=SinkhornBias"
    found = evaluate(tmp_path / "runs", tmp_path / "renamed.ckpt", normalization, command="validate")
    assert found["post_processing"].startswith("Sinkhorn")
    assert found["select_on"] == found["weights"]["chosen_on"] == "test"
    assert (found["weights"]["kind"], found["weights"]["run"]) == ("best", str(finished_run))
    assert "selected by val/t2v_R@1 on the TEST split: optimistic" in printed(capsys)
    (table,) = (tmp_path / "runs").glob("*/*/results.csv")
    assert set(pd.read_csv(table)["weights"]) == {"best"}


def test_scores_without_weights_are_untrained_or_zero_shot(checkpoint, recipe, msrvtt, tmp_path, capsys, caplog):
    assert main(["test", *recipe]) == 0
    (notice,) = [line for line in caplog.messages if "--ckpt_path" in line]
    assert notice.startswith("UNTRAINED weights")
    found = results(tmp_path / "runs")
    assert (found["weights"]["kind"], found["select_on"], found["protocol"]) == ("untrained", None, PROTOCOL)
    shown = printed(capsys)
    assert "UNTRAINED weights" in shown
    assert "last step" not in shown
    pretrained = f"--model.init_args.encoder.init_args.trained_in={checkpoint}"
    assert main(["test", *recipe, pretrained, f"--results.directory={tmp_path / 'zero-shot'}"]) == 0
    assert results(tmp_path / "zero-shot")["weights"]["kind"] == "zero-shot"
    assert "zero-shot: no checkpoint was given" in printed(capsys)
    assert re.search(r"\d+ parameters outside the encoder are untrained", caplog.text)
    mean = "--model.init_args.clip4clip.similarity_header=MeanP"
    without_layers = Run("test", Recipe.parse([], small_run(msrvtt, tmp_path, pretrained, mean)))
    assert new_layers(without_layers.model) == 0
    assert starting_weights(without_layers).start == f"the encoder has its pretrained weights ({checkpoint})"


def test_weights_without_a_record_are_unknown_unless_they_are_the_authors():
    unknown = weights_of({"epoch": 1, "global_step": 6})
    assert (unknown.kind, unknown.select_on) == ("unknown", None)
    assert "their checkpoint does not record their origin (epoch 2, step 6)" in unknown.caption()
    assert weights_of({CONVERTED: {}, "epoch": 0, "global_step": 0}).caption().startswith("the authors' weights")


def test_a_converted_checkpoint_needs_data_with_its_words_and_frames(run, saved, msrvtt, tmp_path):
    del saved[RECORD], saved["datamodule_hyper_parameters"]
    saved["hyper_parameters"]["_class_path"] = "tvr_lightning.methods.tcmgc.method.TCMGC"
    converted = tmp_path / "converted.ckpt"
    torch.save(saved | {CONVERTED: {}, "epoch": 0, "global_step": 0}, converted)
    with pytest.raises(CheckpointError, match="does not record its training data"):
        Recipe.parse([], [], converted)
    data = ["--config=data/msrvtt", f"--data.init_args.root={msrvtt}", "--data.init_args.num_workers=0"]
    with pytest.raises(CheckpointError, match=r"model\.init_args\.frames 12 \(the checkpoint: 2\)"):
        Recipe.parse([], data, converted)
    found = evaluate(tmp_path / "runs", converted, *data, "--data.init_args.frames=2")
    assert (found["weights"]["kind"], found["select_on"]) == ("converted", None)
    assert found["text_to_video"] == json.loads((run / "results.json").read_text())["text_to_video"]


def test_classes_of_other_packages_are_built_only_if_the_user_names_them(saved, tmp_path, monkeypatch):
    (tmp_path / "colleagues.py").write_text("from tvr_lightning.methods import TCMGC\nclass Mine(TCMGC): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    saved["hyper_parameters"]["_class_path"] = "colleagues.Mine"
    path = tmp_path / "mine.ckpt"
    torch.save(saved, path)
    with pytest.raises(CheckpointError, match="--trust colleagues"):
        Recipe.parse([], [], path)
    assert Recipe.parse(["{model: {class_path: colleagues.Mine}}"], [], path).build().model.title == "Mine"
    evaluate(tmp_path / "trusted", path, "--trust", "colleagues")


@pytest.mark.parametrize(
    ("section", "options", "message"),
    [
        ("hyper_parameters", {"gather": "old"}, "model.init_args.gather is 'old'; expected"),
        ("hyper_parameters", {"color": 1}, "TCMGC has no option color"),
        ("datamodule_hyper_parameters", {"sampling": "old"}, "data.init_args.sampling is 'old'; expected"),
    ],
)
def test_an_option_of_an_older_version_is_named_in_one_line(saved, tmp_path, section, options, message, capsys):
    saved[section] |= options
    saved[RECORD]["version"] = "0.0.9"
    torch.save(saved, tmp_path / "old.ckpt")
    assert main(["test", f"--ckpt_path={tmp_path / 'old.ckpt'}"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"tvr: {tmp_path / 'old.ckpt'}")
    assert message in line
    assert "0.0.9" in line


OWN_OPTIONS = """
from dataclasses import dataclass
from tvr_lightning.methods import TCMGC

@dataclass
class Sizes:
    dropout: float = 1.0
    rate: float = 1.0

class Mine(TCMGC):
    def __init__(self, encoder, *, direction: float = 1.0, sizes: Sizes | None = None, **options):
        super().__init__(encoder, **options)
"""


@pytest.mark.parametrize("option", ["direction", "sizes.dropout", "sizes.rate"])
def test_options_of_a_users_own_method_need_override_whatever_their_names(saved, tmp_path, monkeypatch, option):
    (tmp_path / "own_options.py").write_text(OWN_OPTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    saved["hyper_parameters"] |= {"_class_path": "own_options.Mine", "direction": 1.0, "sizes": None}
    torch.save(saved, tmp_path / "own.ckpt")
    with pytest.raises(CheckpointError, match=rf"{option} 2\.0 \(the checkpoint: 1\.0\)"):
        Recipe.parse([], [f"--model.init_args.{option}=2"], tmp_path / "own.ckpt", trust=["own_options"])


def test_the_overlay_of_another_dataset_replaces_that_of_the_training(finished_run, synthetic, tmp_path, capsys):
    root = synthetic("didemo", 8)
    didemo = ("--config=data/didemo", f"--data.init_args.root={root}")
    found = evaluate(tmp_path, finished_run / "checkpoints" / "last.ckpt", *didemo)
    assert "trained on synthetic MSR-VTT, tested on synthetic DiDeMo" in printed(capsys)
    assert (found["trained_on"], found["dataset"]) == ("synthetic MSR-VTT", "synthetic DiDeMo")
    assert "9k" not in found["protocol"]
    data = found["config"]["data"]["init_args"]
    assert (data["split"], data["frames"], data["words"], data["root"]) == ("lists", 64, 64, str(root))
    (table,) = tmp_path.glob("clip4clip-didemo/*/results.csv")
    assert set(pd.read_csv(table)["trained_on"]) == {"synthetic MSR-VTT"}
