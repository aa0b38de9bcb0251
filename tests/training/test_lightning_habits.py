"""Features in Lightning's documentation work, or are refused with a clear error before the first step.

Every test is a row of the table in docs/lightning.md.
"""

import csv
import math
import re
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner import Tuner
from small_run import small_run
from torch.utils.data import DataLoader

from tvr_lightning.cli import main
from tvr_lightning.config.recipe import Recipe
from tvr_lightning.data.batch import TextBatch, VideoBatch
from tvr_lightning.data.ground_truth import GroundTruth
from tvr_lightning.errors import UserError
from tvr_lightning.testing.processes import quiet_trainer
from tvr_lightning.testing.small import random_pairs, small

RECIPE = Path(__file__).parents[2] / "recipes" / "clip4clip.yaml"
FSDP2 = (
    "--trainer.strategy={class_path: lightning.pytorch.strategies.ModelParallelStrategy, "
    "init_args: {save_distributed_checkpoint: false}}"
)
EMA = "--trainer.callbacks+=EMAWeightAveraging"


PAGE = (Path(__file__).parents[2] / "docs" / "lightning.md").read_text(encoding="utf-8")
CALLBACK, SWEEP, OPTUNA, PLAIN = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
exec(CALLBACK)  # defines UnfreezeLater


