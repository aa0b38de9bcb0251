"""Extraction stores the output of the encoders once, despite interruptions, and training from it is unchanged."""

import functools
import importlib.util
import itertools
import json
import os
import shutil
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from child_processes import fork
from extract.small import DATA, encoders, options
from lightning.pytorch import seed_everything
from quick_trainer import quick_trainer
from safetensors.torch import load_file
from small_run import small_run
from sound_files import tone, write_clip

from tvr_lightning.cli import main
from tvr_lightning.data.audio_alignment import AudioOptions
from tvr_lightning.data.msrvtt import MSRVTT
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.errors import MissingAssetError, UserError
from tvr_lightning.extract.fingerprint import check_store
from tvr_lightning.extract.plan import ExtractOptions, source_of_data, source_of_files
from tvr_lightning.extract.run import extract
from tvr_lightning.extract.verify import verify
from tvr_lightning.layers.temporal import SeqTransf
from tvr_lightning.media.container import VideoError
from tvr_lightning.media.preparation import Preparation
from tvr_lightning.methods.clip4clip import CLIP4Clip, CLIP4ClipOptions
from tvr_lightning.progress import progress_file
from tvr_lightning.store import FeatureStore, StoreError, StoreWriter
from tvr_lightning.training.optim import OptimizerConfig

HAS_RAY = importlib.util.find_spec("ray") is not None


@pytest.fixture(scope="session")
def dataset(synthetic):
    """Parent folder of a synthetic MSR-VTT of 12 videos."""
    return synthetic("msrvtt", 12)


def data_of(root, **changes):
    return MSRVTT(root=str(root), **{**DATA, "audio": "whisper", "audio_seconds": 30.0, **changes})


def contents(folder):
    """Bytes of the shards by name."""
    return {p.name: p.read_bytes() for p in sorted(Path(folder).glob("*.safetensors"))}


@pytest.fixture(scope="session")
def extracted(dataset, tmp_path_factory):
    """The store of everything in the synthetic dataset, and the report of its extraction."""
    out = tmp_path_factory.mktemp("store")
    return out, extract(source_of_data(data_of(dataset)), *encoders(), options(out))


@torch.no_grad()
def assert_same_text(clip, decoded, read):
    expected = clip.encode_text(decoded.text, 12)
    assert torch.equal(decoded.index, read.index)
    assert torch.equal(read.text.word_mask, expected.word_mask)
    torch.testing.assert_close(read.text.words, expected.words, rtol=0, atol=1e-5)
    torch.testing.assert_close(read.text.sentence, expected.sentence, rtol=0, atol=1e-5)


@torch.no_grad()
def assert_same_video(store, clip, whisper, decoded, read):
    expected, (audio, audio_mask) = clip.encode_video(decoded.video, patches=True), whisper.encode_audio(decoded.video)
    assert torch.equal(decoded.index, read.index)
    assert decoded.video_id == read.video_id
    assert torch.equal(read.video.frame_mask, expected.frame_mask)
    assert torch.equal(read.video.audio_mask, audio_mask)
    patches = store.video([("msrvtt", video_id, None) for video_id in read.video_id], patches=True).patches
    for found, wanted in ((read.video.frames, expected.frames), (read.video.audio, audio), (patches, expected.patches)):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_the_same_batches_come_from_the_store_as_from_the_videos(dataset, extracted):
    (clip, whisper), store, report = encoders(), FeatureStore(extracted[0]), extracted[1]
    assert store.parts == ["text", "frames", "patches", "audio"]
    assert len(store) == report.written["frames"] == report.written["audio"] == 12
    assert report.skipped == []
    assert sum(report.spent.values()) <= report.seconds
    assert f"bottleneck: {max(report.spent, key=report.spent.get)}" in "\n".join(report.lines())
    assert set(report.spent) == {"waiting", "encoding", "writing"}
    raw, stored = data_of(dataset), data_of(dataset, features=str(extracted[0]))
    raw.setup()
    stored.setup()
    pairs = zip(raw.train_dataloader(), stored.train_dataloader(), strict=True)
    for decoded, read in itertools.islice(pairs, 3):
        assert_same_text(clip, decoded.text, read.text)
        assert_same_video(store, clip, whisper, decoded.video, read.video)
    (texts, videos), (stored_texts, stored_videos) = raw.val_dataloader(), stored.val_dataloader()
    for decoded, read in zip(texts, stored_texts, strict=True):
        assert_same_text(clip, decoded, read)
    for decoded, read in zip(videos, stored_videos, strict=True):
        assert_same_video(store, clip, whisper, decoded, read)


