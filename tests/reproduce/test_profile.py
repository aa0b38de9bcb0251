"""Costs of a method and of a run: FLOPs and parameters computed by hand, `tvr profile`, and `tvr fit --estimate`."""

import time
from types import SimpleNamespace

import pytest
import torch
from run_cards import RECIPES

from tvr_lightning.cli import main
from tvr_lightning.config.recipe import Recipe
from tvr_lightning.data.msrvtt import MSRVTT
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.evaluation.normalization import QueryBankNorm
from tvr_lightning.methods import GAID, GARE, NCL, CLIP4Clip
from tvr_lightning.methods.gaid.options import GAIDOptions, NoFusion
from tvr_lightning.methods.gare.options import GAREOptions
from tvr_lightning.reproduce.profile.costs import count_flops, measure_costs, random_batch, read_profiles
from tvr_lightning.reproduce.profile.estimate import (
    activation_bytes,
    count_evaluation,
    count_training,
    estimate,
    prepare,
    saved_bytes,
)
from tvr_lightning.training.optim import OptimizerConfig

WIDTH, FRAMES, WORDS = 64, 4, 16
PATCHES = (32 // 16) ** 2


def module(kind, width=WIDTH, **options):
    torch.manual_seed(0)
    encoder = TinyClipEncoder(width, 32, text_layers=1, vision_layers=1, patch_size=16)
    return kind(encoder, words=WORDS, frames=FRAMES, **options)


def flops(made, pairs=2):
    return count_flops(made, random_batch(made, pairs))


def test_scoring_cosines_costs_one_product_and_training_three_forward_passes():
    found = flops(module(CLIP4Clip), 3)
    assert found["score"] == 2 * 3 * 3 * WIDTH
    assert found["text_layers"] == found["video_layers"] == 0
    found = flops(module(CLIP4Clip))
    forward = sum(value for stage, value in found.items() if stage != "training_step")
    assert 2.2 <= found["training_step"] / forward <= 3.1


@pytest.mark.parametrize("width", [64, 128])
def test_fused_attention_is_counted_in_the_costs_of_the_video_encoder(width):
    """Torch fuses attention of an even number of heads, which a counter of operations does not see."""
    images, tokens = 2 * FRAMES, 1 + PATCHES
    maps = 3 + 1 + 4 + 4  # D x D: queries, keys and values; the output; out to 4 D; and back
    layer = 2 * images * tokens * maps * width**2 + 2 * 2 * images * tokens**2 * width
    convolution, projection = 2 * images * PATCHES * 3 * 16**2 * width, 2 * images * width**2
    assert flops(module(CLIP4Clip, width))["encode_video"] == layer + convolution + projection
    assert torch.backends.mha.get_fastpath_enabled()


def test_parameters_are_counted_once_and_frozen_ones_separately():
    made = module(GARE, gare=GAREOptions(temporal_layers=1))
    made.temporal.requires_grad_(False)
    found = measure_costs(made, random_batch(made, 2), queries=8, videos=2, repeats=1)
    assert found.parameters == sum(p.numel() for p in made.parameters())
    assert found.parameters - found.trainable == sum(p.numel() for p in made.temporal.parameters())
    assert flops(made)["video_layers"] > 0


def test_scoring_a_video_takes_the_time_of_all_queries_against_it():
    made, seconds = module(CLIP4Clip), 5e-5
    score = made.score

    def slow(text, video):
        time.sleep(seconds * len(text) * len(video))
        return score(text, video)

    made.score = slow
    found = measure_costs(made, random_batch(made, 2), queries=100, videos=10, repeats=1)
    assert 1 <= found.score_ms_per_video / (1000 * seconds * 100) < 5


def test_audio_is_part_of_encoding_a_video():
    made = module(GAID)
    batch = random_batch(made, 2)
    assert batch.video.video.audio.mask.all()
    fused, silent = count_flops(made, batch), flops(module(GAID, gaid=GAIDOptions(fusion=NoFusion())))
    assert fused["encode_video"] > silent["encode_video"]
    assert fused["encode_text"] == silent["encode_text"]


def test_costs_are_measured_with_the_given_precision_and_gradient_cache():
    made = module(CLIP4Clip, optimizer=OptimizerConfig(gradient_cache=1))
    kinds, encoded, text, pair = [], [], made.text_features, made.pair_features

    def text_features(given):
        kinds.append(torch.is_autocast_enabled("cpu"))
        return text(given)

    def pair_features(given):
        encoded.append(len(given.text.text))
        return pair(given)

    made.text_features, made.pair_features = text_features, pair_features
    measure_costs(made, random_batch(made, 2), 4, 2, 1, lambda: torch.autocast("cpu", torch.bfloat16))
    assert True in kinds  # timed; operations are counted without
    assert set(encoded) == {1}


def test_a_recipe_is_profiled_without_its_dataset(tmp_path, capsys):
    overlay = tmp_path / "tiny.yaml"
    overlay.write_text(
        "trainer: {precision: bf16-mixed}\n"
        "model: {init_args: {encoder: {init_args: {width: 64, image_size: 32, vision_layers: 1}}}}\n"
        f"data: {{init_args: {{root: {tmp_path / 'nowhere'}, frames: 4}}}}\n"
    )
    words = [f"--config={path}" for path in (RECIPES / "dpdv.yaml", RECIPES / "fixture.yaml", overlay)]
    words += ["--out", str(tmp_path), "--queries", "4", "--repeats", "1", "--batch_size", "2"]
    assert main(["profile", *words]) == 0
    (card,) = read_profiles(tmp_path / "profiles")
    assert (card.method, card.batch, card.queries) == ("DPDV", 2, 4)
    assert card.precision == "bf16-mixed"
    assert card.options["class_path"].endswith("DPDV")
    assert f"{card.costs.parameters / 1e6:.2f}" in capsys.readouterr().out


def words(root, *further):
    """Options of a run of four epochs; an epoch of the 12 training videos has four batches."""
    return [
        "--config=clip4clip", "--config=fixture",
        f"--data.init_args.root={root}", "--data.init_args.num_workers=0", "--data.init_args.frames=3",
        "--data.init_args.batch_size=3", "--model.init_args.encoder.init_args.width=64", "--trainer.max_epochs=4",
        "--model.init_args.released_devices=null", "--trainer.accelerator=cpu", *further,
    ]  # fmt: skip


def estimated(root, *further):
    return estimate(Recipe.parse([], words(root, *further)))


@pytest.fixture(scope="module")
def recipe(msrvtt):
    """A recipe that builds its method and data once."""
    recipe = Recipe.parse([], words(msrvtt, "--trainer.check_val_every_n_epoch=1"))
    built = recipe.build()
    recipe.build = lambda: built
    return recipe


def test_the_estimate_prints_what_a_run_needs_and_writes_nothing(msrvtt, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["fit", *words(msrvtt), "--estimate"]) == 0
    printed = capsys.readouterr().out
    assert "CLIP4Clip on MSR-VTT: requirements of a run" in printed
    assert "GB, estimated from small batches on the CPU" in printed
    assert "for 16 batches, 16 steps, and 4 epochs, including" in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "batches", "steps", "epochs", "validations"),
    [
        ({}, 16, 16, 4, 4),
        ({"limit_train_batches": 0.5}, 8, 8, 4, 4),
        ({"accumulate_grad_batches": 3}, 16, 8, 4, 4),
        ({"accumulate_grad_batches": 2, "max_steps": 3}, 6, 3, 1.5, 1),
        ({"check_val_every_n_epoch": 2}, 16, 16, 4, 2),
        ({"val_check_interval": 0.5}, 16, 16, 4, 8),
        ({"val_check_interval": 3, "check_val_every_n_epoch": None}, 16, 16, 4, 5),
        ({"limit_val_batches": 0}, 16, 16, 4, 0),
        ({"devices": 2}, 16, 16, 4, 4),
    ],
)
def test_limits_and_validations_are_counted(recipe, monkeypatch, options, batches, steps, epochs, validations):
    for name, value in options.items():
        monkeypatch.setitem(recipe.config.trainer, name, value)
    trainer = prepare(recipe)[2]
    assert count_training(trainer) == (batches, epochs, validations)
    assert trainer.estimated_stepping_batches == steps


