"""Extraction stores the output of the encoders once, despite interruptions, and training from it is unchanged."""

import itertools
import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from sound_files import tone, write_clip

from tvr_lightning.data.audio_alignment import AudioOptions
from tvr_lightning.data.batch import Media
from tvr_lightning.data.msrvtt import MSRVTT
from tvr_lightning.encoders.tiny import TinyClipEncoder
from tvr_lightning.encoders.whisper import TinyWhisperEncoder
from tvr_lightning.errors import MissingAssetError
from tvr_lightning.extract.fingerprint import check_store
from tvr_lightning.extract.plan import ExtractOptions, source_of_data, source_of_files
from tvr_lightning.extract.run import extract
from tvr_lightning.extract.verify import verify
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.layers.temporal import SeqTransf
from tvr_lightning.media.preparation import Preparation
from tvr_lightning.methods.clip4clip import CLIP4Clip, CLIP4ClipOptions
from tvr_lightning.progress import progress_file
from tvr_lightning.store import FeatureStore, StoreError
from tvr_lightning.synthetic.generate import synthesize
from tvr_lightning.training.optim import OptimizerConfig

DATA = {"frames": 3, "words": 12, "image_size": 32, "batch_size": 4, "eval_batch_size": 3, "num_workers": 0}
FORK = multiprocessing.get_context("fork")


def encoders(seed=0):
    torch.manual_seed(seed)
    clip = TinyClipEncoder(width=64, image_size=32, text_layers=1, vision_layers=1).requires_grad_(False)
    return clip, TinyWhisperEncoder(width=16, layers=1)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """Parent folder of a synthetic MSR-VTT of 12 videos."""
    root = tmp_path_factory.mktemp("extracted")
    synthesize("msrvtt", root, 12, 0, workers=1, progress=False)
    return root


def data_of(root, **changes):
    return MSRVTT(root=str(root), **{**DATA, "audio": "whisper", "audio_seconds": 30.0, **changes})


def options(out, **changes):
    settings = {"batch_size": 2, "shard_size": 4, "num_workers": 0, "progress": False, "command": "tvr extract again"}
    return ExtractOptions(str(out), **{**settings, **changes})


def contents(folder):
    """Bytes of the shards by name."""
    return {p.name: p.read_bytes() for p in sorted(Path(folder).glob("*.safetensors"))}


@pytest.fixture(scope="session")
def extracted(dataset, tmp_path_factory):
    """The store of everything in the synthetic dataset, and the report of its extraction."""
    out = tmp_path_factory.mktemp("store")
    report = extract(source_of_data(data_of(dataset)), *encoders(), options(out))
    return out, report


def test_the_store_holds_what_the_encoders_give(dataset, extracted):
    store = FeatureStore(extracted[0])
    clip, whisper = encoders()
    assert store.parts == ["text", "frames", "patches", "audio"]
    assert len(store) == 12
    data = data_of(dataset)
    read = data.video_reader(training=False)
    for video in data.read_split("train").videos[:3]:
        media = read(video, None)
        assert isinstance(media, Media)
        found = store.video([("msrvtt", video.video_id, None)], patches=True)
        with torch.no_grad():
            expected = clip.encode_video(media, patches=True)
        audio, audio_mask = whisper.encode_audio(media)
        assert torch.allclose(found.frames, expected.frames, atol=1e-5)
        assert torch.allclose(found.patches, expected.patches, atol=1e-5)
        assert torch.allclose(found.audio, audio, atol=1e-5)
        assert torch.equal(found.frame_mask, expected.frame_mask)
        assert torch.equal(found.audio_mask, audio_mask)
    captions = [text.text for text in data.read_split("test").texts]
    with torch.no_grad():
        expected = clip.encode_text(captions, 12)
    found = store.text(captions)
    assert torch.allclose(found.words, expected.words, atol=1e-5)
    assert torch.allclose(found.sentence, expected.sentence, atol=1e-5)
    assert torch.equal(found.word_mask, expected.word_mask)


def test_another_process_can_read_how_far_it_is(dataset, tmp_path):
    file = tmp_path / "progress.json"
    bar = progress_file(file, tasks=2)
    extract(source_of_data(data_of(dataset)), *encoders(), options(tmp_path / "store"), bar)
    assert json.loads(file.read_text()) == {"doing": "videos, 12 of 12", "left": 0.0}


def test_the_report_counts_and_names_the_bottleneck(extracted):
    report = extracted[1]
    assert report.written["frames"] == report.written["audio"] == 12
    assert report.skipped == []
    assert sum(report.spent.values()) <= report.seconds
    assert f"bottleneck: {max(report.spent, key=report.spent.get)}" in "\n".join(report.lines())
    assert set(report.spent) == {"waiting", "encoding", "writing"}