def test_parts_are_added_later_with_workers_too_and_only_what_is_damaged_is_computed_again(
    dataset, extracted, tmp_path
):
    source, file = source_of_data(data_of(dataset)), tmp_path / "progress.json"
    out = tmp_path / "store"
    bar = progress_file(file, tasks=1)
    extract(source, *encoders(), options(out, what=["frames"], num_workers=1), bar)
    assert json.loads(file.read_text()) == {"doing": "videos, 12 of 12", "left": 0.0}
    assert FeatureStore(out).parts == ["frames"]
    extract(source, *encoders(), options(out, what=["text", "audio"]))
    extract(source, *encoders(), options(out, what=["all"]))
    assert contents(out) == contents(extracted[0])
    report = extract(source, *encoders(), options(out))
    assert not any(report.written.values())
    assert report.kept["frames"] == 12
    (shard,) = out.glob("audio-00001-*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    report = extract(source, *encoders(), options(out))
    assert {part: n for part, n in report.written.items() if n} == {"audio": 4}
    assert len(report.rewritten) == 1
    assert contents(out) == contents(extracted[0])


def killed_after(seconds, dataset, out, ended):
    """Extract in a process that is killed, and return whether it was killed before its end."""
    run = functools.partial(extract, source_of_data(data_of(dataset)), *encoders(), options(out))
    process = ended(fork(run))
    process.join(seconds)
    if process.exitcode is None:
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    return process.exitcode == -signal.SIGKILL


def test_killed_at_random_moments_and_rerun_the_store_is_the_same(dataset, extracted, tmp_path, ended):
    began = time.perf_counter()
    extract(source_of_data(data_of(dataset)), *encoders(), options(tmp_path / "whole"))
    whole = time.perf_counter() - began
    kills = 0
    for attempt in range(40):
        kills += killed_after(whole * (0.15 + 0.07 * (attempt % 8)), dataset, tmp_path / "killed", ended)
        if contents(tmp_path / "killed").keys() == contents(extracted[0]).keys():
            break
    extract(source_of_data(data_of(dataset)), *encoders(), options(tmp_path / "killed"))
    assert kills > 0
    assert contents(tmp_path / "killed") == contents(extracted[0]) == contents(tmp_path / "whole")


def test_what_cannot_be_read_is_skipped_and_listed(dataset, tmp_path):
    root = shutil.copytree(dataset, tmp_path / "data")
    videos = sorted((root / "msrvtt" / "videos").iterdir())
    videos[1].write_bytes(b"no video")
    videos[5].unlink()
    source = source_of_data(data_of(root))
    report = extract(source, *encoders(), options(tmp_path / "store"))
    assert len(report.skipped) == 2
    assert {line.split(":")[0] for line in report.skipped} == {str(videos[1]), str(videos[5])}
    store = FeatureStore(tmp_path / "store")
    assert len(store) == 10
    assert {key[1] for key in store.skipped("frames")} == {videos[1].stem, videos[5].stem}
    before = contents(tmp_path / "store")
    extract(source, *encoders(), options(tmp_path / "store"))
    assert contents(tmp_path / "store") == before
    with pytest.raises(StoreError, match=r"video files of the .* split are not in the feature store"):
        data_of(root, features=str(tmp_path / "store")).setup("fit")
    lenient = data_of(root, features=str(tmp_path / "store"), on_corrupt="skip")
    lenient.setup()
    assert {video.path for video in lenient.load_split("train").videos}.isdisjoint({videos[1], videos[5]})


class WithoutPatches(TinyClipEncoder):
    """An encoder without patch tokens, such as a convolutional one."""

    gives_patches = False


def test_files_and_folders_need_no_annotations_and_parts_must_exist(tmp_path):
    clips = tmp_path / "deep" / "er"
    clips.mkdir(parents=True)
    write_clip(clips / "bad.mkv", tone(2.0), codec="aac", spoil=lambda n: n > 10)
    write_clip(clips / "mute.mp4", None)
    (clips / "notes.txt").write_text("no video", encoding="utf-8")
    write_clip(tmp_path / "good.MKV", tone(2.0))
    given = ([tmp_path / "deep", tmp_path / "good.MKV"], Preparation(32))
    report = extract(source_of_files(*given, 3, audio=AudioOptions("whisper")), *encoders(), options(tmp_path / "all"))
    assert report.skipped == []
    (problem,) = report.problems  # whose video is kept
    assert f"{clips / 'bad.mkv'}: audio track:" in problem
    keys = [("files", path.as_posix(), None) for path in (tmp_path / "good.MKV", clips / "mute.mp4")]
    assert FeatureStore(tmp_path / "all").video(keys).audio_mask.any(dim=1).tolist() == [True, False]
    source = source_of_files(*given, frames=3)
    extract(source, encoders()[0], None, options(tmp_path / "store"))
    assert FeatureStore(tmp_path / "store").parts == ["frames", "patches"]
    with pytest.raises(ValueError, match="--parts text: there are no texts"):
        extract(source, encoders()[0], None, options(tmp_path / "store", what=["text"]))
    with pytest.raises(ValueError, match="--parts audio: there is no audio encoder"):
        extract(source, encoders()[0], None, options(tmp_path / "store", what=["audio"]))
    with pytest.raises(MissingAssetError, match="no such file or folder"):
        source_of_files([tmp_path / "nowhere"], Preparation(32))
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingAssetError, match="no videos in"):
        source_of_files([tmp_path / "empty"], Preparation(32))
    encoder = encoders(kind=WithoutPatches)[0]
    report = extract(source, encoder, None, options(tmp_path / "other", what=["all"]))
    assert report.written.keys() == {"frames"}
    with pytest.raises(ValueError, match="--parts patches: WithoutPatches provides none"):
        extract(source, encoder, None, options(tmp_path / "other", what=["patches"]))