def test_a_run_without_an_end_is_refused(recipe, monkeypatch):
    monkeypatch.setitem(recipe.config.trainer, "max_epochs", -1)
    with pytest.raises(UserError, match=r"The run has no end\. Set trainer\.max_epochs"):
        estimate(recipe)


@pytest.mark.parametrize(
    ("split", "limit", "options", "expected"),
    [
        ("val", 1, {}, (3, 3, 9)),
        ("test", 0.8, {}, (3, 3, 9)),
        ("test", 1, {"bank_size": 5}, (3 + 5, 3 + 5, 9 + 5 * 3 + 3 * 5)),
        ("test", 1, {"queue_size": 7}, (3, 3, 9 + 7 * 3 + 3 * 7)),
    ],
)
def test_evaluations_count_limits_and_banks(msrvtt, split, limit, options, expected):
    normalization = QueryBankNorm() if options else None
    config = EvaluationConfig(normalization=normalization, bank_size=options.get("bank_size", 16384))
    contrast = NCL(queue_size=options["queue_size"]) if "queue_size" in options else None
    encoder = TinyClipEncoder(64, text_layers=1, vision_layers=1)
    method = CLIP4Clip(encoder, words=16, frames=3, evaluation=config, contrast=contrast)
    data = MSRVTT(root=str(msrvtt), frames=3, eval_batch_size=3, num_workers=0)
    assert count_evaluation(method, data, split, limit) == expected


def test_time_and_memory_depend_on_what_is_counted(msrvtt, recipe, monkeypatch):
    found = estimate(recipe)
    assert "NOT ENOUGH" not in found.text
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1e5))
    without = estimated(msrvtt, "--trainer.limit_val_batches=0", "--model.init_args.evaluation.audit=0")
    assert "0 GB free: NOT ENOUGH" in without.text
    assert without.evaluation_seconds < found.evaluation_seconds < found.seconds
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in recipe.build().model.parameters()]
    assert found.memory > 4 * (sum(size for size, _ in sizes) + 3 * sum(size for size, trained in sizes if trained))


def test_activations_of_a_whole_batch_are_estimated_from_small_ones(recipe):
    method, _, trainer = prepare(recipe)
    context = trainer.precision_plugin.forward_context
    batch = random_batch(method, 8)
    expected = saved_bytes(method, random_batch(method, 32), context)
    assert activation_bytes(method, batch, 32, context) == pytest.approx(expected, rel=0.1)


@pytest.mark.slow
def test_a_run_takes_within_a_factor_of_two_of_its_estimate(synthetic, tmp_path):
    root = synthetic("msrvtt", 40)
    further = (
        "--data.init_args.batch_size=8",
        "--trainer.max_epochs=30",
        f"--results.directory={tmp_path}",
        "--trainer.enable_progress_bar=false",
    )
    expected = estimated(root, *further).seconds
    began = time.perf_counter()
    assert main(["fit", *words(root, *further)]) == 0
    taken = time.perf_counter() - began
    assert taken / 2 < expected < taken * 2
