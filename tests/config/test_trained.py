"""Tests of trained weights: built as they were trained, and the table says which weights made it."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest
import torch

from tvr_lightning.cli import main
from tvr_lightning.evaluation.weights import weights_of
from tvr_lightning.synthetic import synthesize
from tvr_lightning.training.checkpoints import CONVERTED, RECORD

RECIPES = Path(__file__).parents[2] / "recipes"
RECIPE = [f"--config={RECIPES / 'tcmgc.yaml'}", f"--config={RECIPES / 'fixture.yaml'}"]
LAMBDA = "similarity_aggregation.init_args.softmax_lambda"
QUICK = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data")
    synthesize("msrvtt", root, 20, 0, workers=1, progress=False)
    return root


def options(root: Path) -> list[str]:
    return [
        f"--data.init_args.root={root}", "--data.init_args.batch_size=8", "--data.init_args.num_workers=0",
        "--data.init_args.frames=4", "--model.init_args.encoder.init_args.width=64",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run(root, tmp_path_factory) -> Path:
    """Folder of a fit with an option that changes scores and no tensor's shape."""
    runs = tmp_path_factory.mktemp("runs")
    more = [f"--model.init_args.tcmgc.{LAMBDA}=1", "--trainer.max_epochs=2", "--trainer.check_val_every_n_epoch=1"]
    more += [
        "--trainer.log_every_n_steps=1",
        "--model.init_args.evaluation.recall=[1,2,3]",
        f"--results.directory={runs}",
    ]
    assert main(["fit", *RECIPE, *options(root), *more, *QUICK]) == 0
    (folder,) = runs.glob("*/version_0")
    return folder


def isa(softmax_lambda: float) -> dict:
    return {"class_path": "tvr_lightning.layers.aggregation.ISA", "init_args": {"softmax_lambda": softmax_lambda}}


def results(runs: Path) -> dict:
    (path,) = runs.glob("*/*/results.json")
    return json.loads(path.read_text())


def test_a_test_of_the_checkpoint_alone_repeats_the_table_of_its_run(run, tmp_path, capsys):
    checkpoint = run / "checkpoints" / "last.ckpt"
    assert main(["test", f"--ckpt_path={checkpoint}", f"--results.directory={tmp_path}", *QUICK]) == 0
    first, again = json.loads((run / "results.json").read_text()), results(tmp_path)
    assert again["text_to_video"] == first["text_to_video"]
    assert again["video_to_text"] == first["video_to_text"]
    assert again["config"]["model"]["init_args"] == first["config"]["model"]["init_args"]
    assert again["config"]["data"]["init_args"] == first["config"]["data"]["init_args"]
    assert again["seed"] == first["seed"] == 42
    assert again["weights"] == first["weights"]
    said = " ".join(capsys.readouterr().out.split())
    assert f"weights of the last step (epoch 2, step 4) of {run} · select_on: last" in said.replace("/ ", "/")


@pytest.mark.parametrize("verb", ["validate", "predict"])
def test_validating_and_predicting_build_from_the_checkpoint_too(verb, run, tmp_path):
    checkpoint = run / "checkpoints" / "last.ckpt"
    assert main([verb, f"--ckpt_path={checkpoint}", f"--results.directory={tmp_path}", *QUICK]) == 0
    if verb == "predict":
        (path,) = tmp_path.glob("*/*/predictions.parquet")
        table = pd.read_parquet(path)
        first = json.loads((run / "results.json").read_text())
        own = [f"video{i}" for i in range(16, 20)]
        best = table[table["place"] == 1].sort_values("text_index")["video_id"].tolist()
        assert 25.0 * sum(a == b for a, b in zip(best, own, strict=True)) == first["text_to_video"]["R@1"]
    else:
        assert results(tmp_path)["config"]["model"]["init_args"]["tcmgc"]["similarity_aggregation"] == isa(1.0)