def test_verify_recomputes_a_sample_and_finds_a_video_that_changed_since(dataset, extracted, tmp_path):
    deviations = verify(source_of_data(data_of(dataset)), *encoders(), options(extracted[0]), sample=3)
    assert set(deviations) == {"sentence", "words", "frames", "patches", "audio"}
    assert max(deviations.values()) < 1e-4
    root = shutil.copytree(dataset, tmp_path / "data")
    videos = sorted((root / "msrvtt" / "videos").iterdir())
    first = videos[0].read_bytes()
    for one, other in itertools.pairwise(videos):
        one.write_bytes(other.read_bytes())
    videos[-1].write_bytes(first)
    with pytest.raises(StoreError, match=r"video\d+\.mp4: the stored frames deviate"):
        verify(source_of_data(data_of(root)), *encoders(), options(extracted[0]))


def test_a_store_of_another_encoder_or_sampling_is_refused_with_both(dataset, extracted):
    data = data_of(dataset)
    with pytest.raises(StoreError, match=r"weights: the store has '\w+', this run '\w+'"):
        extract(source_of_data(data), *encoders(seed=1), options(extracted[0]))
    with pytest.raises(StoreError, match=r"weights: the store has '\w+', this run '\w+'"):
        verify(source_of_data(data), *encoders(seed=1), options(extracted[0]))
    store, (clip, whisper), (other, deaf) = FeatureStore(extracted[0]), encoders(), encoders(seed=1)
    assert "text, frames, patches, audio" in check_store(store, clip, whisper)
    for given, message in (
        ((other, whisper), r"part 'text' has other settings.*weights"),
        ((clip, deaf), r"part 'audio' has other settings.*weights"),
        ((encoders()[0].requires_grad_(True),), r"encoder are trained. Set .*tuning to Frozen"),
    ):
        with pytest.raises(StoreError, match=message):
            check_store(store, *given)
    for change, message in (
        ({"frames": 4}, "store has 'one-fps-uniform, 3 frames', this run 'one-fps-uniform, 4 frames'"),
        ({"sampling": "segment-centres"}, "this run 'segment-centres, 3 frames'"),
        ({"sampling": "int-fps-uniform"}, "this run 'int-fps-uniform, 3 frames'"),
        ({"antialias": False}, "centre crop, not antialiased'"),
        ({"image_size": 64}, "store has '32 pixels.* this run '64 pixels"),
        ({"resize_mode": "squash"}, "shortest side, centre crop', this run '32 pixels, bicubic both sides, squashed'"),
        ({"words": 13}, "store has '12 words', this run '13 words'"),
        ({"audio_alignment": "clip30"}, "store has 'whisper duration 30s', this run 'whisper clip30 30s'"),
    ):
        with pytest.raises(StoreError, match=message):
            data_of(dataset, features=str(extracted[0]), **change).setup()


