"""Evaluations of trained weights use the options of their training, and tables name the weights."""

import json
import re
import shutil

import pandas as pd
import pytest
import torch
from small_run import small_run

from tvr_lightning.cli import main
from tvr_lightning.evaluation.weights import weights_of
from tvr_lightning.training.checkpoints import CONVERTED, RECORD

LAMBDA = "similarity_aggregation.init_args.softmax_lambda"
NO_AUDIT = "--model.init_args.evaluation.audit=0"
QUICK = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]


@pytest.fixture(scope="module")
def run(msrvtt, tmp_path_factory):
    """Folder of a run with an option that changes scores but not the shape of any tensor."""
    runs = tmp_path_factory.mktemp("runs")
    more = [f"--model.init_args.tcmgc.{LAMBDA}=1", "--model.init_args.evaluation.recall=[1,2,3]"]
    assert main(["fit", *small_run(msrvtt, runs, *more, NO_AUDIT, recipe="tcmgc")]) == 0
    return runs / "tcmgc-msrvtt" / "version_0"


@pytest.fixture
def checkpoint(run):
    return run / "checkpoints" / "last.ckpt"


@pytest.fixture
def saved(checkpoint):
    return torch.load(checkpoint, weights_only=True)


@pytest.fixture
def recipe(msrvtt, tmp_path):
    """The recipe of the run, without its option."""
    return small_run(msrvtt, tmp_path / "runs", NO_AUDIT, recipe="tcmgc")


def isa(softmax_lambda):
    return {"class_path": "tvr_lightning.layers.aggregation.ISA", "init_args": {"softmax_lambda": softmax_lambda}}


def results(runs):
    (path,) = runs.glob("*/*/results.json")
    return json.loads(path.read_text())


def evaluate(runs, checkpoint, *words, status=0, command="test"):
    """Evaluate a checkpoint and return the results; a refused evaluation leaves no folder."""
    assert main([command, f"--ckpt_path={checkpoint}", *QUICK, f"--results.directory={runs}", *words]) == status
    if status:
        assert not list(runs.glob("*/*"))
        return None
    return None if command == "predict" else results(runs)


def test_a_test_of_a_checkpoint_repeats_the_table_of_its_run(run, checkpoint, capsys):
    assert main(["test", f"--ckpt_path={checkpoint}", *QUICK]) == 0
    again = run / "test" / "version_0"
    assert {path.name for path in again.iterdir()} >= {"log.txt", "ranks.parquet", "run.md", "results.csv"}
    first, second = (json.loads((folder / "results.json").read_text()) for folder in (run, again))
    for name in ("text_to_video", "video_to_text", "seed", "weights"):
        assert second[name] == first[name]
    for section in ("model", "data"):
        assert second["config"][section]["init_args"] == first["config"][section]["init_args"]
    assert second["checkpoint"] == str(checkpoint)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"weights of the last step (epoch 2, step 6) of {run} · select_on: last" in printed.replace("/ ", "/")


def test_validate_and_predict_also_build_the_method_from_the_checkpoint(run, checkpoint, tmp_path):
    found = evaluate(tmp_path / "validate", checkpoint, command="validate")
    assert found["config"]["model"]["init_args"]["tcmgc"]["similarity_aggregation"] == isa(1.0)
    evaluate(tmp_path / "predict", checkpoint, command="predict")
    (path,) = (tmp_path / "predict").glob("*/*/predictions.parquet")
    best = pd.read_parquet(path).query("place == 1")
    right = 100 * (best["video_id"] == best["correct_video_id"]).mean()
    assert right == json.loads((run / "results.json").read_text())["text_to_video"]["R@1"]


def test_an_option_that_changes_scores_needs_override(checkpoint, recipe, tmp_path, capsys):
    assert evaluate(tmp_path, checkpoint, *recipe, f"--results.directory={tmp_path}", status=1) is None
    printed = capsys.readouterr().err
    assert f"model.init_args.tcmgc.{LAMBDA} 100.0 (the checkpoint: 1.0)" in printed
    assert "--override" in printed
    found = evaluate(tmp_path, checkpoint, *recipe, f"--results.directory={tmp_path}", "--override")
    assert found["config"]["model"]["init_args"]["tcmgc"]["similarity_aggregation"] == isa(100.0)
    assert found["weights"]["overridden"] == [f"model.init_args.tcmgc.{LAMBDA} 100.0 (the checkpoint: 1.0)"]
    warning = f"Warning: scored with another option than in training: model.init_args.tcmgc.{LAMBDA}"
    assert warning in " ".join(capsys.readouterr().out.split())


