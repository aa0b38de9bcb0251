"""Extraction stores the output of the encoders once, despite interruptions, and training from it is unchanged.

A store is used only for the files whose features it contains, and opens only the parts that a method reads.
"""

import functools
import itertools
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from broken_videos import write_video
from child_processes import fork
from lightning.pytorch import seed_everything
from PIL import Image
from sound_files import tone, write_clip

from tvr_lightning.data.msrvtt import MSRVTT
from tvr_lightning.data.video_folder import VideoFolder
from tvr_lightning.encoders import TinyClipEncoder, TinyWhisperEncoder
from tvr_lightning.errors import MissingAssetError, UserError
from tvr_lightning.extract.fingerprint import check_store
from tvr_lightning.extract.plan import ExtractOptions, source_of_data
from tvr_lightning.extract.run import extract
from tvr_lightning.layers.temporal import SeqTransf
from tvr_lightning.media.augment import draw_augmentation
from tvr_lightning.media.container import VideoError
from tvr_lightning.methods.clip4clip import CLIP4Clip, CLIP4ClipOptions
from tvr_lightning.progress import progress_file
from tvr_lightning.store import FeatureStore, StoreError
from tvr_lightning.testing.processes import quiet_trainer
from tvr_lightning.training.optim import OptimizerConfig


@pytest.fixture(scope="session")
def dataset(synthetic):
    """Parent folder of a synthetic MSR-VTT of 12 videos."""
    return synthetic("msrvtt", 12)


def encoders(seed=0, kind=TinyClipEncoder):
    torch.manual_seed(seed)
    clip = kind(width=64, image_size=32, text_layers=1, vision_layers=1).requires_grad_(False)
    return clip, TinyWhisperEncoder(width=16, layers=1)


def options(out, **changes):
    settings = {"batch_size": 2, "shard_size": 4, "num_workers": 0, "progress": False, "command": "tvr extract again"}
    return ExtractOptions(str(out), **{**settings, **changes})


def without_audio(root, **changes):
    sizes = {"frames": 3, "words": 12, "image_size": 32, "batch_size": 4, "eval_batch_size": 3, "num_workers": 0}
    return MSRVTT(root=str(root), **{**sizes, **changes})


def with_audio(root, **changes):
    return without_audio(root, **{"audio": "whisper", "audio_seconds": 30.0, **changes})


def contents(folder):
    return {p.name: p.read_bytes() for p in sorted(Path(folder).glob("*.safetensors"))}


@pytest.fixture(scope="session")
def extracted(dataset, tmp_path_factory):
    """The store of everything in the synthetic dataset, and the report of its extraction."""
    out = tmp_path_factory.mktemp("store")
    return out, extract(source_of_data(with_audio(dataset)), *encoders(), options(out))


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


def test_batches_from_the_store_equal_those_encoded_from_the_videos(dataset, extracted):
    (clip, whisper), store, report = encoders(), FeatureStore(extracted[0]), extracted[1]
    assert store.parts == ["text", "frames", "patches", "audio"]
    assert len(store) == report.written["frames"] == report.written["audio"] == 12
    assert report.skipped == []
    assert sum(report.spent.values()) <= report.seconds
    assert f"bottleneck: {max(report.spent, key=report.spent.get)}" in "\n".join(report.lines())
    assert set(report.spent) == {"waiting", "encoding", "writing"}
    raw, stored = with_audio(dataset), with_audio(dataset, features=str(extracted[0]))
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


def test_parts_can_be_added_and_only_a_damaged_shard_is_computed_again(dataset, extracted, tmp_path):
    source, file, out = source_of_data(with_audio(dataset)), tmp_path / "progress.json", tmp_path / "store"
    extract(source, *encoders(), options(out, what=["frames"], num_workers=1), progress_file(file, tasks=1))
    assert json.loads(file.read_text()) == {"doing": "videos, 12 of 12", "left": 0.0}
    assert FeatureStore(out).parts == ["frames"]
    extract(source, *encoders(), options(out, what=["text", "audio"]))
    extract(source, *encoders(), options(out))
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


@pytest.mark.slow
def test_an_extraction_killed_at_random_moments_resumes_to_the_same_store(dataset, extracted, tmp_path, ended):
    whole, kills = extracted[1].seconds, 0
    run = functools.partial(extract, source_of_data(with_audio(dataset)), *encoders(), options(tmp_path))
    for attempt in range(40):
        process = ended(fork(run))
        process.join(whole * (0.15 + 0.07 * (attempt % 8)))
        process.kill()  # unless it has ended
        process.join()
        kills += process.exitcode == -signal.SIGKILL
        if contents(tmp_path).keys() == contents(extracted[0]).keys():
            break
    run()
    assert kills > 0
    assert contents(tmp_path) == contents(extracted[0])