def trained(data, encoder):
    """Losses of a short training of the heads."""
    losses = []
    seed_everything(0)
    module = CLIP4Clip(
        encoder, optimizer=OptimizerConfig(lr=1e-3), words=12, frames=3, clip4clip=CLIP4ClipOptions(SeqTransf(1))
    )
    step = module.training_step
    module.training_step = lambda *given: losses.append(step(*given)) or losses[-1]
    quick_trainer(max_epochs=1, limit_train_batches=6).fit(module, data)
    return [float(loss.detach()) for loss in losses]


def test_training_from_the_store_gives_the_losses_of_training_from_videos(dataset, extracted, tmp_path):
    raw = trained(data_of(dataset, audio="none"), encoders()[0])
    root = shutil.copytree(dataset, tmp_path / "data", ignore=shutil.ignore_patterns("videos"))
    with pytest.raises(MissingAssetError):
        data_of(root).setup()
    stored = trained(data_of(root, features=str(extracted[0])), encoders()[0])  # needs no videos
    assert len(raw) == len(set(raw)) == 6
    assert stored == pytest.approx(raw, abs=1e-4)
    with pytest.raises(StoreError, match="encoder are trained"):
        trained(data_of(root, features=str(extracted[0])), encoders()[0].requires_grad_(True))
    with pytest.raises(ValueError, match="names a feature store"):
        source_of_data(data_of(root, features=str(extracted[0])))
    for change in ({"augmentation": "crop-flip"}, {"train_sampling": "segment-random"}):
        with pytest.raises(ValueError, match=r"features 'somewhere' fixes the frames.*recipes/features\.yaml"):
            data_of(root, features="somewhere", **change)
    with pytest.raises(ValueError, match="shard_size is 0; it must be at least 1"):
        ExtractOptions("x", shard_size=0)


@pytest.mark.parametrize("run", [extract, verify, check_store])
def test_the_weights_of_each_encoder_are_hashed_once_per_run(dataset, extracted, run):
    clip, whisper = encoders()
    for encoder in (clip, whisper):
        encoder.fingerprint = mock.Mock(side_effect=encoder.fingerprint)
    if run is check_store:
        run(FeatureStore(extracted[0]), clip, whisper)
    else:
        run(source_of_data(data_of(dataset)), clip, whisper, options(extracted[0]))
    assert [encoder.fingerprint.call_count for encoder in (clip, whisper)] == [1, 1]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
@pytest.mark.filterwarnings("ignore")  # what Ray's own libraries deprecate
def test_ray_gives_the_store_of_one_machine_and_resumes_an_interrupted_one(dataset, tmp_path):
    root = shutil.copytree(dataset, tmp_path / "data")
    next(root.rglob("*.mp4")).write_bytes(b"no video")
    source = source_of_data(MSRVTT(root=str(root), **DATA))
    local = extract(source, encoders()[0], None, options(tmp_path / "local"))
    ray = extract(source, encoders()[0], None, options(tmp_path / "ray", engine="ray", actors=2))
    assert (ray.written, ray.skipped) == (local.written, local.skipped)
    assert contents(tmp_path / "local") == contents(tmp_path / "ray")
    assert len(FeatureStore(tmp_path / "ray")) == 11
    again = extract(source, encoders()[0], None, options(tmp_path / "ray", engine="ray"))
    assert not any(again.written.values())


@pytest.mark.skipif(HAS_RAY, reason="ray is installed")
def test_without_ray_the_error_names_the_extra(dataset, tmp_path):
    with pytest.raises(UserError, match=r"pip install 'tvr-lightning\[ray\]'"):
        extract(source_of_data(data_of(dataset)), *encoders(), options(tmp_path / "store", engine="ray"))


RECIPES = Path(__file__).parent.parent.parent / "recipes"


def stored(dataset: Path, out: Path, **changes) -> ExtractOptions:
    given = options(out, what=["pixels"])
    extract(source_of_data(MSRVTT(root=str(dataset), **{**DATA, **changes})), encoders()[0], None, given)
    return given


