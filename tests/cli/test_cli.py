"""The `tvr` command: runs and their files, help, progress, and errors."""

import json
import re
import shlex
import subprocess
import sys
from importlib.metadata import version

import forked
import pandas as pd
import pytest
import torch
import yaml
from small_run import small_run

from tvr_lightning.cli import main
from tvr_lightning.cli.commands import COMMANDS, CommandParser
from tvr_lightning.config.recipe import data_from_recipe
from tvr_lightning.data.records import SYNTHETIC
from tvr_lightning.encoders.tokenizer import ClipTokenizer
from tvr_lightning.evaluation.results import Results
from tvr_lightning.evaluation.weights import Weights
from tvr_lightning.runs.closing import write_run_page


def results_in(folder) -> dict:
    (path,) = folder.glob("**/results.json")
    return json.loads(path.read_text(encoding="utf-8"))


def test_options_override_recipes_in_any_order(capsys):
    for words in (
        ["--data.init_args.frames=3", "--config", "clip4clip", "--config=fixture"],
        ["--config", "clip4clip", "--data.init_args.frames", "3", "--config=fixture"],
    ):
        with pytest.raises(SystemExit):
            main(["fit", *words, "--print_config"])
        assert yaml.safe_load(capsys.readouterr().out)["data"]["init_args"]["frames"] == 3


def test_a_run_can_end_by_time_and_without_validation(msrvtt, tmp_path):
    more = (
        "--trainer.max_epochs=-1", "--trainer.max_time=00:00:00:01", "--model.init_args.optimizer.schedule_epochs=2",
        "--trainer.check_val_every_n_epoch=10000", "--trainer.log_every_n_steps=10000",
    )  # fmt: skip
    assert main(["fit", *small_run(msrvtt, tmp_path, *more)]) == 0
    results = results_in(tmp_path)
    weights, saved = results["weights"], torch.load(results["checkpoint"], weights_only=True)
    assert (weights["kind"], weights["epoch"], weights["step"]) == ("last", saved["epoch"] + 1, saved["global_step"])
    assert weights["step"] > 0
    (page,) = tmp_path.glob("**/run.md")
    assert "best.ckpt" not in page.read_text(encoding="utf-8")
    (curves,) = tmp_path.glob("**/metrics.csv")
    assert pd.read_csv(curves)["train/loss"].notna().any()


