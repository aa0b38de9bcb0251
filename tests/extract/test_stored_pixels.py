"""Stored frames replace decoding: the same batches and the same training, and random sampling is refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tvr_lightning.cli import main
from tvr_lightning.data.msrvtt import MSRVTT
from tvr_lightning.encoders.tiny import TinyClipEncoder
from tvr_lightning.errors import UserError
from tvr_lightning.extract.plan import ExtractOptions, source_of_data
from tvr_lightning.extract.run import extract
from tvr_lightning.extract.verify import verify
from tvr_lightning.media.container import VideoError
from tvr_lightning.store import FeatureStore, StoreError, StoreWriter
from tvr_lightning.synthetic import synthesize

RECIPES = Path(__file__).parent.parent.parent / "recipes"
DATA = {"frames": 3, "words": 12, "image_size": 32, "batch_size": 4, "eval_batch_size": 3, "num_workers": 0}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("pixels")
    synthesize("msrvtt", root, 12, 0, workers=1, progress=False)
    return root


def encoder() -> TinyClipEncoder:
    return TinyClipEncoder(width=64, image_size=32, text_layers=1, vision_layers=1)


def stored(root: Path, out: Path, **changes) -> ExtractOptions:
    options = ExtractOptions(str(out), what=["pixels"], batch_size=2, shard_size=4, num_workers=0, progress=False)
    extract(source_of_data(MSRVTT(root=str(root), **{**DATA, **changes})), encoder(), None, options)
    return options


@pytest.fixture(scope="module")
def store(root, tmp_path_factory) -> ExtractOptions:
    return stored(root, tmp_path_factory.mktemp("store"))


@pytest.mark.parametrize("antialias", [True, False])
def test_batches_are_those_of_the_videos(root, tmp_path, antialias):
    out = stored(root, tmp_path, antialias=antialias).out
    decoded = MSRVTT(root=str(root), antialias=antialias, **DATA)
    read = MSRVTT(root=str(root), antialias=antialias, pixels=out, **{**DATA, "num_workers": 1})
    for data in (decoded, read):
        data.setup("fit")
    for one, other in zip(decoded.train_dataloader(), read.train_dataloader(), strict=True):
        assert one.video.video_id == other.video.video_id
        assert one.video.video.pixels.dtype == other.video.video.pixels.dtype
        assert torch.equal(one.video.video.pixels, other.video.video.pixels)
        assert torch.equal(one.video.video.frame_mask, other.video.video.frame_mask)
        assert one.text.text == other.text.text


def test_training_from_pixels_ends_in_the_same_weights(root, tmp_path):
    common = [
        "fit", f"--config={RECIPES / 'clip4clip.yaml'}", f"--config={RECIPES / 'fixture.yaml'}",
        f"--data.init_args.root={root}", "--data.init_args.batch_size=4", "--data.init_args.num_workers=0",
        "--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false",
    ]  # fmt: skip
    recipes = [*common[1:3], common[3]]
    assert main(["extract", *recipes, "--parts=pixels", f"--out={tmp_path / 'store'}", "--num_workers=0"]) == 0
    assert FeatureStore(tmp_path / "store").parts == ["pixels"]
    assert main(["extract", *recipes, "--verify", f"--out={tmp_path / 'store'}"]) == 0
    weights = []
    for name, more in (("decoded", []), ("stored", [f"--data.init_args.pixels={tmp_path / 'store'}"])):
        assert main([*common, *more, f"--results.directory={tmp_path / name}"]) == 0
        (checkpoint,) = (tmp_path / name).glob("*/*/checkpoints/last.ckpt")
        weights.append(torch.load(checkpoint, weights_only=True)["state_dict"])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_pixels_are_stored_only_when_they_are_named(root, tmp_path):
    options = ExtractOptions(str(tmp_path), num_workers=0, progress=False)
    extract(source_of_data(MSRVTT(root=str(root), **DATA)), encoder(), None, options)
    assert FeatureStore(tmp_path).parts == ["text", "frames", "patches"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_sampling": "segment-random"}, "train_sampling 'segment-random' cannot apply"),
        ({"augmentation": "crop-flip"}, "augmentation 'crop-flip'"),
        ({"features": "features"}, "stored frames without features"),
        ({"audio": "whisper"}, "stored frames without audio"),
    ],
)
def test_options_that_stored_frames_cannot_serve_are_refused(root, store, changes, message):
    with pytest.raises(UserError, match=message):
        MSRVTT(root=str(root), pixels=store.out, **DATA, **changes)


def test_frames_of_other_settings_are_refused(root, store):
    data = MSRVTT(root=str(root), pixels=store.out, **{**DATA, "frames": 4})
    with pytest.raises(StoreError, match=r"its part 'pixels' has other settings: sampling.*3 frames.*4 frames"):
        data.setup("fit")


def test_a_skipped_video_is_an_error_or_left_out(root, tmp_path):
    data = MSRVTT(root=str(root), **DATA)
    broken = data.read_split("test").videos[0].path
    content = broken.read_bytes()
    broken.write_bytes(b"no video")
    try:
        out = stored(root, tmp_path).out
        with pytest.raises(StoreError, match="1 of the 4 video files of the test split are not in the feature store"):
            MSRVTT(root=str(root), pixels=out, **DATA).setup("test")
        skipping = MSRVTT(root=str(root), pixels=out, on_corrupt="skip", **DATA)
        skipping.setup("test")
        assert sum(len(batch) for batch in skipping.test_dataloader()[1]) == 3
        with pytest.raises(VideoError, match="skipped when features were extracted"):
            skipping.video_reader(training=False)(data.read_split("test").videos[0], None)
    finally:
        broken.write_bytes(content)


def test_verification_finds_pixels_that_are_not_the_videos(root, store, tmp_path):
    source = source_of_data(MSRVTT(root=str(root), **DATA))
    assert verify(source, encoder(), None, store) == {"pixels": 0.0}
    shards = FeatureStore(store.out)._shards
    with StoreWriter.open(tmp_path, {"pixels": shards[0].header.fingerprint}, "tvr extract") as writer:
        for shard in shards:
            tensors = load_file(shard.path)
            writer.append("pixels", shard.header.items, {"pixels": tensors["pixels"] ^ 1}, tensors["mask"])
    with pytest.raises(StoreError, match="the stored pixels deviate"):
        verify(source, encoder(), None, ExtractOptions(str(tmp_path)))