def test_a_second_run_leaves_every_byte(dataset, extracted, tmp_path):
    out = shutil.copytree(extracted[0], tmp_path / "copy")
    before = contents(out)
    report = extract(source_of_data(data_of(dataset)), *encoders(), options(out))
    assert not any(report.written.values())
    assert report.kept["frames"] == 12
    assert contents(out) == before


def test_workers_change_nothing(dataset, extracted, tmp_path):
    extract(source_of_data(data_of(dataset)), *encoders(), options(tmp_path, num_workers=1, what=["frames"]))
    whole = contents(extracted[0])
    shards = contents(tmp_path)
    assert len(shards) == 3
    assert {name: whole[name] for name in shards} == shards


def killed_after(seconds, dataset, out, ended):
    """Extract in a process that is killed, and return whether it was killed before its end."""
    process = ended(
        FORK.Process(target=lambda: extract(source_of_data(data_of(dataset)), *encoders(), options(out)), daemon=True)
    )
    process.start()
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


def test_parts_may_be_added_later(dataset, extracted, tmp_path):
    source = source_of_data(data_of(dataset))
    extract(source, *encoders(), options(tmp_path, what=["frames"]))
    assert FeatureStore(tmp_path).parts == ["frames"]
    extract(source, *encoders(), options(tmp_path, what=["text", "audio"]))
    extract(source, *encoders(), options(tmp_path, what=["all"]))
    assert contents(tmp_path) == contents(extracted[0])