def test_fit_writes_a_table_ranks_checkpoints_and_logs(finished_run):
    results = results_in(finished_run)
    assert set(results["text_to_video"]) >= {"R@1", "R@5", "R@10", "MdR", "MnR", "RSum"}
    assert results["texts"] == results["videos"] == 4
    assert (results["select_on"], results["partial"]) == ("last", False)
    assert results["config"]["model"]["class_path"].endswith("CLIP4Clip")
    assert results["environment"]["packages"]["torch"] == version("torch")
    assert results["warnings"] == [SYNTHETIC]
    assert {path.name for path in (finished_run / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    checkpoint = torch.load(finished_run / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["hyper_parameters"]["encoder"]["class_path"].endswith("TinyClipEncoder")
    assert list(finished_run.glob("events.out.tfevents*"))
    table = pd.read_csv(finished_run / "results.csv")
    assert table["direction"].tolist() == ["text-to-video", "video-to-text"]
    assert table["SumR"][0] == pytest.approx(results["sum_of_recalls"])
    curves = pd.read_csv(finished_run / "metrics.csv")
    assert set(curves) >= {"epoch", "step", "train/loss", "val/t2v_R@1"}
    assert curves.dropna(subset="train/loss")["step"].tolist() == list(range(6))
    ranks = pd.read_parquet(finished_run / "ranks.parquet")
    for direction, name in (("text-to-video", "text_to_video"), ("video-to-text", "video_to_text")):
        assert ranks[ranks.direction == direction]["rank"].mean() == pytest.approx(results[name]["MnR"])
    texts = ranks[ranks.direction == "text-to-video"]
    assert len(texts) == results["texts"]
    assert texts["query"].str.len().min() > 3
    assert set(texts.video) == set(ranks[ranks.direction == "video-to-text"]["query"])


def test_the_page_of_a_run_shows_its_results_files_and_next_commands(finished_run, tmp_path):
    page = (finished_run / "run.md").read_text(encoding="utf-8")
    saved = results_in(finished_run)
    assert page.startswith("# CLIP4Clip on synthetic MSR-VTT\n")
    assert f"- Warning: {SYNTHETIC}" in page
    assert f"| text-to-video | {saved['text_to_video']['R@1']:.1f} |" in page
    for part in (
        "tvr fit --config=", "results.json", "config.yaml", "ranks.parquet", "metrics.csv", "log.txt",
        "the subfolders `test/` and `predict/`", f"tvr test --ckpt_path {finished_run}/checkpoints/last.ckpt\n",
        "--checkpoints.resume=true", "- `checkpoints/last.ckpt`", "- `checkpoints/best.ckpt`",
    ):  # fmt: skip
        assert part in page
    log = (finished_run / "log.txt").read_text(encoding="utf-8")
    assert log.startswith("CLIP4Clip on synthetic MSR-VTT: ")
    assert "SumR" in log
    assert f"Wrote {finished_run / 'results.json'}" in log
    assert "Epoch" not in log
    elsewhere = {"weights": Weights(**saved["weights"]), "checkpoint": "my runs/last.ckpt"}
    page = write_run_page(tmp_path, Results(**saved | elsewhere), "tvr fit", "mine.method").read_text(encoding="utf-8")
    assert "tvr test --ckpt_path 'my runs/last.ckpt' --trust mine.method\n" in page


def test_an_audit_of_a_checkpoint_needs_no_recipe(finished_run, capsys):
    assert main(["audit", f"--ckpt_path={finished_run / 'checkpoints' / 'last.ckpt'}", "--videos=4"]) == 0
    assert "CLIP4Clip" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_prints_one_line_about_itself_and_more_with_verbose(msrvtt, tmp_path):
    def output(*verbose):
        more = ("--trainer.enable_progress_bar=true", *verbose)
        run = forked.tvr(["test", *small_run(msrvtt, tmp_path / str(len(verbose)), *more)], tmp_path)
        assert run.returncode == 0, run.stderr
        return run.stdout + run.stderr

    quiet, verbose = output(), output("-v")
    for words in ("GPU available", "Tip:", "DataLoader 0"):
        assert words not in quiet
        assert words in verbose
    (line,) = [line for line in quiet.splitlines() if line.startswith("CLIP4Clip on synthetic MSR-VTT: ")]
    for words in ("cpu, precision 32-true", "M parameters", "untrained: the encoder TinyClipEncoder", "; writes to "):
        assert words in line


def test_replaced_overlays_truncated_texts_and_limited_evaluations_are_marked(msrvtt, tmp_path, caplog):
    # As a fraction, since jsonargparse may read 1 as one batch or as all.
    limited = ("--trainer.limit_test_batches=0.5", "--data.init_args.eval_batch_size=2")
    more = ("--config=tuning/lora", "--config=tuning/frozen", "--data.init_args.words=8")
    options = small_run(msrvtt, tmp_path, *limited, *more)
    with caplog.at_level("INFO"):
        assert main(["test", *options]) == 0
    results = results_in(tmp_path)
    assert results["partial"] is True
    (replaced,) = (warning for warning in results["warnings"] if "tuning/frozen" in warning)
    assert "tuning/lora" in replaced
    assert f"Warning: {replaced}" in caplog.messages
    texts, tokenizer = data_from_recipe([], options).read_split("test").texts, ClipTokenizer(77)
    cut = sum(tokenizer.needed(text.text) > 8 for text in texts)
    assert cut > 0
    truncated = f"texts with more than 8 tokens were truncated ({cut} of {len(texts)})"
    assert truncated in results["warnings"]
    (page,) = tmp_path.glob("**/run.md")
    assert {f"- Warning: {each}" for each in (replaced, truncated)} <= {*page.read_text().splitlines()}


def test_predict_writes_the_best_videos_of_every_text(finished_run, msrvtt, tmp_path):
    more = (f"--ckpt_path={finished_run / 'checkpoints' / 'last.ckpt'}", "--model.init_args.evaluation.top_k=3")
    options = small_run(msrvtt, tmp_path)
    assert main(["predict", *options, *more]) == 0
    (path,) = tmp_path.glob("**/predictions.parquet")
    table = pd.read_parquet(path)
    results = results_in(finished_run)
    assert table["place"].tolist() == [1, 2, 3] * results["texts"]
    assert table.groupby("text_index")["score"].apply(lambda s: s.is_monotonic_decreasing).all()
    first = table[table["place"] == 1]
    split = data_from_recipe([], options).read_split("test")
    own = [split.videos[split.texts[i].video].video_id for i in first["text_index"]]
    assert 100 * (first["video_id"] == own).mean() == pytest.approx(results["text_to_video"]["R@1"], abs=1e-3)
    assert first["correct_video_id"].tolist() == own
    listed = table[table["video_id"] == table["correct_video_id"]]
    assert listed["correct_place"].tolist() == listed["place"].tolist()
    missing = ~table["text_index"].isin(listed["text_index"])
    assert table["correct_place"].isna().tolist() == missing.tolist()
    sinkhorn = "{class_path: SinkhornBias, init_args: {queries: oracle, marginals: count}}"
    more += (f"--model.init_args.evaluation.normalization={sinkhorn}",)
    assert main(["predict", *options, *more, "--override"]) == 0
    (again,) = set(tmp_path.glob("**/predictions.parquet")) - {path}
    assert pd.read_parquet(again)["score"].notna().all()


def test_predict_takes_videos_whose_texts_are_not_read(synthetic, tmp_path):
    few = ("--trainer.limit_predict_batches=1", "--data.init_args.eval_batch_size=2")
    options = small_run(synthetic("msvd", 8), tmp_path, "--config=data/msvd", "--config=fixture", *few)
    assert main(["predict", *options]) == 0
    (path,) = tmp_path.glob("**/predictions.parquet")
    assert pd.read_parquet(path)["video_id"].nunique() == 2


AUDIO = "--model.init_args.audio_encoder"
ANSWERS = "dpdv-vqa --data.init_args.audio=whisper --model.init_args.micro=false --model.init_args.method"
MISSING = {
    "clip4clip --model.init_args.encoder.init_args.weights=ViT-B-32.pt": ("ViT-B-32.pt", "tvr data synth msrvtt"),
    "gaid --data.init_args.audio=whisper": ("whisper/base.pt",),
    f"gaid --data.init_args.audio=whisper {AUDIO}=WhisperEncoder {AUDIO}.init_args.weights=tiny.pt": ("tiny.pt",),
    f"gaid --data.init_args.audio=wav2vec2 {AUDIO}=Wav2Vec2Encoder {AUDIO}.init_args.weights=wav2vec": ("wav2vec, ",),
    f"{ANSWERS}=GAID": ("whisper/base.pt",),
    f"{ANSWERS}=CLIP4Clip": (),
}


@pytest.mark.parametrize("words", MISSING)
def test_missing_data_and_weights_are_named_together(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    recipe, *options = words.split()
    assert main(["fit", f"--config={recipe}", *options, f"--data.init_args.root={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / "msrvtt") in error
    for part in MISSING[words]:
        assert part in error
    assert ("whisper/base.pt" in error) == ("whisper/base.pt" in MISSING[words])


ON_VAL = "--results.select_on=val --data.init_args.holdout=4"
BAD_STARTS = {
    "--ckpt_path=/": "/ is a folder; name a checkpoint file. Shards in a folder cannot be read without",
    "--trainer.max_epochs=-1 --trainer.max_time=00:00:00:01": "trainer.max_epochs is -1. Set model.init_args.",
    "--results.select_on=val": "holdout",
    f"{ON_VAL} --trainer.limit_val_batches=0": "limit_val_batches: 0, or",
    f"{ON_VAL} --trainer.enable_checkpointing=false": "enable_checkpointing",
    f"{ON_VAL} --trainer.check_val_every_n_epoch=2 --trainer.max_epochs=1": (
        "check_val_every_n_epoch: 2 and trainer.max_epochs: 1 writes none"
    ),
    "--trainer.strategy=ModelParallelStrategy --trainer.strategy.save_distributed_checkpoint=true": (
        "trainer.strategy: a checkpoint of shards cannot be read"
    ),
    "--checkpoints.every_n_steps=0": "every_n_steps is 0; expected",
    f"--checkpoints.resume=true --ckpt_path={__file__}": "checkpoints.resume finds the checkpoint itself. Drop it or",
    "--data.init_args.batch_size=64": "batch_size 64 exceeds the 12 training samples, so that no complete batch exists",
    "--trainer.precision=fp17": "trainer.precision is 'fp17'; expected 64, 32, 16",
    "--trainer.strategy=dpp": "invalid strategy name: `strategy='dpp'`",
}
if not torch.cuda.is_available():
    BAD_STARTS["--trainer.accelerator=gpu"] = "tvr: No supported gpu backend found"


@pytest.mark.parametrize("words", BAD_STARTS)
def test_a_run_that_cannot_start_prints_one_line_and_leaves_no_folder(words, msrvtt, tmp_path, capsys):
    assert main(["fit", *small_run(msrvtt, tmp_path / "runs"), *words.split()]) == 2
    error = capsys.readouterr().err
    (line,) = [line for line in error.splitlines() if line.startswith("tvr: ")]
    assert BAD_STARTS[words] in line
    assert "Traceback" not in error
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").rglob("*"))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_help_of_a_command_describes_every_option(command, capsys):
    known = CommandParser(command).known
    example = [word.partition("=")[0] for word in shlex.split(command.example) if word.startswith("--")]
    taken = {"--help", *(name for name in known if name.startswith("--"))}
    sections = tuple(f"--{section}" for section in command.sections)
    assert [option for option in example if option not in known and not option.startswith(sections)] == []
    assert main([*command.name.split(), "--help"]) == 0
    printed = capsys.readouterr().out
    options = printed.partition("options:")[2].partition("\n\n")[0]
    assert set(re.findall(r"(?<=\n  )(?:-h, )?(--[\w-]+)", options)) - {"--help_all"} == taken
    assert max(map(len, printed.splitlines())) < 120
    assert all(action.help for action in known.values())


def test_a_closed_output_ends_a_command_but_another_broken_pipe_is_an_error(ended, monkeypatch):
    program = "import sys; from tvr_lightning.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "fit", "--help"]
    process = ended(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    process.stdout.close()  # as `head` does when it has enough
    assert process.stderr.read() == ""
    assert process.wait() == 141

    def lost(*arguments):
        raise BrokenPipeError(32, "a worker is gone")

    monkeypatch.setattr(sys.modules["tvr_lightning.cli.main"], "run", lost)
    with pytest.raises(BrokenPipeError, match="a worker is gone"):
        main(["published"])


def test_commands_with_a_recipe_accept_its_options(msrvtt, tmp_path, capsys):
    data = ["--config", "clip4clip", "--config", "fixture", "--data.init_args.root", str(msrvtt), "--num_workers", "1"]
    assert main(["data", "stats", *data, "--data.init_args.split=full"]) == 0
    full = capsys.readouterr().out
    assert main(["data", "stats", *data]) == 0
    assert full != capsys.readouterr().out
    small = [*data[:-2], "--data.init_args.frames=2", "--model.init_args.encoder.init_args.width=64"]
    assert main(["audit", *small, "--videos=4", "--model.init_args.evaluation.normalization=DualSoftmax"]) == 0
    assert "uses the whole set of test queries" in capsys.readouterr().out
    parts = ["--parts=text", "--parts", "frames", "--num_workers=0"]
    assert main(["extract", *small, *parts, "--out", str(tmp_path / "features")]) == 0