def test_unreadable_videos_are_skipped_and_an_error_only_if_a_split_needs_them(dataset, tmp_path):
    root, out = shutil.copytree(dataset, tmp_path / "data"), str(tmp_path / "store")
    train, test = (without_audio(root).read_split(split).videos[0] for split in ("train", "test"))
    train.path.unlink()
    test.path.write_bytes(b"no video")
    source, given = source_of_data(without_audio(root)), options(out, what=["text", "frames", "pixels"])
    report = extract(source, encoders()[0], None, given)
    assert sorted(line.split(":")[0] for line in report.skipped) == sorted([str(train.path), str(test.path)])
    store, before = FeatureStore(out), contents(out)
    assert len(store) == 10
    assert {key[1] for key in store.skipped("frames")} == {train.path.stem, test.path.stem}
    extract(source, encoders()[0], None, given)
    assert contents(out) == before
    for stored in ({"features": out}, {"pixels": out}):
        with pytest.raises(StoreError, match=r"1 of the . video files of the train split are not in the feature store"):
            without_audio(root, **stored).setup("fit")
        lenient = without_audio(root, **stored, on_corrupt="skip")
        lenient.setup()
        assert train.path not in {video.path for video in lenient.load_split("train").videos}
        assert sum(len(batch) for batch in lenient.test_dataloader()[1]) == 3
    with pytest.raises(VideoError, match="skipped when features were extracted"):
        lenient.video_reader(training=False)(test, None)


class WithoutPatches(TinyClipEncoder):
    """An encoder without patch tokens, such as a convolutional one."""

    gives_patches = False


def test_videos_with_damaged_or_without_audio_are_kept_and_parts_must_exist(tmp_path):
    write_clip(tmp_path / "bad.mkv", tone(2.0), codec="aac", spoil=lambda n: n > 10)
    write_clip(tmp_path / "mute.mp4", None)
    write_clip(tmp_path / "good.MKV", tone(2.0))
    names = ("bad.mkv", "mute.mp4", "good.MKV")
    (tmp_path / "captions.csv").write_text("file,caption,split\n" + "".join(f"{name},a clip,test\n" for name in names))
    sizes = {"frames": 3, "words": 12, "image_size": 32, "batch_size": 2, "num_workers": 0}
    source, silent = (
        source_of_data(VideoFolder(root=str(tmp_path), audio=audio, **sizes), ["test"]) for audio in ("whisper", "none")
    )
    report = extract(source, *encoders(), options(tmp_path / "all"))
    assert report.skipped == []
    (problem,) = report.problems
    assert f"{tmp_path / 'bad.mkv'}: audio track:" in problem
    keys = [source.videos[number][1].key for number in (2, 1)]
    assert FeatureStore(tmp_path / "all").video(keys).audio_mask.any(dim=1).tolist() == [True, False]
    extract(silent, encoders()[0], None, options(tmp_path / "store"))
    assert FeatureStore(tmp_path / "store").parts == ["text", "frames", "patches"]
    encoder = encoders(kind=WithoutPatches)[0]
    report = extract(silent, encoder, None, options(tmp_path / "other"))
    assert report.written.keys() == {"text", "frames"}
    for clip, part, message in (
        (encoders()[0], "audio", "there is no audio encoder"),
        (encoder, "patches", "WithoutPatches provides none"),
    ):
        with pytest.raises(ValueError, match=f"--parts {part}: {message}"):
            extract(silent, clip, None, options(tmp_path / "store", what=[part]))