def test_an_option_that_changes_scores_is_refused_unless_it_is_meant(run, root, tmp_path, capsys):
    arguments = ["test", *RECIPE, *options(root), f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}"]
    arguments += [f"--results.directory={tmp_path}", *QUICK]
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert f"model.init_args.tcmgc.{LAMBDA} 100.0 (the checkpoint: 1.0)" in said
    assert "--override" in said
    assert not list(tmp_path.iterdir())
    assert main([*arguments, "--override"]) == 0
    found = results(tmp_path)
    assert found["config"]["model"]["init_args"]["tcmgc"]["similarity_aggregation"] == isa(100.0)
    assert found["weights"]["overridden"] == [f"model.init_args.tcmgc.{LAMBDA} 100.0 (the checkpoint: 1.0)"]
    assert f"Warning: scored with another option than in training: model.init_args.tcmgc.{LAMBDA}" in " ".join(
        capsys.readouterr().out.split()
    )


def test_options_that_leave_scores_alone_are_listed_and_taken(run, root, tmp_path, capsys, caplog):
    other = tmp_path / "elsewhere"
    other.symlink_to(root)
    more = [f"--data.init_args.root={other}", "--data.init_args.eval_batch_size=2", "--model.init_args.optimizer.lr=1"]
    more += ["--model.init_args.evaluation.normalization=DualSoftmax", f"--results.directory={tmp_path / 'runs'}"]
    with caplog.at_level("INFO"):
        assert main(["test", f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}", *more, *QUICK]) == 0
    assert "data.init_args.eval_batch_size 2 (the checkpoint: 64)" in caplog.text
    for name in ("data.init_args.root", "model.init_args.optimizer.lr", "evaluation.normalization"):
        assert name in caplog.text
    found = results(tmp_path / "runs")
    assert found["post_processing"].startswith("dual softmax")
    assert found["weights"]["overridden"] == []


def test_options_of_training_alone_are_taken(run, tmp_path, caplog):
    of_training = ["attention.dropout=0", "decorrelation.weight=0", "loss_reduction=sum"]
    more = [f"--model.init_args.tcmgc.{option}" for option in of_training]
    arguments = ["test", f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}", f"--results.directory={tmp_path}", *more]
    with caplog.at_level("INFO"):
        assert main([*arguments, *QUICK]) == 0
    assert results(tmp_path)["weights"]["overridden"] == []
    assert "tcmgc.attention.dropout 0.0 (the checkpoint: 0.3)" in caplog.text


def test_options_left_at_their_defaults_equal_those_written_out(run, root, tmp_path):
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    saved["hyper_parameters"]["tcmgc"] = None
    torch.save(saved, tmp_path / "defaults.ckpt")
    arguments = ["test", *RECIPE, *options(root), f"--ckpt_path={tmp_path / 'defaults.ckpt'}"]
    assert main([*arguments, f"--results.directory={tmp_path / 'runs'}", *QUICK]) == 0
    assert results(tmp_path / "runs")["weights"]["overridden"] == []


def test_only_the_test_set_needs_to_be_present(run, root, tmp_path):
    """The checkpoint's weights replace those that the encoder would start from, which need not be present either."""
    reduced = tmp_path / "data" / "msrvtt"
    reduced.mkdir(parents=True)
    for name in ("MSRVTT_JSFUSION_test.csv", "videos"):
        (reduced / name).symlink_to(root / "msrvtt" / name)
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    saved["hyper_parameters"]["encoder"]["init_args"]["trained_in"] = "nowhere.ckpt"
    torch.save(saved, tmp_path / "moved.ckpt")
    arguments = ["test", f"--ckpt_path={tmp_path / 'moved.ckpt'}", f"--data.init_args.root={tmp_path / 'data'}"]
    assert main([*arguments, f"--results.directory={tmp_path / 'runs'}", *QUICK]) == 0


@pytest.mark.parametrize("option", ["--data.init_args.frames=2", "--data.init_args.sampling=head"])
def test_the_same_dataset_read_in_another_way_is_refused(option, run, tmp_path, capsys):
    arguments = ["test", f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}", option, f"--results.directory={tmp_path}"]
    assert main([*arguments, *QUICK]) == 1
    assert option.partition("=")[0][2:] in capsys.readouterr().err


def test_another_method_is_refused_in_a_sentence(run, tmp_path, capsys):
    arguments = ["test", f"--config={RECIPES / 'clip4clip.yaml'}", f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}"]
    assert main([*arguments, f"--results.directory={tmp_path}"]) == 1
    assert "the checkpoint contains TCMGC, but the recipe builds CLIP4Clip" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["test", "validate", "predict"])
