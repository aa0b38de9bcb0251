"""The `tvr` command in process, on real files: fit, test, predict, and what happens when something is missing."""

import io
import itertools
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import forked
import pandas as pd
import pytest
import torch
import yaml
from tiny_captioner import save_tiny_captioner

from tvr_lightning import progress
from tvr_lightning.cli import main
from tvr_lightning.cli.commands import COMMANDS, parser_of
from tvr_lightning.config.recipe import from_recipe
from tvr_lightning.data.records import SYNTHETIC
from tvr_lightning.encoders.tokenizer import ClipTokenizer
from tvr_lightning.evaluation.results import Results
from tvr_lightning.evaluation.weights import Weights
from tvr_lightning.runs.closing import write_run_page
from tvr_lightning.synthetic import synthesize

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def fixture_root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("fixture")
    synthesize("msrvtt", root, 20, 0, workers=1, progress=False)
    return root


def overlay(root: Path, runs: Path, *more: str) -> list[str]:
    """Options of a run that takes seconds."""
    return [
        f"--config={RECIPES / 'clip4clip.yaml'}", f"--config={RECIPES / 'fixture.yaml'}",
        f"--data.init_args.root={root}", "--data.init_args.batch_size=8", "--data.init_args.num_workers=0",
        "--model.init_args.encoder.init_args.width=64", "--data.init_args.frames=4", f"--results.directory={runs}",
        "--trainer.max_epochs=2", "--trainer.check_val_every_n_epoch=1", "--trainer.accelerator=cpu",
        "--trainer.log_every_n_steps=1", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run(fixture_root, tmp_path_factory) -> Path:
    """Folder of one finished fit."""
    runs = tmp_path_factory.mktemp("runs")
    assert main(["fit", *overlay(fixture_root, runs)]) == 0
    (folder,) = runs.glob("clip4clip-msrvtt/version_0")
    return folder


def test_options_override_recipes_wherever_they_stand(fixture_root, tmp_path, capsys):
    recipes = ["--config", str(RECIPES / "clip4clip.yaml"), f"--config={RECIPES / 'fixture.yaml'}"]
    for words in (
        ["--data.init_args.frames=3", *recipes],
        [recipes[0], recipes[1], "--data.init_args.frames", "3", recipes[2]],
    ):
        with pytest.raises(SystemExit):
            main(["fit", *words, "--print_config"])
        assert yaml.safe_load(capsys.readouterr().out)["data"]["init_args"]["frames"] == 3


def test_a_run_can_end_by_time(fixture_root, tmp_path):
    more = (
        "--trainer.max_epochs=-1",
        "--trainer.max_time=00:00:00:03",
        "--model.init_args.optimizer.schedule_epochs=2",
    )
    assert main(["fit", *overlay(fixture_root, tmp_path, *more)]) == 0
    results = json.loads((tmp_path / "clip4clip-msrvtt" / "version_0" / "results.json").read_text())
    assert results["weights"]["kind"] == "last"
    assert results["weights"]["step"] > 0


def test_the_last_weights_are_those_of_an_epoch_that_was_not_validated(fixture_root, tmp_path):
    assert main(["fit", *overlay(fixture_root, tmp_path), "--trainer.check_val_every_n_epoch=3"]) == 0
    results = json.loads((tmp_path / "clip4clip-msrvtt" / "version_0" / "results.json").read_text())
    saved = torch.load(results["checkpoint"], map_location="cpu", weights_only=True)
    assert saved["epoch"] == 1
    assert saved["global_step"] == 4


def test_eval_memory_is_the_budget_of_scoring(fixture_root, tmp_path):
    options = overlay(fixture_root, tmp_path)
    method, _ = from_recipe([], [*options, "--eval_memory", "512MiB"])
    assert method.evaluation_config.memory_gib == 0.5
    recall = "--model.init_args.evaluation.recall=[1,50]"
    method, _ = from_recipe([], [*options, recall, "--eval_memory=4GiB"])
    assert method.evaluation_config.memory_gib == 4
    assert method.evaluation_config.recall == [1, 50]


def test_eval_memory_is_refused_where_no_pairs_are_scored(fixture_root, tmp_path, capsys):
    recipes = [f"--config={RECIPES / name}.yaml" for name in ("dpdv-vqa", "fixture", "fixture-vqa")]
    options = [f"--data.init_args.root={fixture_root}", f"--results.directory={tmp_path}", "--eval_memory=1GiB"]
    assert main(["test", *recipes, *options]) == 2
    assert "--eval_memory supports retrieval methods only" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["4", "4GB", "0GiB", "much"])
