"""The encoder of docs/adding-an-encoder.md: features, training, feature store, and search."""

import json
from pathlib import Path

import pytest
import torch
from examples.color_grid_encoder import ColorGridEncoder

from tvr_lightning.cli import main
from tvr_lightning.data.batch import Media
from tvr_lightning.encoders import MissingWeightsError
from tvr_lightning.encoders.pretrained import weights_follow
from tvr_lightning.synthetic import synthesize

HERE = Path(__file__).parent
RECIPE, FEATURES = HERE / "color_grid_encoder.yaml", HERE.parent.parent / "recipes" / "features.yaml"


@pytest.fixture
def encoder() -> ColorGridEncoder:
    torch.manual_seed(0)
    return ColorGridEncoder(dimension=16, image_size=16).eval()


def media(videos: int, side: int = 16) -> Media:
    pixels = torch.arange(videos * 9 * side * side).reshape(videos, 3, 3, side, side)
    return Media((pixels % 251).byte(), torch.ones(videos, 3, dtype=torch.bool))


@torch.no_grad()
def test_features_have_their_shapes_masks_and_type_and_items_are_independent(encoder):
    captions = ["a dog", "a red ball moves"]
    text, video = encoder.encode_text(captions, 8), encoder.encode_video(media(2), patches=True)
    assert (text.sentence.shape, text.words.shape) == ((2, 16), (2, 8, 16))
    assert text.word_mask.sum(1).tolist() == [4, 6]
    assert (video.frames.shape, video.patches.shape) == ((2, 3, 16), (2, 3, 4, 16))
    torch.testing.assert_close(text.sentence[:1], encoder.encode_text(captions[:1], 8).sentence)
    alone = encoder.encode_video(media(2)[:1])
    torch.testing.assert_close(video.frames[:1], alone.frames)
    assert alone.patches is None
    with torch.autocast("cpu", torch.bfloat16):
        text, video = encoder.encode_text(captions, 8), encoder.encode_video(media(2), patches=True)
    assert {tensor.dtype for tensor in (text.sentence, text.words, video.frames, video.patches)} == {torch.float32}


def test_the_fingerprint_follows_weights_and_configuration(encoder):
    before = encoder.fingerprint()
    assert before == encoder.fingerprint()
    encoder.pixel_mean += 0.1
    assert encoder.fingerprint() != before
    encoder.pixel_mean -= 0.1
    encoder.place.data += 1
    assert encoder.fingerprint() != before


def test_words_and_frames_that_do_not_fit_are_cut_or_refused(encoder):
    assert encoder.encode_text(["a dog"], 78).words.shape[1] == 77
    with pytest.raises(ValueError, match="words is 2"):
        encoder.encode_text(["a dog"], 2)
    with pytest.raises(ValueError, match="the encoder takes"):
        encoder.encode_video(media(1, side=24))


def test_weights_come_from_their_file_or_from_a_checkpoint(encoder, tmp_path):
    path = tmp_path / "weights.pt"
    torch.save(encoder.state_dict(), path)
    again = ColorGridEncoder(dimension=16, image_size=16, weights=str(path))
    assert again.fingerprint() == encoder.fingerprint()
    path.unlink()
    with pytest.raises(MissingWeightsError, match="looked for"):
        ColorGridEncoder.required_files(weights=str(path))
    with weights_follow():
        assert ColorGridEncoder.required_files(weights=str(path)) == []


def test_it_trains_is_extracted_and_searches(tmp_path, capsys, caplog):
    synthesize("msrvtt", tmp_path, 16, 0, workers=1, progress=False)
    store, weights = tmp_path / "features", tmp_path / "encoder.pt"
    options = [
        f"--data.init_args.root={tmp_path}", "--data.init_args.batch_size=8", "--data.init_args.num_workers=0",
        "--data.init_args.frames=2", "--trainer.accelerator=cpu", "--trainer.log_every_n_steps=1",
        "--trainer.max_steps=10", "--trainer.enable_progress_bar=false",
    ]  # fmt: skip
    fit = ["fit", f"--config={RECIPE}", *options, "--model.init_args.optimizer.gradient_cache=4"]
    assert main([*fit, f"--results.directory={tmp_path / 'runs'}"]) == 0
    (run,) = (tmp_path / "runs").glob("*/version_0")
    assert json.loads((run / "results.json").read_text())["audit"]["passed"] is True

    state = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    named = {name.removeprefix("encoder."): value for name, value in state.items() if name.startswith("encoder.")}
    torch.save(named, weights)
    options.append(f"--model.init_args.encoder.init_args.weights={weights}")
    extract = ["extract", f"--config={RECIPE}", *options, "--out", str(store), "--device=cpu"]
    assert main([*extract, "--num_workers=0"]) == 0
    heads = ["fit", f"--config={RECIPE}", f"--config={FEATURES}", *options, f"--data.init_args.features={store}"]
    assert main([*heads, f"--results.directory={tmp_path / 'heads'}"]) == 0
    assert f"features from the store {store}: text, frames;" in caplog.text

    videos, out = sorted(map(str, (tmp_path / "msrvtt" / "videos").iterdir()))[:3], str(tmp_path / "index")
    trust, checkpoint = ["--trust", "examples.color_grid_encoder"], str(run / "checkpoints" / "last.ckpt")
    assert main(["index", *videos, "--out", out, "--ckpt_path", checkpoint, *trust]) == 0
    capsys.readouterr()
    assert main(["search", "a red ball", "--index", out, "--top", "1", *trust]) == 0
    assert Path(videos[0]).parent.name in capsys.readouterr().out