def test_options_that_do_not_change_scores_are_used_and_listed(checkpoint, msrvtt, tmp_path, caplog):
    (tmp_path / "elsewhere").symlink_to(msrvtt)
    more = [
        f"--data.init_args.root={tmp_path / 'elsewhere'}", "--data.init_args.eval_batch_size=2",
        "--model.init_args.optimizer.lr=1", "--model.init_args.evaluation.normalization=DualSoftmax",
        "--model.init_args.tcmgc.attention.dropout=0", "--model.init_args.tcmgc.decorrelation.weight=0",
        "--model.init_args.tcmgc.loss_reduction=sum",
    ]  # fmt: skip
    with caplog.at_level("INFO"):
        found = evaluate(tmp_path / "runs", checkpoint, *more)
    assert "data.init_args.eval_batch_size 2 (the checkpoint: 64)" in caplog.text
    assert "tcmgc.attention.dropout 0.0 (the checkpoint: 0.3)" in caplog.text
    for name in ("data.init_args.root", "model.init_args.optimizer.lr", "evaluation.normalization"):
        assert name in caplog.text
    assert found["post_processing"].startswith("dual softmax")
    assert found["weights"]["overridden"] == []


def test_options_left_at_their_defaults_equal_explicit_ones(saved, recipe, tmp_path):
    saved["hyper_parameters"]["tcmgc"] = None
    torch.save(saved, tmp_path / "defaults.ckpt")
    assert evaluate(tmp_path / "runs", tmp_path / "defaults.ckpt", *recipe)["weights"]["overridden"] == []


def test_only_the_test_set_needs_to_be_present(saved, msrvtt, tmp_path):
    """The checkpoint's weights replace those that the encoder would start from, which need not be present either."""
    reduced = tmp_path / "data" / "msrvtt"
    reduced.mkdir(parents=True)
    for name in ("MSRVTT_JSFUSION_test.csv", "videos"):
        (reduced / name).symlink_to(msrvtt / "msrvtt" / name)
    saved["hyper_parameters"]["encoder"]["init_args"]["trained_in"] = "nowhere.ckpt"
    torch.save(saved, tmp_path / "moved.ckpt")
    assert evaluate(tmp_path / "runs", tmp_path / "moved.ckpt", f"--data.init_args.root={tmp_path / 'data'}")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--data.init_args.frames=3", "data.init_args.frames"),
        ("--config=clip4clip", "the checkpoint contains TCMGC, but the recipe builds CLIP4Clip"),
    ],
)
def test_another_method_or_another_way_to_read_the_same_dataset_is_refused(
    option, message, checkpoint, tmp_path, capsys
):
    evaluate(tmp_path, checkpoint, option, status=1)
    assert message in capsys.readouterr().err


def test_the_best_checkpoint_names_the_split_on_which_it_was_chosen(run, tmp_path, capsys):
    shutil.copy(run / "checkpoints" / "best.ckpt", tmp_path / "renamed.ckpt")
    found = evaluate(tmp_path / "runs", tmp_path / "renamed.ckpt")
    assert found["select_on"] == found["weights"]["chosen_on"] == "test"
    assert (found["weights"]["kind"], found["weights"]["run"]) == ("best", str(run))
    printed = " ".join(capsys.readouterr().out.split())
    assert "weights of the best epoch (epoch " in printed
    assert "selected by val/t2v_R@1 on the TEST split: optimistic" in printed
    (table,) = (tmp_path / "runs").glob("*/*/results.csv")
    assert set(pd.read_csv(table)["weights"]) == {"best"}


def test_weights_selected_on_held_out_videos_are_marked(recipe, tmp_path):
    more = ["--data.init_args.holdout=4", "--results.select_on=val", "--trainer.max_epochs=1"]
    assert main(["fit", *recipe, *more]) == 0
    found = results(tmp_path / "runs")
    assert (found["select_on"], found["weights"]["kind"], found["weights"]["epoch"]) == ("val", "best", 1)