def test_a_store_of_another_encoder_or_sampling_is_refused_with_both_values(dataset, extracted, tmp_path):
    source, other_weights = source_of_data(with_audio(dataset)), r"weights: the store has '\w+', this run '\w+'"
    with pytest.raises(StoreError, match=other_weights):
        extract(source, *encoders(seed=1), options(extracted[0]))
    store, (clip, whisper), (other_clip, other_whisper) = FeatureStore(extracted[0]), encoders(), encoders(seed=1)
    assert "text, frames, patches, audio" in check_store(store, clip, whisper)
    for given, message in (
        ((other_clip, whisper), r"part 'text' has other settings.*weights"),
        ((clip, other_whisper), r"part 'audio' has other settings.*weights"),
        ((encoders()[0].requires_grad_(True),), r"encoder are trained. Set .*tuning to Frozen"),
    ):
        with pytest.raises(StoreError, match=message):
            check_store(store, *given)
    for change, message in (
        ({"frames": 4}, "store has 'one-fps-uniform, 3 frames', this run 'one-fps-uniform, 4 frames'"),
        ({"sampling": "segment-centers"}, "this run 'segment-centers, 3 frames'"),
        ({"antialias": False}, "center crop, not antialiased'"),
        ({"image_size": 64}, "store has '32 pixels.* this run '64 pixels"),
        ({"resize_mode": "squash"}, "shortest side, center crop', this run '32 pixels, bicubic both sides, squashed'"),
        ({"words": 13}, "store has '12 words', this run '13 words'"),
        ({"audio_alignment": "clip30"}, "store has 'whisper duration 30s', this run 'whisper clip30 30s'"),
    ):
        with pytest.raises(StoreError, match=message):
            with_audio(dataset, features=str(extracted[0]), **change).setup()
    mixed = shutil.copytree(extracted[0], tmp_path / "store", ignore=shutil.ignore_patterns("audio-*"))
    extract(source_of_data(with_audio(dataset, sampling="head")), *encoders(), options(mixed, what=["audio"]))
    with pytest.raises(StoreError, match=r"part 'audio' .*store has 'head, 3 frames', this run 'one-fps-uniform"):
        with_audio(dataset, features=str(mixed)).setup()


def trained(data, encoder):
    """Losses of a short training of the heads."""
    losses = []
    seed_everything(0)
    head, optimizer = CLIP4ClipOptions(SeqTransf(1)), OptimizerConfig(lr=1e-3)
    module = CLIP4Clip(encoder, optimizer=optimizer, words=12, frames=3, clip4clip=head)
    step = module.training_step
    module.training_step = lambda *given: losses.append(step(*given)) or losses[-1]
    quiet_trainer(max_epochs=1, limit_train_batches=6).fit(module, data)
    return [float(loss.detach()) for loss in losses]