class Stop(Callback):
    """Callback of a user that may log anything, so that its metrics are not checked in advance."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.log("mine", 1.0)


def fit(root, runs, *options):
    """Return the exit status of a run of six steps."""
    return main(["fit", *small_run(root, runs, *options)])


def only_run(runs):
    (run,) = runs.glob("*/version_0")
    return run


REFUSED = {
    "ddp_spawn": (["--trainer.strategy=ddp_spawn", "--trainer.devices=2"], "processes that end with the training"),
    "FSDP1": (["--trainer.strategy=fsdp"], "strategy fsdp (FSDP1) cannot clip the norm of gradients"),
    "NCL with EMA": (["--model.init_args.contrast=NCL", EMA], "cannot average the queues of NCL"),
    "EMA with SWA": (
        [EMA, "--trainer.callbacks+=StochasticWeightAveraging", "--trainer.callbacks.swa_lrs=0.1"],
        "EMAWeightAveraging and StochasticWeightAveraging both average",
    ),
    "EMA with FSDP2": ([EMA, FSDP2, "--trainer.devices=1"], "shards"),
    "sync_batchnorm with FSDP2": (
        ["--trainer.sync_batchnorm=true", FSDP2, "--trainer.devices=1"],
        "no effect under ModelParallelStrategy",
    ),
    "a mistyped callback": (["--trainer.callbacks+=EarlyStoping"], "Did you mean EarlyStopping?"),
    "a missing module": (["--trainer.callbacks+=nowhere.Stop"], "'nowhere.Stop': No module named 'nowhere'"),
    "BackboneFinetuning": (["--trainer.callbacks+=BackboneFinetuning"], "derive a callback from BaseFinetuning"),
    "EarlyStopping": (
        ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/R1"],
        "EarlyStopping monitors val/R1, which this run does not log. Available: val/SumR",
    ),
    "EarlyStopping without validation": (
        [
            "--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/t2v_R@1",
            "--trainer.limit_val_batches=0",
        ],
        "Available: no metrics, train/loss",
    ),
    "default_root_dir": (["--trainer.default_root_dir=root"], "--results.directory=FOLDER"),
    "barebones": (["--trainer.barebones=true"], "Trainer(barebones=True)"),
    "AsyncCheckpointIO": (["--trainer.plugins+=AsyncCheckpointIO"], "AsyncCheckpointIO would replace the writer"),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED)
def test_is_refused_in_a_sentence_before_the_first_step(row, msrvtt, tmp_path, capsys):
    options, sentence = REFUSED[row]
    assert fit(msrvtt, tmp_path / "runs", *options) == 2
    refusal = capsys.readouterr().err.strip().splitlines()[-1]
    assert refusal.startswith("tvr: ")
    assert sentence in refusal
    assert not list(tmp_path.glob("runs/*/*"))  # no step was taken


def test_overfit_batches_repeats_the_batches(msrvtt):
    model, data = small(RECIPE, root=str(msrvtt))
    seen = []
    model.on_train_batch_start = lambda batch, index: seen.append(batch.video.video_id)
    quiet_trainer(overfit_batches=1, max_epochs=3).fit(model, datamodule=data)
    assert len(seen) == 3
    assert seen[0] == seen[1] == seen[2]


def test_callbacks_and_profilers_report_in_a_run(msrvtt, tmp_path):
    options = [
        "--trainer.callbacks+=Timer", "--trainer.callbacks.duration={microseconds: 1}", "--trainer.profiler=simple",
        "--trainer.callbacks+=TQDMProgressBar", "--trainer.enable_progress_bar=true",
    ]  # fmt: skip
    assert fit(msrvtt, tmp_path, *options) == 0
    log = (only_run(tmp_path) / "log.txt").read_text()
    assert "FIT Profiler Report" in log
    assert "Time limit reached" in log
    saved = yaml.safe_load((only_run(tmp_path) / "config.yaml").read_text())
    assert saved["trainer"]["callbacks"][0]["init_args"]["interval"] == "step"


def test_a_limited_gallery_is_marked_and_a_fast_run_writes_nothing(msrvtt, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    limit = ["--data.init_args.eval_batch_size=2", "--trainer.limit_test_batches=1"]
    assert fit(msrvtt, Path("runs"), *limit, "--trainer.max_epochs=1") == 0
    assert "PARTIAL" in capsys.readouterr().out
    assert fit(msrvtt, Path("fast"), "--trainer.fast_dev_run=true") == 0
    assert "writes to" not in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_an_encoder_that_a_callback_unfreezes_later_follows_the_schedule(msrvtt, tmp_path):
    options = [f"--trainer.callbacks+={__name__}.UnfreezeLater", "--trainer.max_epochs=3"]
    assert fit(msrvtt, tmp_path, *options, "--model.init_args.optimizer.schedule=constant") == 0
    checkpoint = torch.load(only_run(tmp_path) / "checkpoints" / "last.ckpt", weights_only=True)
    groups = checkpoint["optimizer_states"][0]["param_groups"]
    assert groups[-1]["lr"] == pytest.approx(2e-5)
    assert any(name.startswith("encoder.") for name in groups[-1]["params"])


def test_metrics_of_own_callbacks_may_be_monitored(msrvtt, tmp_path):
    options = [f"--trainer.callbacks+={__name__}.Stop", "--trainer.callbacks+=EarlyStopping"]
    assert fit(msrvtt, tmp_path, *options, "--trainer.callbacks.monitor=mine", "--trainer.max_epochs=1") == 0


def test_tensorboard_gets_hyperparameters_and_final_metrics_once(msrvtt, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    assert fit(msrvtt, tmp_path, "--trainer.max_epochs=1") == 0
    run = only_run(tmp_path)
    content = EventAccumulator(str(run)).Reload()
    hparams = {
        tag: plugin_data_pb2.HParamsPluginData.FromString(data)
        for tag, data in content.PluginTagToContent("hparams").items()
    }
    start = hparams["_hparams_/session_start_info"].session_start_info.hparams
    assert start["model.init_args.optimizer.lr"].number_value == 1e-3
    assert start["model.class_path"].string_value == "CLIP4Clip"
    assert start["data.init_args.batch_size"].number_value == 4
    metrics = {info.name.tag for info in hparams["_hparams_/experiment"].experiment.metric_infos}
    assert {"test/t2v_R@1", "train/loss"} <= metrics
    with (run / "metrics.csv").open() as file:
        logged = [row["test/t2v_R@1"] for row in csv.DictReader(file) if row["test/t2v_R@1"]]
    assert content.Scalars("test/t2v_R@1")[-1].value == pytest.approx(float(logged[-1]))
    saved = yaml.safe_load((run / "hparams.yaml").read_text())
    assert saved["model.init_args.optimizer.lr"] == 1e-3


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_the_example_of_a_sweep_returns_the_metric_of_a_learning_rate(msrvtt, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = small_run(msrvtt, tmp_path)
    Path("recipe.yaml").write_text(yaml.safe_dump(Recipe.parse([], options).plain()))
    exec(SWEEP, example := {})
    assert example["score"](1e-3) in (0.0, 25.0, 50.0, 75.0, 100.0)
    saved = yaml.safe_load(Path("lightning_logs/version_0/hparams.yaml").read_text())
    assert saved["model.init_args.optimizer.lr"] == 1e-3


def test_the_example_with_optuna_finds_the_best_learning_rate():
    pytest.importorskip("optuna")
    exec(OPTUNA, example := {"score": lambda lr: -abs(math.log(lr / 1e-4))})
    assert 1e-5 < example["study"].best_params["lr"] < 1e-3


# A module under a plain Trainer


class Batches(list):
    """Dataset of a user's own loader."""

    ground_truth = None


def loader(*batches, truth=None):
    dataset = Batches(batches)
    dataset.ground_truth = truth
    return DataLoader(dataset, batch_size=None)