def test_an_absent_checkpoint_is_a_sentence_and_leaves_no_folder(verb, root, tmp_path, capsys):
    arguments = [verb, *RECIPE, *options(root), f"--results.directory={tmp_path / 'runs'}"]
    assert main([*arguments, f"--ckpt_path={tmp_path / 'nowhere.ckpt'}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"tvr: {tmp_path / 'nowhere.ckpt'}: no such checkpoint")
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_the_best_checkpoint_says_on_which_split_it_was_chosen(run, tmp_path, capsys):
    checkpoint = tmp_path / "renamed.ckpt"
    checkpoint.write_bytes((run / "checkpoints" / "best.ckpt").read_bytes())
    assert main(["test", f"--ckpt_path={checkpoint}", f"--results.directory={tmp_path / 'runs'}", *QUICK]) == 0
    found = results(tmp_path / "runs")
    assert found["select_on"] == found["weights"]["chosen_on"] == "test"
    assert (found["weights"]["kind"], found["weights"]["run"]) == ("best", str(run))
    said = " ".join(capsys.readouterr().out.split())
    assert "weights of the best epoch (epoch " in said
    assert "selected by val/t2v_R@1 on the TEST split: optimistic" in said
    (table,) = (tmp_path / "runs").glob("*/*/results.csv")
    assert set(pd.read_csv(table)["weights"]) == {"best"}


def test_weights_chosen_on_held_out_videos_say_so(root, tmp_path):
    more = ["--data.init_args.holdout=4", "--results.select_on=val", "--trainer.max_epochs=1"]
    more += ["--trainer.check_val_every_n_epoch=1", "--trainer.log_every_n_steps=1", f"--results.directory={tmp_path}"]
    assert main(["fit", *RECIPE, *options(root), *more, *QUICK]) == 0
    found = results(tmp_path)
    assert (found["select_on"], found["weights"]["kind"], found["weights"]["epoch"]) == ("val", "best", 1)


def test_scores_without_weights_are_called_untrained_in_a_plain_notice(root, tmp_path, capsys, caplog):
    arguments = ["test", *RECIPE, *options(root), f"--results.directory={tmp_path}", *QUICK]
    assert main(arguments) == 0
    (notice,) = [line for line in caplog.messages if "--ckpt_path" in line]
    assert notice.startswith("UNTRAINED weights")
    found = results(tmp_path)
    assert found["weights"]["kind"] == "untrained"
    assert found["select_on"] is None
    said = capsys.readouterr().out
    assert "UNTRAINED weights" in said
    assert "last step" not in said


def test_a_pretrained_encoder_with_nothing_trained_is_zero_shot(run, root, tmp_path, capsys, caplog):
    more = [f"--model.init_args.encoder.init_args.trained_in={run / 'checkpoints' / 'last.ckpt'}"]
    clip = [f"--config={RECIPES / 'clip4clip.yaml'}", RECIPE[1], "--model.init_args.clip4clip.similarity_header=MeanP"]
    assert main(["test", *clip, *options(root), *more, f"--results.directory={tmp_path}", *QUICK]) == 0
    assert results(tmp_path)["weights"]["kind"] == "zero-shot"
    assert "zero-shot: no checkpoint was given" in capsys.readouterr().out
    assert main(["test", *RECIPE, *options(root), *more, f"--results.directory={tmp_path / 'more'}", *QUICK]) == 0
    assert re.search(r"\d+ parameters outside the encoder are untrained", caplog.text)


def test_checkpoints_without_a_record_are_unknown_and_converted_ones_say_so(run, tmp_path, capsys):
    saved = torch.load(run / "checkpoints" / "last.ckpt", map_location="cpu", weights_only=True)
    del saved[RECORD]
    torch.save(saved, tmp_path / "last.ckpt")
    assert main(["test", f"--ckpt_path={tmp_path / 'last.ckpt'}", f"--results.directory={tmp_path}", *QUICK]) == 0
    found = results(tmp_path)
    assert (found["weights"]["kind"], found["select_on"]) == ("unknown", None)
    assert re.search(
        r"their checkpoint does not record their origin \(epoch 2, step 4\)", " ".join(capsys.readouterr().out.split())
    )
    assert weights_of({CONVERTED: {}, "epoch": 0, "global_step": 0}).caption().startswith("the authors' weights")


def test_a_converted_checkpoint_takes_the_data_of_a_recipe_and_its_own_words_and_frames(run, root, tmp_path, capsys):
    saved = torch.load(run / "checkpoints" / "last.ckpt", map_location="cpu", weights_only=True)
    del saved[RECORD], saved["datamodule_hyper_parameters"]
    saved["hyper_parameters"]["_class_path"] = "tvr_lightning.methods.tcmgc.method.TCMGC"
    torch.save(saved | {CONVERTED: {}, "epoch": 0, "global_step": 0}, tmp_path / "converted.ckpt")
    alone = ["test", f"--ckpt_path={tmp_path / 'converted.ckpt'}", f"--results.directory={tmp_path / 'runs'}", *QUICK]
    assert main(alone) == 1
    assert "does not record its training data" in capsys.readouterr().err
    on_data = [*alone, f"--config={RECIPES / 'data' / 'msrvtt.yaml'}", *options(root)[:3]]
    assert main(on_data) == 1
    assert "model.init_args.frames 12 (the checkpoint: 4)" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert main([*on_data, "--data.init_args.frames=4"]) == 0
    found = results(tmp_path / "runs")
    first = json.loads((run / "results.json").read_text())
    assert (found["weights"]["kind"], found["select_on"]) == ("converted", None)
    assert found["text_to_video"] == first["text_to_video"]


def test_classes_of_others_are_built_where_the_user_names_them(run, root, tmp_path, monkeypatch, capsys):
    (tmp_path / "colleagues.py").write_text("from tvr_lightning.methods import TCMGC\nclass Mine(TCMGC):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    saved = torch.load(run / "checkpoints" / "last.ckpt", map_location="cpu", weights_only=True)
    saved["hyper_parameters"]["_class_path"] = "colleagues.Mine"
    torch.save(saved, tmp_path / "mine.ckpt")
    alone = ["test", f"--ckpt_path={tmp_path / 'mine.ckpt'}", f"--results.directory={tmp_path}", *QUICK]
    assert main(alone) == 1
    assert "--trust colleagues" in capsys.readouterr().err
    assert main([*alone, "--trust", "colleagues"]) == 0
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("model: {class_path: colleagues.Mine}\n")
    assert main([*alone, f"--config={recipe}"]) == 0


@pytest.mark.parametrize("content", [None, b"no checkpoint"])
def test_auditing_what_is_no_checkpoint_is_a_sentence(content, root, tmp_path, capsys):
    here, checkpoint = tmp_path / "here.yaml", tmp_path / "last.ckpt"
    here.write_text(f"data: {{init_args: {{root: {root}}}}}\n")
    if content is not None:
        checkpoint.write_bytes(content)
    assert main(["audit", *RECIPE, f"--config={here}", f"--ckpt_path={checkpoint}"]) == (2 if content is None else 1)
    assert f"{checkpoint}: " in capsys.readouterr().err