def test_training_from_the_store_gives_the_losses_of_training_from_videos(dataset, extracted, tmp_path):
    raw = trained(without_audio(dataset), encoders()[0])
    root = shutil.copytree(dataset, tmp_path / "data", ignore=shutil.ignore_patterns("videos"))
    with pytest.raises(MissingAssetError):
        with_audio(root).setup()
    from_store = functools.partial(with_audio, root, features=str(extracted[0]))
    stored = trained(from_store(), encoders()[0])
    assert len(raw) == len(set(raw)) == 6
    assert stored == pytest.approx(raw, abs=1e-4)
    with pytest.raises(StoreError, match="encoder are trained"):
        trained(from_store(), encoders()[0].requires_grad_(True))
    with pytest.raises(ValueError, match="names a feature store"):
        source_of_data(from_store())
    with pytest.raises(UserError, match=r"augmentation 'crop-flip' cannot apply.*recipes/features\.yaml"):
        with_audio(root, features="somewhere", augmentation="crop-flip")
    with pytest.raises(UserError, match="features 'somewhere' fixes the frames of every clip"):
        with_audio(root, features="somewhere", train_sampling="segment-random")
    with pytest.raises(ValueError, match="shard_size is 0; expected"):
        ExtractOptions("x", shard_size=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own libraries use what is deprecated
def test_ray_gives_the_store_of_one_machine_and_resumes(dataset, tmp_path):
    pytest.importorskip("ray")
    root = shutil.copytree(dataset, tmp_path / "data")
    next(root.rglob("*.mp4")).write_bytes(b"no video")
    source = source_of_data(without_audio(root))
    local = extract(source, encoders()[0], None, options(tmp_path / "local"))
    ray = extract(source, encoders()[0], None, options(tmp_path / "ray", engine="ray", actors=2))
    assert (ray.written, ray.skipped) == (local.written, local.skipped)
    assert contents(tmp_path / "local") == contents(tmp_path / "ray")
    assert len(FeatureStore(tmp_path / "ray")) == 11
    again = extract(source, encoders()[0], None, options(tmp_path / "ray", engine="ray"))
    assert not any(again.written.values())


def test_without_ray_the_error_names_the_extra(dataset, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'tvr-lightning\[ray\]'"):
        extract(source_of_data(with_audio(dataset)), *encoders(), options(tmp_path / "store", engine="ray"))


def pixels_of(dataset, out, **changes):
    """Extract the pixels of the dataset, and return the options."""
    given = options(out, what=["pixels"])
    extract(source_of_data(without_audio(dataset, **changes)), encoders()[0], None, given)
    return given


@pytest.fixture(scope="module")
def pixels(dataset, tmp_path_factory):
    """Options of an extraction of pixels that are not antialiased."""
    return pixels_of(dataset, tmp_path_factory.mktemp("pixels"), antialias=False)


def test_batches_from_stored_pixels_equal_those_of_the_videos(dataset, pixels):
    decoded = without_audio(dataset, antialias=False)
    read = without_audio(dataset, antialias=False, pixels=pixels.out, num_workers=1)
    for data in (decoded, read):
        data.setup("fit")
    for one, other in zip(decoded.train_dataloader(), read.train_dataloader(), strict=True):
        assert one.video.video_id == other.video.video_id
        assert one.video.video.pixels.dtype == other.video.video.pixels.dtype
        assert torch.equal(one.video.video.pixels, other.video.video.pixels)
        assert torch.equal(one.video.video.frame_mask, other.video.video.frame_mask)
        assert one.text.text == other.text.text


@pytest.mark.parametrize(("kind", "antialias"), [("rand-augment", False), ("crop-flip", False), ("crop-flip", True)])
def test_stored_pixels_are_augmented_in_training_only(dataset, tmp_path, kind, antialias):
    store = pixels_of(dataset, tmp_path / "store", antialias=antialias)
    plain, changed = (
        without_audio(dataset, antialias=antialias, pixels=store.out, augmentation=each) for each in ("none", kind)
    )
    for data in (plain, changed):
        data.setup("fit")
    originals, items = (data.train_dataloader().dataset for data in (plain, changed))
    different = 0
    for position in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        before, after = (each[position].video.video.pixels for each in (originals, items))
        change = draw_augmentation(kind, changed.preparation, np.random.default_rng([changed.seed, *position]))
        frames = before[0].permute(0, 2, 3, 1).round().byte().numpy()
        expected = torch.from_numpy(np.stack([change(Image.fromarray(frame)) for frame in frames])).permute(0, 3, 1, 2)
        assert torch.equal(after[0], expected.to(before.dtype))
        different += not torch.equal(before, after)
    assert different
    shown = [next(iter(data.val_dataloader()[1])).video.pixels for data in (plain, changed)]
    assert torch.equal(*shown)


def test_frames_of_any_size_are_stored_with_their_times(dataset, tmp_path):
    sizes = {"resize_mode": "unchanged", "sampling": "uniform-floor"}
    store = pixels_of(dataset, tmp_path / "store", **sizes)
    decoded, read = (without_audio(dataset, **sizes, pixels=each) for each in (None, store.out))
    for data in (decoded, read):
        data.setup("test")
    for one, other in zip(decoded.test_dataloader()[1], read.test_dataloader()[1], strict=True):
        one, other = one.video, other.video
        assert all(map(torch.equal, one.pixels, other.pixels))
        assert torch.equal(one.frame_mask, other.frame_mask)
        assert torch.equal(one.times, other.times)
        assert [len(clip) for clip in one.pixels] == one.frame_mask.sum(1).tolist()
        assert (one.times[:, 1:] > 0).all()
    with pytest.raises(UserError, match="augmentation 'crop-flip' makes frames square"):
        without_audio(dataset, **sizes, augmentation="crop-flip")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_sampling": "segment-random"}, "train_sampling 'segment-random' cannot apply"),
        ({"features": "features"}, "stored frames without features"),
        ({"audio": "whisper"}, "stored frames without audio"),
        ({"frames": 4}, r"its part 'pixels' has other settings: sampling.*3 frames.*4 frames"),
    ],
)
def test_options_that_stored_pixels_cannot_serve_are_refused(dataset, pixels, changes, message):
    with pytest.raises(UserError, match=message):
        without_audio(dataset, antialias=False, pixels=pixels.out, **changes).setup("fit")


