"""Costs of a method: FLOPs and parameters computed by hand, and the profile command."""

import time

import pytest
import torch
from run_cards import RECIPES

from tvr_lightning.cli import main
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.methods import GAID, GARE, CLIP4Clip
from tvr_lightning.methods.gaid.options import GAIDOptions, NoFusion
from tvr_lightning.methods.gare.options import GAREOptions
from tvr_lightning.reproduce.profile.costs import count_flops, measure_costs, random_batch, read_profiles
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