def test_a_damaged_shard_is_computed_again_and_no_other(dataset, extracted, tmp_path):
    out = shutil.copytree(extracted[0], tmp_path / "copy")
    (shard,) = out.glob("audio-00001-*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    report = extract(source_of_data(data_of(dataset)), *encoders(), options(out))
    assert {part: n for part, n in report.written.items() if n} == {"audio": 4}
    assert len(report.rewritten) == 1
    assert contents(out) == contents(extracted[0])


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


def test_a_broken_track_is_reported_and_its_video_kept(tmp_path):
    clips = tmp_path / "clips"
    clips.mkdir()
    write_clip(clips / "bad.mkv", tone(2.0), codec="aac", spoil=lambda n: n > 10)
    write_clip(clips / "mute.mp4", None)
    write_clip(clips / "good.mkv", tone(2.0))
    (clips / "notes.txt").write_text("no video", encoding="utf-8")
    source = source_of_files([clips], Preparation(32), frames=3, audio=AudioOptions("whisper"))
    report = extract(source, *encoders(), options(tmp_path / "store"))
    assert report.skipped == []
    assert len(report.problems) == 1
    assert f"{clips / 'bad.mkv'}: audio track:" in report.problems[0]
    store = FeatureStore(tmp_path / "store")
    keys = [("files", f"{clips.as_posix()}/{name}", None) for name in ("good.mkv", "mute.mp4")]
    assert store.video(keys).audio_mask.any(dim=1).tolist() == [True, False]


class WithoutPatches(TinyClipEncoder):
    """An encoder without patch tokens, such as a convolutional one."""

    gives_patches = False


def test_an_encoder_without_patches_is_not_asked_for_them(dataset, tmp_path):
    encoder = WithoutPatches(width=64, image_size=32, text_layers=1, vision_layers=1)
    source = source_of_data(MSRVTT(root=str(dataset), **DATA), ["test"])
    assert extract(source, encoder, None, options(tmp_path / "all")).written.keys() == {"text", "frames"}
    with pytest.raises(ValueError, match="--parts patches: WithoutPatches provides none"):
        extract(source, encoder, None, options(tmp_path / "named", what=["patches"]))


def test_files_and_folders_need_no_annotations(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    write_clip(tmp_path / "deep" / "er" / "a.mp4", None)
    write_clip(tmp_path / "b.MKV", None)
    source = source_of_files([tmp_path / "deep", tmp_path / "b.MKV"], Preparation(32), frames=3)
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


def test_verify_recomputes_a_sample(dataset, extracted):
    deviations = verify(source_of_data(data_of(dataset)), *encoders(), options(extracted[0]), sample=3)
    assert set(deviations) == {"sentence", "words", "frames", "patches", "audio"}
    assert max(deviations.values()) < 1e-4


def test_verify_finds_a_video_that_changed_since(dataset, extracted, tmp_path):
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


def test_a_run_says_what_comes_from_the_store_and_refuses_other_encoders(extracted):
    store = FeatureStore(extracted[0])
    clip, whisper = encoders()
    assert "text, frames, patches, audio" in check_store(store, clip, whisper)
    with pytest.raises(StoreError, match=r"part 'text' has other settings.*weights"):
        check_store(store, encoders(seed=1)[0])
    with pytest.raises(StoreError, match=r"part 'audio' has other settings.*weights"):
        check_store(store, clip, encoders(seed=1)[1])
    clip.requires_grad_(True)
    with pytest.raises(StoreError, match=r"encoder are trained. Set .*tuning to Frozen"):
        check_store(store, clip)


@torch.no_grad()
def assert_same_text(clip, decoded, read):
    assert torch.equal(decoded.index, read.index)
    assert isinstance(read.text, TextFeatures)
    assert torch.allclose(clip.encode_text(decoded.text, 12).words, read.text.words, atol=1e-5)


@torch.no_grad()
def assert_same_video(clip, whisper, decoded, read):
    assert torch.equal(decoded.index, read.index)
    assert decoded.video_id == read.video_id
    assert isinstance(read.video, VideoFeatures)
    assert torch.allclose(clip.encode_video(decoded.video).frames, read.video.frames, atol=1e-5)
    assert torch.allclose(whisper.encode_audio(decoded.video)[0], read.video.audio, atol=1e-5)


def test_the_same_batches_come_from_the_store_as_from_the_videos(dataset, extracted):
    clip, whisper = encoders()
    raw, stored = data_of(dataset), data_of(dataset, features=str(extracted[0]))
    raw.setup()
    stored.setup()
    pairs = zip(raw.train_dataloader(), stored.train_dataloader(), strict=True)
    for decoded, read in itertools.islice(pairs, 3):
        assert_same_text(clip, decoded.text, read.text)
        assert_same_video(clip, whisper, decoded.video, read.video)
    (texts, videos), (stored_texts, stored_videos) = raw.val_dataloader(), stored.val_dataloader()
    for decoded, read in zip(texts, stored_texts, strict=True):
        assert_same_text(clip, decoded, read)
    for decoded, read in zip(videos, stored_videos, strict=True):
        assert_same_video(clip, whisper, decoded, read)


class Losses(Callback):
    """Callback that records the loss of every step."""

    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.values.append(float(outputs["loss"]))


def trained(data):
    """Losses of a short training of the heads."""
    losses = Losses()
    seed_everything(0)
    encoder = encoders()[0]
    module = CLIP4Clip(
        encoder, optimizer=OptimizerConfig(lr=1e-3), words=12, frames=3, clip4clip=CLIP4ClipOptions(SeqTransf(1))
    )
    trainer = Trainer(
        max_epochs=1, limit_train_batches=6, callbacks=[losses], accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data)
    return losses.values


def test_training_from_the_store_gives_the_losses_of_training_from_videos(dataset, extracted):
    raw = trained(data_of(dataset, audio="none"))
    stored = trained(data_of(dataset, features=str(extracted[0])))
    assert len(raw) == 6
    assert len(set(raw)) == 6
    assert stored == pytest.approx(raw, abs=1e-4)


def test_training_from_the_store_with_an_encoder_that_trains_is_refused(dataset, extracted):
    clip = encoders()[0]
    clip.requires_grad_(True)
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=1)
    module = CLIP4Clip(clip, words=12, frames=3)
    with pytest.raises(StoreError, match="encoder are trained"):
        trainer.fit(module, data_of(dataset, features=str(extracted[0])))


def test_stored_features_need_no_videos(dataset, extracted, tmp_path):
    root = shutil.copytree(dataset, tmp_path / "data", ignore=shutil.ignore_patterns("*.mp4"))
    shutil.rmtree(root / "msrvtt" / "videos")
    with pytest.raises(MissingAssetError):
        data_of(root).setup()
    data = data_of(root, features=str(extracted[0]))
    data.setup()
    assert next(iter(data.train_dataloader())).video.video.frames.shape == (4, 3, 64)


def test_options_that_stored_features_cannot_follow_are_refused(dataset):
    for change in ({"augmentation": "crop-flip"}, {"train_sampling": "segment-random"}):
        with pytest.raises(ValueError, match=r"features 'somewhere' fixes the frames.*recipes/features\.yaml"):
            data_of(dataset, features="somewhere", **change)


def test_extracting_from_stored_features_is_refused(dataset, extracted):
    with pytest.raises(ValueError, match="names a feature store"):
        source_of_data(data_of(dataset, features=str(extracted[0])))


@pytest.mark.parametrize("run", ["extract", "verify", "train"])
def test_the_weights_of_each_encoder_are_hashed_once_per_run(dataset, extracted, run):
    hashed = []
    clip, whisper = encoders()
    for encoder in (clip, whisper):

        def hash_weights(encoder=encoder):
            hashed.append(encoder)
            return type(encoder).fingerprint(encoder)

        encoder.fingerprint = hash_weights
    if run == "train":
        check_store(FeatureStore(extracted[0]), clip, whisper)
    else:
        {"extract": extract, "verify": verify}[run](
            source_of_data(data_of(dataset)), clip, whisper, options(extracted[0])
        )
    assert hashed == [clip, whisper]


def test_numbers_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="shard_size is 0; it must be at least 1"):
        ExtractOptions("x", shard_size=0)