NAMES = [f"clip{number}" for number in range(4)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two folders of four videos with the same names but other frames."""
    roots = tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")
    rows = "".join(f"{name}.mp4,a caption of {name},{'test' if name == NAMES[0] else 'train'}\n" for name in NAMES)
    for number, (root, name) in enumerate(itertools.product(roots, NAMES)):
        (root / "videos").mkdir(exist_ok=True)
        grey = lambda frame, width, height, n=number: np.full((height, width, 3), 20 * n + frame, np.uint8)  # noqa: E731
        write_video(root / "videos" / f"{name}.mp4", 10, picture=grey)
        (root / "captions.csv").write_text(f"file,caption,split\n{rows}", encoding="utf-8")
    return roots


def folder_data(root, **options):
    return VideoFolder(root=str(root), frames=2, words=8, image_size=32, batch_size=2, num_workers=0, **options)


def extract_folder(root, out, **changes):
    audio_encoder = changes.pop("audio", None)
    source = source_of_data(folder_data(root, **({"audio": "whisper"} if audio_encoder else {})), ["train", "test"])
    return extract(source, encoders()[0], audio_encoder, options(out, **{"what": ["text", "frames"], **changes}))


def first_frames(root, out):
    module = folder_data(root, features=str(out))
    module.setup("test")
    video = module.read_split("test").videos[0]
    return module.video_reader(training=False)(video, None).frames


def test_features_are_read_for_copies_of_their_files_only(folders, tmp_path):
    (first, second), store = folders, tmp_path / "store"
    extract_folder(first, store)
    expected = first_frames(first, store)
    copy = shutil.copytree(first, tmp_path / "copy")
    for path in (copy / "videos").iterdir():
        os.utime(path, (1, 1))
    assert torch.equal(first_frames(copy, store), expected)
    assert extract_folder(copy, store).kept["frames"] == 4
    shutil.rmtree(copy / "videos")
    (copy / "videos").mkdir()
    assert torch.equal(first_frames(copy, store), expected), "without the videos"
    with pytest.raises(StoreError, match=r"1 of 1 videos are not the files whose frames the feature store .*again"):
        first_frames(second, store)
    report = extract_folder(second, store)
    assert (report.written["frames"], report.kept["frames"]) == (4, 0)
    assert (first_frames(second, store) - expected).abs().max() > 0.01
    with pytest.raises(StoreError, match="videos are not the files whose frames"):
        first_frames(first, store)
    mixed = shutil.copytree(second, tmp_path / "mixed")
    shutil.copyfile(first / "videos" / f"{NAMES[0]}.mp4", mixed / "videos" / f"{NAMES[0]}.mp4")
    report = extract_folder(mixed, store)
    assert (report.written["frames"], report.kept["frames"]) == (1, 3), "only a replaced file is extracted again"
    torch.testing.assert_close(first_frames(mixed, store), expected, rtol=0, atol=1e-4)


def broken_outside_the_digest(path):
    """Bytes of an intact clip and of one that differs only in bytes that the digest does not cover."""
    good = bytearray(path.read_bytes())
    padding = 300_000
    good[:0] = (padding // 2).to_bytes(4, "big") + b"free" + bytes(padding // 2 - 8)
    good += padding.to_bytes(4, "big") + b"free" + bytes(padding - 8)
    offsets = good.index(b"stco") + 12
    good[offsets : offsets + 4] = (int.from_bytes(good[offsets : offsets + 4], "big") + padding // 2).to_bytes(4, "big")
    return bytes(good), bytes(good.replace(b"moov", b"MOOV"))


def test_a_skipped_video_is_tried_again_only_if_its_file_changed(folders, tmp_path):
    root = shutil.copytree(folders[0], tmp_path / "data")
    path = root / "videos" / f"{NAMES[1]}.mp4"
    good, bad = broken_outside_the_digest(path)
    path.write_bytes(bad)
    assert len(extract_folder(root, tmp_path / "store").skipped) == 1
    again = extract_folder(root, tmp_path / "store")
    assert (again.retried, again.still_skipped, again.written) == (0, 1, {})
    path.write_bytes(good)
    repaired = extract_folder(root, tmp_path / "store")
    assert (repaired.retried, repaired.still_skipped, repaired.written["frames"]) == (1, 0, 1)
    assert any("1 were tried again and 0 were not" in line for line in repaired.lines())
    assert FeatureStore(tmp_path / "store").skipped("frames") == {}


def test_an_unfinished_audio_part_affects_only_methods_that_use_audio(folders, tmp_path):
    root, out, whisper = folders[0], tmp_path / "store", encoders()[1]
    extract_folder(root, out, what=["text", "frames", "audio"], audio=whisper, shard_size=1, batch_size=1)
    shards = sorted(out.glob("audio-*"))
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:-9])
    module = folder_data(root, features=str(out))
    module.setup("test")
    assert module.store.parts == ["text", "frames"]
    for message in ("audio-00001.*cannot be read", r"\d of \d items of part 'audio' are missing.*: tvr extract again"):
        module = folder_data(root, features=str(out), audio="whisper")
        module.trainer = SimpleNamespace(lightning_module=SimpleNamespace(audio_encoder=whisper))
        with pytest.raises(StoreError, match=message):
            module.setup("fit")
        shards[1].unlink(missing_ok=True)