def own_loaders(pairs, truth=None):
    """Loaders of six texts and six videos, in another order than the texts."""
    order = torch.randperm(len(pairs.text), generator=torch.Generator().manual_seed(0))
    texts = TextBatch(pairs.text.text, torch.arange(len(pairs.text)))
    videos = VideoBatch(pairs.video.video[order], order, [str(place) for place in order.tolist()])
    return [loader(texts, truth=truth), loader(videos)]


TRUTH = GroundTruth(torch.arange(6), 6, dataset="mine", split="val", protocol="mine")


class OwnData(LightningDataModule):
    """Data module of a user without any class of this project."""

    def __init__(self, pairs):
        super().__init__()
        self.pairs = pairs

    def train_dataloader(self):
        return loader(self.pairs)

    def val_dataloader(self):
        return own_loaders(self.pairs)

    def ground_truth(self, stage):
        return TRUTH


@pytest.fixture
def model():
    return small(RECIPE)[0]


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.filterwarnings("ignore:The number of training batches")
class TestPlainTrainer:
    """Every test uses Lightning's own Trainer."""

    def test_ranks_own_loaders_with_a_ground_truth(self, model):
        pairs = random_pairs(model, 6)
        plain = quiet_trainer(max_epochs=1)
        plain.fit(model, loader(pairs), own_loaders(pairs, TRUTH))
        own = plain.validate(model, own_loaders(pairs, TRUTH), verbose=False)
        by_data = plain.validate(model, datamodule=OwnData(pairs), verbose=False)
        assert own == by_data
        assert own[0] == own[1]  # one dictionary per loader, as documented
        assert own[0].keys() == {f"val/{name}" for name in model.logged_metrics}
        matrix = model.score(model.text_features(pairs.text), model.video_features(pairs.video)).similarity
        expected = 100.0 * float((matrix.argmax(1) == torch.arange(6)).float().mean())
        assert own[0]["val/t2v_R@1"] == pytest.approx(expected)

    @pytest.mark.parametrize(
        ("truth", "sentence"),
        [
            (None, "have no ground truth"),
            (GroundTruth(torch.arange(4), 6, "mine", "val", "mine"), "index 4, but the ground truth has 4 texts"),
            (GroundTruth(torch.arange(6) % 5, 5, "mine", "val", "mine"), "index 5, but the ground truth has 5 videos"),
        ],
    )
    def test_refuses_what_no_ground_truth_covers_before_encoding_it(self, truth, sentence, model):
        pairs = random_pairs(model, 6)
        with pytest.raises(UserError, match=sentence):
            quiet_trainer().validate(model, own_loaders(pairs, truth), verbose=False)
        assert not model.encoded.videos

    def test_validates_the_loss_of_pairs_alone(self, model, caplog):
        pairs = random_pairs(model, 6)
        with caplog.at_level("INFO"):
            (found,) = quiet_trainer().validate(model, loader(pairs, pairs), verbose=False)
        assert caplog.text.count("Only the loss is validated") == 1
        with torch.no_grad():
            expected = sum(model.losses(model.pair_features(pairs)).values())
        assert found == {"val/loss": pytest.approx(float(expected), rel=1e-5)}

    def test_finds_a_learning_rate(self, model, tmp_path):
        pairs = random_pairs(model, 6)
        options = {"max_epochs": 1, "default_root_dir": tmp_path}
        plain = quiet_trainer(callbacks=[LearningRateFinder(num_training_steps=20)], **options)
        before = model.optimizer_config
        plain.fit(model, loader(*[pairs] * 30))
        assert model.lr != before.lr
        assert model.hparams["optimizer"]["lr"] == model.lr == model.optimizer_config.lr
        assert model.optimizer_config.encoder_lr == before.encoder_lr
        groups, peaks = plain.optimizers[0].param_groups, plain.lr_scheduler_configs[0].scheduler.base_lrs
        found = {group["name"].partition(",")[0]: peak for group, peak in zip(groups, peaks, strict=True)}
        assert found == {"method": model.lr, "encoder": before.encoder_lr}
        found = Tuner(quiet_trainer(**options)).lr_find(model, loader(*[pairs] * 30), num_training=20)
        assert found.suggestion() == pytest.approx(model.lr)

    def test_runs_the_example(self, model, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        pairs = random_pairs(model, 6)
        text_loader, video_loader = own_loaders(pairs, TRUTH)
        given = {"model": model, "pair_loader": loader(pairs), "text_loader": text_loader, "video_loader": video_loader}
        exec(PLAIN, given)
        assert "val/t2v_R@1" in model.trainer.callback_metrics

    def test_runs_barebones(self, model):
        with pytest.warns(UserWarning, match="barebones"):
            Trainer(barebones=True, accelerator="cpu", max_steps=1).fit(model, loader(random_pairs(model, 6)))