def test_scores_without_weights_are_untrained_or_zero_shot(checkpoint, recipe, msrvtt, tmp_path, capsys, caplog):
    assert main(["test", *recipe]) == 0
    (notice,) = [line for line in caplog.messages if "--ckpt_path" in line]
    assert notice.startswith("UNTRAINED weights")
    found = results(tmp_path / "runs")
    assert (found["weights"]["kind"], found["select_on"]) == ("untrained", None)
    printed = capsys.readouterr().out
    assert "UNTRAINED weights" in printed
    assert "last step" not in printed
    pretrained = f"--model.init_args.encoder.init_args.trained_in={checkpoint}"
    mean = "--model.init_args.clip4clip.similarity_header=MeanP"
    assert main(["test", *small_run(msrvtt, tmp_path / "mean", pretrained, mean)]) == 0
    assert results(tmp_path / "mean")["weights"]["kind"] == "zero-shot"
    assert "zero-shot: no checkpoint was given" in capsys.readouterr().out
    assert main(["test", *recipe, pretrained]) == 0
    assert re.search(r"\d+ parameters outside the encoder are untrained", caplog.text)


def test_weights_of_a_checkpoint_without_a_record_are_unknown(saved, tmp_path, capsys):
    del saved[RECORD]
    torch.save(saved, tmp_path / "last.ckpt")
    found = evaluate(tmp_path, tmp_path / "last.ckpt")
    assert (found["weights"]["kind"], found["select_on"]) == ("unknown", None)
    printed = " ".join(capsys.readouterr().out.split())
    assert "their checkpoint does not record their origin (epoch 2, step 6)" in printed
    assert weights_of({CONVERTED: {}, "epoch": 0, "global_step": 0}).caption().startswith("the authors' weights")


def test_a_converted_checkpoint_needs_data_with_its_words_and_frames(run, saved, msrvtt, tmp_path, capsys):
    del saved[RECORD], saved["datamodule_hyper_parameters"]
    saved["hyper_parameters"]["_class_path"] = "tvr_lightning.methods.tcmgc.method.TCMGC"
    torch.save(saved | {CONVERTED: {}, "epoch": 0, "global_step": 0}, tmp_path / "converted.ckpt")
    runs, converted = tmp_path / "runs", tmp_path / "converted.ckpt"
    evaluate(runs, converted, status=1)
    assert "does not record its training data" in capsys.readouterr().err
    data = ["--config=data/msrvtt", f"--data.init_args.root={msrvtt}", "--data.init_args.num_workers=0"]
    evaluate(runs, converted, *data, status=1)
    assert "model.init_args.frames 12 (the checkpoint: 2)" in capsys.readouterr().err
    assert not runs.exists()
    found = evaluate(runs, converted, *data, "--data.init_args.frames=2")
    assert (found["weights"]["kind"], found["select_on"]) == ("converted", None)
    assert found["text_to_video"] == json.loads((run / "results.json").read_text())["text_to_video"]


def test_classes_of_other_packages_are_built_only_if_the_user_names_them(saved, tmp_path, monkeypatch, capsys):
    (tmp_path / "colleagues.py").write_text("from tvr_lightning.methods import TCMGC\nclass Mine(TCMGC): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    saved["hyper_parameters"]["_class_path"] = "colleagues.Mine"
    torch.save(saved, tmp_path / "mine.ckpt")
    evaluate(tmp_path / "refused", tmp_path / "mine.ckpt", status=1)
    assert "--trust colleagues" in capsys.readouterr().err
    evaluate(tmp_path / "trusted", tmp_path / "mine.ckpt", "--trust", "colleagues")
    evaluate(tmp_path / "named", tmp_path / "mine.ckpt", "--config={model: {class_path: colleagues.Mine}}")


def test_the_overlay_of_another_dataset_replaces_that_of_the_training(finished_run, synthetic, tmp_path, capsys):
    root = synthetic("didemo")
    didemo = ("--config=data/didemo", f"--data.init_args.root={root}", NO_AUDIT)
    found = evaluate(tmp_path, finished_run / "checkpoints" / "last.ckpt", *didemo)
    assert "trained on synthetic MSR-VTT, tested on synthetic DiDeMo" in " ".join(capsys.readouterr().out.split())
    assert (found["trained_on"], found["dataset"]) == ("synthetic MSR-VTT", "synthetic DiDeMo")
    data = found["config"]["data"]["init_args"]
    assert (data["split"], data["frames"], data["words"], data["root"]) == ("lists", 64, 64, str(root))
    (table,) = tmp_path.glob("clip4clip-didemo/*/results.csv")
    assert set(pd.read_csv(table)["trained_on"]) == {"synthetic MSR-VTT"}