def test_an_unreadable_eval_memory_says_what_is_expected(size, fixture_root, tmp_path, capsys):
    assert main(["test", *overlay(fixture_root, tmp_path), f"--eval_memory={size}"]) == 2
    assert "; expected a memory budget for scoring such as 4GiB or 512MiB" in capsys.readouterr().err


def test_what_a_checkpoint_names_is_not_imported_to_evaluate_it(run, fixture_root, tmp_path, monkeypatch, capsys):
    (tmp_path / "strangers.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    for section in ("hyper_parameters", "datamodule_hyper_parameters"):
        saved[section]["_class_path"] = f"strangers.{saved[section]['_class_path'].rpartition('.')[2]}"
    saved["hyper_parameters"]["encoder"] = {"class_path": "strangers.Encoder", "init_args": {}}
    torch.save(saved, tmp_path / "last.ckpt")
    options = overlay(fixture_root, tmp_path)
    assert main(["test", *options, f"--ckpt_path={tmp_path / 'last.ckpt'}"]) == 1
    assert "names strangers." in capsys.readouterr().err
    (tmp_path / "data.yaml").write_text(
        f"data: {{init_args: {{root: {fixture_root}, batch_size: 8, num_workers: 0, frames: 4}}}}\n"
        "model: {init_args: {encoder: {init_args: {width: 64}}}}\n"
    )
    recipes = [RECIPES / "clip4clip.yaml", RECIPES / "fixture.yaml", tmp_path / "data.yaml"]
    audit = [
        "audit",
        *(f"--config={recipe}" for recipe in recipes),
        "--videos=4",
        f"--ckpt_path={tmp_path / 'last.ckpt'}",
    ]
    assert main(audit) == 0
    assert "strangers" not in sys.modules


def test_fit_leaves_table_config_checkpoints_and_logs(run):
    results = json.loads((run / "results.json").read_text())
    assert set(results["text_to_video"]) >= {"R@1", "R@5", "R@10", "MdR", "MnR", "RSum"}
    assert results["texts"] == results["videos"] > 0
    assert results["select_on"] == "last"
    assert results["protocol"]
    assert results["partial"] is False
    assert results["config"]["model"]["class_path"].endswith("CLIP4Clip")
    assert results["environment"]["packages"]["torch"] == torch.__version__
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    assert list(run.glob("events.out.tfevents*"))
    assert (run / "config.yaml").is_file()
    table = pd.read_csv(run / "results.csv")
    assert table["direction"].tolist() == ["text-to-video", "video-to-text"]
    assert table["SumR"][0] == pytest.approx(results["sum_of_recalls"])


TIP = ("GPU available", "Tip:", "DataLoader 0")


def test_a_run_says_one_line_of_itself_and_libraries_speak_when_asked(fixture_root, tmp_path):
    def said(*asked: str) -> str:
        run = forked.tvr(["test", *overlay(fixture_root, tmp_path / str(len(asked)), *asked)], tmp_path)
        assert run.returncode == 0, run.stderr
        return run.stdout + run.stderr

    quiet, verbose = said(), said("-v")
    assert not [words for words in TIP if words in quiet]
    assert all(words in verbose for words in TIP)
    (line,) = [line for line in quiet.splitlines() if line.startswith("CLIP4Clip on synthetic MSR-VTT: ")]
    for words in ("cpu, precision 32-true", "M parameters", "untrained: the encoder TinyClipEncoder", "; writes to "):
        assert words in line


def test_a_run_explains_itself(run):
    page = (run / "run.md").read_text(encoding="utf-8")
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    assert page.startswith("# CLIP4Clip on synthetic MSR-VTT\n")
    assert f"- Warning: {SYNTHETIC}" in page
    assert results["warnings"] == [SYNTHETIC]
    assert f"| text-to-video | {results['text_to_video']['R@1']:.1f} |" in page
    for named in ("tvr fit --config=", "results.json", "config.yaml", "ranks.parquet", "metrics.csv", "log.txt"):
        assert named in page
    assert "the subfolders `test/` and `predict/`" in page
    said = (run / "log.txt").read_text(encoding="utf-8")
    assert said.startswith("CLIP4Clip on synthetic MSR-VTT: ")
    assert "SumR" in said
    assert f"Wrote {run / 'results.json'}" in said
    assert "Epoch" not in said
    curves = pd.read_csv(run / "metrics.csv")
    assert set(curves) >= {"epoch", "step", "train/loss", "val/t2v_R@1"}
    assert curves.dropna(subset="train/loss")["step"].tolist() == [0, 1, 2, 3]
    assert f"tvr test --ckpt_path {run}/checkpoints/last.ckpt\n" in page, "without --trust"
    assert "--checkpoints.resume=true" in page
    for name in ("last.ckpt", "best.ckpt"):
        assert (f"- `checkpoints/{name}`" in page) == (run / "checkpoints" / name).is_file()


def test_the_page_of_a_method_of_another_package_trusts_its_module(run, tmp_path):
    saved = json.loads((run / "results.json").read_text(encoding="utf-8"))
    results = Results(**saved | {"weights": Weights(**saved["weights"])})
    page = write_run_page(tmp_path, results, "tvr fit", "mine.method").read_text(encoding="utf-8")
    assert "last.ckpt --trust mine.method\n" in page


def test_the_table_notes_how_many_texts_were_truncated(fixture_root, tmp_path):
    assert main(["test", *overlay(fixture_root, tmp_path, "--data.init_args.words=8")]) == 0
    (path,) = tmp_path.glob("**/results.json")
    results = json.loads(path.read_text(encoding="utf-8"))
    tokenizer = ClipTokenizer(77)
    _, data = from_recipe(
        [RECIPES / "clip4clip.yaml", RECIPES / "fixture.yaml"], [f"--data.init_args.root={fixture_root}"]
    )
    cut = sum(tokenizer.needed(text.text) > 8 for text in data.read_split("test").texts)
    note = f"{cut} of {results['texts']} texts have more than 8 tokens and were truncated"
    assert cut > 0
    assert note in results["warnings"]
    assert note in (path.parent / "run.md").read_text(encoding="utf-8")


def test_the_rank_of_every_query_is_kept(run):
    ranks = pd.read_parquet(run / "ranks.parquet")
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    for direction, name in (("text-to-video", "text_to_video"), ("video-to-text", "video_to_text")):
        found = ranks[ranks.direction == direction]
        assert found["rank"].mean() == pytest.approx(results[name]["MnR"])
    texts = ranks[ranks.direction == "text-to-video"]
    assert len(texts) == results["texts"]
    assert texts["query"].str.len().min() > 3
    assert set(texts.video) == set(ranks[ranks.direction == "video-to-text"]["query"])


def test_test_of_the_checkpoint_repeats_the_table(run, fixture_root, tmp_path):
    checkpoint = run / "checkpoints" / "last.ckpt"
    options = [word for word in overlay(fixture_root, tmp_path) if not word.startswith("--results")]
    assert main(["test", *options, f"--ckpt_path={checkpoint}"]) == 0
    again = run / "test" / "version_0"
    assert {path.name for path in again.iterdir()} >= {"log.txt", "ranks.parquet", "run.md", "results.csv"}
    first, second = (json.loads((folder / "results.json").read_text()) for folder in (run, again))
    assert second["text_to_video"] == first["text_to_video"]
    assert second["checkpoint"] == str(checkpoint)


def test_predict_writes_the_best_videos_of_every_text(run, fixture_root, tmp_path):
    checkpoint = run / "checkpoints" / "last.ckpt"
    more = (f"--ckpt_path={checkpoint}", "--model.init_args.evaluation.top_k=3")
    assert main(["predict", *overlay(fixture_root, tmp_path, *more)]) == 0
    (path,) = tmp_path.glob("**/predictions.parquet")
    table = pd.read_parquet(path)
    results = json.loads((run / "results.json").read_text())
    assert len(table) == 3 * results["texts"]
    assert table.groupby("text_index")["score"].apply(lambda s: s.is_monotonic_decreasing).all()
    assert table["place"].tolist() == [1, 2, 3] * results["texts"]
    first = table[table["place"] == 1]
    _, data = from_recipe(
        [RECIPES / "clip4clip.yaml", RECIPES / "fixture.yaml"], [f"--data.init_args.root={fixture_root}"]
    )
    split = data.read_split("test")
    own = [split.videos[split.texts[i].video].video_id for i in first["text_index"]]
    assert 100 * (first["video_id"] == own).mean() == pytest.approx(results["text_to_video"]["R@1"], abs=1e-3)
    assert first["correct_video_id"].tolist() == own
    listed = table[table["video_id"] == table["correct_video_id"]]
    assert listed["correct_place"].tolist() == listed["place"].tolist()
    missing = ~table["text_index"].isin(listed["text_index"])
    assert table["correct_place"].isna().tolist() == missing.tolist()


def test_predict_balances_the_gallery_by_the_number_of_captions(run, fixture_root, tmp_path):
    normalization = "--model.init_args.evaluation.normalization"
    chosen = (f"{normalization}=SinkhornBias", f"{normalization}.init_args.queries=oracle",
              f"{normalization}.init_args.marginals=count")  # fmt: skip
    more = (f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}", "--override", *chosen)
    assert main(["predict", *overlay(fixture_root, tmp_path, *more)]) == 0
    (path,) = tmp_path.glob("**/predictions.parquet")
    assert pd.read_parquet(path)["score"].notna().all()


def test_checkpoints_load_without_executing_code(run):
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["hyper_parameters"]["encoder"]["class_path"].endswith("TinyClipEncoder")


def test_missing_data_and_weights_are_named_together_with_a_way_out(tmp_path, capsys):
    args = [f"--config={RECIPES / 'clip4clip.yaml'}", f"--data.init_args.root={tmp_path}"]
    weights = tmp_path / "ViT-B-32.pt"
    assert main(["fit", *args, f"--model.init_args.encoder.init_args.weights={weights}"]) == 1
    said = capsys.readouterr().err
    assert str(tmp_path / "msrvtt" / "MSRVTT_data.json") in said
    assert str(weights) in said
    assert "tvr data synth msrvtt" in said


@pytest.mark.parametrize(
    ("options", "looked"),
    [
        ([], "whisper/base.pt"),
        (["audio_encoder=WhisperEncoder", "audio_encoder.init_args.weights=sound/tiny.pt"], "sound/tiny.pt"),
        (["audio_encoder=Wav2Vec2Encoder", "audio_encoder.init_args.weights=heard"], "heard, "),
    ],
)
def test_missing_weights_of_the_audio_encoder_are_named_with_the_missing_data(
    tmp_path, capsys, monkeypatch, options, looked
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    args = [f"--config={RECIPES / 'gaid.yaml'}", f"--data.init_args.root={tmp_path}"]
    args += [f"--model.init_args.{option}" for option in options]
    audio = "wav2vec2" if "heard" in looked else "whisper"
    assert main(["fit", *args, f"--data.init_args.audio={audio}"]) == 1
    said = capsys.readouterr().err
    assert str(tmp_path / "msrvtt" / "MSRVTT_data.json") in said
    assert looked in said


def test_a_method_within_another_misses_its_sound_weights_at_once(tmp_path, capsys, monkeypatch):
    options = ["data.init_args.audio=whisper", "model.init_args.micro=false", "model.init_args.method=GAID"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    args = [f"--config={RECIPES / 'dpdv-vqa.yaml'}", f"--data.init_args.root={tmp_path}"]
    assert main(["fit", *args, *(f"--{option}" for option in options)]) == 1
    said = capsys.readouterr().err
    assert "msrvtt" in said
    assert "whisper/base.pt" in said
    assert main(["fit", *args, *(f"--{option.replace('GAID', 'CLIP4Clip')}" for option in options)]) == 1
    assert "whisper" not in capsys.readouterr().err


def test_selecting_on_a_validation_split_that_does_not_exist_is_refused(fixture_root, tmp_path, capsys):
    assert main(["fit", *overlay(fixture_root, tmp_path, "--results.select_on=val")]) == 2
    assert "holdout" in capsys.readouterr().err


def test_limited_evaluation_is_marked_partial(fixture_root, tmp_path):
    # A share: whether "1" reads as one batch or as all depends on which library named the union of both types first.
    more = ("--trainer.limit_test_batches=0.5", "--data.init_args.eval_batch_size=2", "--trainer.max_epochs=1")
    assert main(["fit", *overlay(fixture_root, tmp_path, *more, "--trainer.limit_train_batches=1")]) == 0
    (path,) = tmp_path.glob("*/*/results.json")
    assert json.loads(path.read_text())["partial"] is True


def test_help_lists_every_verb(capsys):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    for verb in ("fit", "validate", "test", "predict", "data synth", "data check", "data stats"):
        assert f"  {verb} " in said


def test_unknown_verbs_are_errors(capsys):
    assert main(["train"]) == 2
    assert capsys.readouterr().err == "tvr: train is not a command. `tvr --help` lists all commands.\n"
    assert main(["data", "chek"]) == 2
    assert "data chek is not a command. Did you mean data check?" in capsys.readouterr().err


TYPOS = {
    "fitt": "fitt is not a command. Did you mean fit?",
    "fit --confg recipes/gare.yaml": "fit has no option --confg. Did you mean --config?",
    "fit --config recipes/gare.yaml --data.init_args.batchsize 3": "has no option batchsize. Available: batch_size",
    "fit --config recipes/gare.yaml --model.init_args.gare.poolin x": "there is no such option. Available: pooling",
    "fit --config recipes/gaer.yaml": "no such file; did you mean recipes/gare.yaml?",
    "index --numworker 3": "index has no option --numworker",
    "serve --index nowhere --max_upload_mb 3": "serve has no option",
    "extract --numworkers 3": "extract has no option --numworkers. Did you mean --num_workers?",
    "search --tpo 3 dog": "search has no option --tpo. Did you mean --top?",
    "reproduce gare1": "There is no table 'gare1'",
    "published --paper gari": "No published row has paper 'gari'",
    "audit --config recipes/gare.yaml --videos many": "audit: --videos is many; expected a whole number of at least 4",
    "extract --config clip4clip --parts smell": "--parts is smell; expected text, frames, patches, audio, pixels, or",
    "test": "No method is given. Name its recipe, such as --config tcmgc, or a checkpoint to evaluate (--ckpt_path).",
    "caption --config fixture": "No dataset is given. Name one before the overlays, such as --config data/msrvtt",
}


@pytest.mark.parametrize("words", TYPOS)
def test_a_typo_is_one_line_that_says_what_there_is(words, capsys, monkeypatch):
    monkeypatch.chdir(RECIPES.parent)
    assert main(words.split()) in (1, 2)
    said = capsys.readouterr().err
    assert said.startswith("tvr: ")
    assert TYPOS[words] in said
    assert len(said.splitlines()) == 1


BAD_STARTS = {
    "--ckpt_path=nowhere.ckpt": "nowhere.ckpt: no such checkpoint; looked for it at",
    "--ckpt_path=recipes": "recipes is a folder; name a checkpoint file. Shards in a folder cannot be read without",
    "--trainer.max_epochs=-1 --trainer.max_time=00:00:00:01": "trainer.max_epochs is -1. Set model.init_args.",
    "--results.select_on=val --data.init_args.holdout=4 --trainer.limit_val_batches=0": "limit_val_batches: 0, or",
    "--results.select_on=val --data.init_args.holdout=4 --trainer.enable_checkpointing=false": "enable_checkpointing",
    "--results.select_on=val --data.init_args.holdout=4 --trainer.check_val_every_n_epoch=2 --trainer.max_epochs=1": (
        "check_val_every_n_epoch: 2 and trainer.max_epochs: 1 writes none"
    ),
    "--trainer.strategy=ModelParallelStrategy --trainer.strategy.save_distributed_checkpoint=true": (
        "trainer.strategy: a checkpoint of shards cannot be read"
    ),
    "--checkpoints.resume=true --ckpt_path=last": "checkpoints.resume finds the checkpoint itself. Drop it or",
    "--data.init_args.batch_size=64": "batch_size 64 exceeds the 16 training samples, so that no complete batch exists",
    "--data.init_args.batch_size=0": "data.init_args.batch_size is 0; expected a whole number (at least 1)",
    "--trainer.precision=fp17": "trainer.precision is 'fp17'; expected 64, 32, 16",
    "--trainer.strategy=dpp": "invalid strategy name: `strategy='dpp'`",
    "--trainer.max_epochs=many": "trainer.max_epochs is 'many'; expected a whole number or null",
}


@pytest.mark.parametrize("words", BAD_STARTS)
def test_a_run_that_cannot_start_says_why_in_a_line_and_leaves_no_folder(words, fixture_root, tmp_path, capsys):
    # The last of an option counts.
    assert main(["fit", *overlay(fixture_root, tmp_path / "runs"), *words.split()]) in (1, 2)
    said = capsys.readouterr().err
    (line,) = [line for line in said.splitlines() if line.startswith("tvr: ")]
    assert BAD_STARTS[words] in line
    assert "Traceback" not in said
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").rglob("*"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_devices_that_are_not_there_are_said_in_a_line(fixture_root, tmp_path, capsys):
    assert main(["fit", *overlay(fixture_root, tmp_path / "runs"), "--trainer.accelerator=gpu"]) == 1
    assert capsys.readouterr().err.startswith("tvr: No supported gpu backend found")
    assert not (tmp_path / "runs").exists()


def test_the_help_of_training_fits_a_screen(capsys, monkeypatch):
    assert main(["fit", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 45
    assert max(map(len, lines)) <= 120
    assert any("gare" in line and "tcmgc" in line for line in lines)
    asked = {"--checkpoints.every_n_steps": ["--help_all"], "--model.gare": ["--model.help", "GARE"]}
    for option, words in asked.items():
        with pytest.raises(SystemExit) as ended:
            main(["fit", *words])
        assert ended.value.code == 0
        assert option in capsys.readouterr().out


def test_no_help_and_no_typo_waits_for_torch():
    asked = [["--help"], ["--version"], ["fit", "--help"], ["index", "--ckpy_path", "x"], ["evaluat"]]
    asked += [[*command.name.split(), "--help"] for command in COMMANDS]
    program = (
        "import sys\nfrom tvr_lightning.cli import main\n"
        f"for words in {asked!r}:\n    try:\n        main(words)\n    except SystemExit:\n        pass\n"
        "    assert 'torch' not in sys.modules and 'numpy' not in sys.modules, words\n"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert said.stderr.splitlines() == [
        "tvr: index has no option --ckpy_path. Did you mean --ckpt_path? `tvr index --help` lists all options.",
        "tvr: evaluat is not a command. Did you mean evaluate? `tvr --help` lists all commands.",
    ]


def test_a_reader_that_goes_away_is_no_error(ended):
    program = "import sys; from tvr_lightning.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "fit", "--help"]
    process = ended(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    process.stdout.close()  # as `head` does when it has enough
    assert process.stderr.read() == ""
    assert process.wait() == 141


def test_a_lost_connection_besides_is_an_error():
    lost = "def lost(*arguments): raise BrokenPipeError(32, 'a worker is gone')"
    program = (
        f"import sys\nimport tvr_lightning.cli.main\n{lost}\ncli = sys.modules['tvr_lightning.cli.main']\n"
        "cli.run = lost\nsys.exit(cli.main())"
    )
    done = subprocess.run([sys.executable, "-c", program, "published"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "a worker is gone" in done.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_help_of_a_command_describes_every_option(command, capsys):
    actions = parser_of(command)._actions
    taken = {name for action in actions for name in action.option_strings if name.startswith("--")}
    assert main([*command.name.split(), "--help"]) == 0
    said = capsys.readouterr().out
    options = said.partition("options:")[2].partition("\n\n")[0]
    assert set(re.findall(r"(?<=\n  )(?:-h, )?(--[\w-]+)", options)) == {name for name in taken if "+" not in name}
    assert max(map(len, said.splitlines())) < 120
    assert all(action.help for action in actions)


def test_a_shell_completes_commands_and_options(capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert "--min_relevance" in script
    assert "compress" in script
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_help_keeps_an_ellipsis_and_lists_choices_once(capsys):
    assert main(["verify-released", "--help"]) == 0
    assert "xpool.pth, gare.bin, ... options:" in " ".join(capsys.readouterr().out.split())
    assert main(["data", "download", "--help"]) == 0
    said = capsys.readouterr().out
    assert said.count("msrvtt") == 1
    assert "lsmdc" not in said


def test_verbs_that_take_recipes_take_their_options(fixture_root, tmp_path, capsys):
    data = ["--data.init_args.root", str(fixture_root), "--data.init_args.num_workers=0"]
    recipes = ["--config", str(RECIPES / "clip4clip.yaml"), "--config", str(RECIPES / "fixture.yaml")]
    assert main(["data", "stats", *recipes, *data, "--data.init_args.split=full", "--num_workers", "1"]) == 0
    whole = capsys.readouterr().out
    assert main(["data", "stats", *recipes, *data, "--num_workers", "1"]) == 0
    assert whole != capsys.readouterr().out
    assert (
        main(["audit", *recipes, *data, "--videos", "8", "--model.init_args.evaluation.normalization=DualSoftmax"]) == 0
    )
    assert "uses the whole set of test queries" in capsys.readouterr().out
    out = str(tmp_path / "features")
    small = ["--model.init_args.encoder.init_args.width=64", "--parts=text", "--parts", "frames", "--num_workers=0"]
    assert main(["extract", *recipes, *data, *small, "--out", out]) == 0


class Watched(io.StringIO):
    """Takes what is said, and when."""

    def __init__(self):
        super().__init__()
        self.times = [time.monotonic()]

    def write(self, text):
        self.times.append(time.monotonic())
        return super().write(text)


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        ("data check --num_workers 1", "checking MSR-VTT: "),
        ("audit --videos 4", "audit: scoring the same pairs of up to 4 videos repeatedly, 0:00:0"),
        (
            "caption --splits test --segments 2 --frames 1 --num_workers 0 --out {out} --model {model}",
            "loading {model}",
        ),
    ],
)
def test_no_verb_is_silent_for_long(verb, said, fixture_root, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0.02)  # in the place of ten
    out = Watched()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", out)
    named = {"out": tmp_path / "captions.parquet", "model": tmp_path / "captioner"}
    if "{model}" in verb:
        save_tiny_captioner(named["model"])
    recipes = [f"--config={RECIPES / 'clip4clip.yaml'}", f"--config={RECIPES / 'fixture.yaml'}"]
    assert main([*verb.format(**named).split(), *recipes, f"--data.init_args.root={fixture_root}"]) == 0
    assert said.format(**named) in out.getvalue()
    times = [*out.times, time.monotonic()]
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) < 5


def test_missing_data_names_what_works_now_by_the_same_verb(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("TVR_DATA", raising=False)
    gare = str(RECIPES / "gare.yaml")
    assert main(["audit", "--config", gare]) == 1
    assert f"tvr audit --config {gare} --config recipes/fixture.yaml" in capsys.readouterr().err