@pytest.fixture(scope="module")
def store(dataset, tmp_path_factory) -> ExtractOptions:
    return stored(dataset, tmp_path_factory.mktemp("store"))


@pytest.mark.parametrize("antialias", [True, False])
def test_batches_are_those_of_the_videos(dataset, tmp_path, antialias):
    out = stored(dataset, tmp_path, antialias=antialias).out
    decoded = MSRVTT(root=str(dataset), antialias=antialias, **DATA)
    read = MSRVTT(root=str(dataset), antialias=antialias, pixels=out, **{**DATA, "num_workers": 1})
    for data in (decoded, read):
        data.setup("fit")
    for one, other in zip(decoded.train_dataloader(), read.train_dataloader(), strict=True):
        assert one.video.video_id == other.video.video_id
        assert one.video.video.pixels.dtype == other.video.video.pixels.dtype
        assert torch.equal(one.video.video.pixels, other.video.video.pixels)
        assert torch.equal(one.video.video.frame_mask, other.video.video.frame_mask)
        assert one.text.text == other.text.text


def test_training_from_pixels_ends_in_the_same_weights(dataset, tmp_path):
    out = tmp_path / "store"
    recipe = small_run(dataset, tmp_path)[:6]  # those options that a data set and its frames depend on
    assert main(["extract", *recipe, "--parts=pixels", f"--out={out}", "--num_workers=0"]) == 0
    assert FeatureStore(out).parts == ["pixels"]  # which other runs store only if it is named
    assert main(["extract", *recipe, "--verify", f"--out={out}"]) == 0
    weights = []
    for name, more in (("decoded", []), ("stored", [f"--data.init_args.pixels={out}"])):
        assert main(["fit", *small_run(dataset, tmp_path / name, "--trainer.max_epochs=1", *more)]) == 0
        (checkpoint,) = (tmp_path / name).glob("*/*/checkpoints/last.ckpt")
        weights.append(torch.load(checkpoint, weights_only=True)["state_dict"])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_sampling": "segment-random"}, "train_sampling 'segment-random' cannot apply"),
        ({"augmentation": "crop-flip"}, "augmentation 'crop-flip'"),
        ({"features": "features"}, "stored frames without features"),
        ({"audio": "whisper"}, "stored frames without audio"),
        ({"frames": 4}, r"its part 'pixels' has other settings: sampling.*3 frames.*4 frames"),
    ],
)
def test_options_that_stored_frames_cannot_serve_are_refused(dataset, store, changes, message):
    with pytest.raises(UserError, match=message):
        MSRVTT(root=str(dataset), pixels=store.out, **{**DATA, **changes}).setup("fit")


def test_a_skipped_video_is_an_error_or_left_out(dataset, tmp_path):
    root = shutil.copytree(dataset, tmp_path / "data")
    broken = MSRVTT(root=str(root), **DATA).read_split("test").videos[0]
    broken.path.write_bytes(b"no video")
    out = stored(root, tmp_path / "store").out
    given = {**DATA, "root": str(root), "pixels": out}
    with pytest.raises(StoreError, match="1 of the 4 video files of the test split are not in the feature store"):
        MSRVTT(**given).setup("test")
    skipping = MSRVTT(on_corrupt="skip", **given)
    skipping.setup("test")
    assert sum(len(batch) for batch in skipping.test_dataloader()[1]) == 3
    with pytest.raises(VideoError, match="skipped when features were extracted"):
        skipping.video_reader(training=False)(broken, None)


def test_verification_finds_pixels_that_are_not_the_videos(dataset, store, tmp_path):
    source = source_of_data(MSRVTT(root=str(dataset), **DATA))
    assert verify(source, encoders()[0], None, store) == {"pixels": 0.0}
    shards = FeatureStore(store.out)._shards
    with StoreWriter.open(tmp_path, {"pixels": shards[0].header.fingerprint}, "tvr extract") as writer:
        for shard in shards:
            tensors = load_file(shard.path)
            writer.append("pixels", shard.header.items, {"pixels": tensors["pixels"] ^ 1}, tensors["mask"])
    with pytest.raises(StoreError, match="the stored pixels deviate"):
        verify(source, encoders()[0], None, options(tmp_path))
