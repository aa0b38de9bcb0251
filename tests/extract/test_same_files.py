"""A store is used only for the files whose features it contains, and opens only the parts that a method reads."""

import itertools
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from broken_videos import write_video
from extract.small import encoders, options

from tvr_lightning.data.video_folder import VideoFolder
from tvr_lightning.extract.plan import source_of_data
from tvr_lightning.extract.run import extract
from tvr_lightning.store import FeatureStore, StoreError

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


def data(root, **options):
    return VideoFolder(root=str(root), frames=2, words=8, image_size=32, batch_size=2, num_workers=0, **options)


def extracted(root, out, **changes):
    audio_encoder = changes.pop("audio", None)
    source = source_of_data(data(root, **({"audio": "whisper"} if audio_encoder else {})), ["train", "test"])
    return extract(source, encoders()[0], audio_encoder, options(out, **{"what": ["text", "frames"], **changes}))


def features(root, out):
    module = data(root, features=str(out))
    module.setup("test")
    video = module.read_split("test").videos[0]
    return module.video_reader(training=False)(video, None).frames


def test_features_of_another_folder_with_the_same_file_names_are_refused(folders, tmp_path):
    first, second = folders
    extracted(first, tmp_path / "store")
    expected = features(first, tmp_path / "store")
    with pytest.raises(StoreError, match=r"1 of 1 videos are not the files whose frames the feature store .*again"):
        features(second, tmp_path / "store")
    report = extracted(second, tmp_path / "store")
    assert (report.written["frames"], report.kept["frames"]) == (4, 0)
    assert not torch.equal(features(second, tmp_path / "store"), expected)
    with pytest.raises(StoreError, match="videos are not the files whose frames"):
        features(first, tmp_path / "store")
    root = shutil.copytree(first, tmp_path / "data")  # only a replaced file is extracted again
    extracted(root, tmp_path / "other")
    shutil.copyfile(second / "videos" / f"{NAMES[0]}.mp4", root / "videos" / f"{NAMES[0]}.mp4")
    report = extracted(root, tmp_path / "other")
    assert (report.written["frames"], report.kept["frames"]) == (1, 3)
    assert not torch.equal(features(root, tmp_path / "other"), expected)


def test_features_are_read_for_a_copy_and_without_the_videos(folders, tmp_path):
    extracted(folders[0], tmp_path / "store")
    expected = features(folders[0], tmp_path / "store")
    copy = shutil.copytree(folders[0], tmp_path / "copy")
    for path in (copy / "videos").iterdir():
        os.utime(path, (1, 1))
    assert torch.equal(features(copy, tmp_path / "store"), expected)
    assert extracted(copy, tmp_path / "store").kept["frames"] == 4
    shutil.rmtree(copy / "videos")
    (copy / "videos").mkdir()
    assert torch.equal(features(copy, tmp_path / "store"), expected)


def broken_outside_the_digest(path):
    """Bytes of an intact clip and of one that differs only in bytes that the digest does not cover."""
    good = bytearray(path.read_bytes())
    padding = 300_000
    good[:0] = (padding // 2).to_bytes(4, "big") + b"free" + bytes(padding // 2 - 8)
    good += padding.to_bytes(4, "big") + b"free" + bytes(padding - 8)
    offsets = good.index(b"stco") + 12
    good[offsets : offsets + 4] = (int.from_bytes(good[offsets : offsets + 4], "big") + padding // 2).to_bytes(4, "big")
    return bytes(good), bytes(good.replace(b"moov", b"MOOV"))


@pytest.mark.parametrize("versions", [lambda path: (path.read_bytes(), b"no video"), broken_outside_the_digest])
def test_a_skipped_video_is_tried_again_only_if_its_file_changed(folders, tmp_path, versions):
    root = shutil.copytree(folders[0], tmp_path / "data")
    path = root / "videos" / f"{NAMES[1]}.mp4"
    good, bad = versions(path)
    path.write_bytes(bad)
    assert len(extracted(root, tmp_path / "store").skipped) == 1
    again = extracted(root, tmp_path / "store")
    assert (again.retried, again.still_skipped, again.written) == (0, 1, {})
    path.write_bytes(good)
    repaired = extracted(root, tmp_path / "store")
    assert (repaired.retried, repaired.still_skipped, repaired.written["frames"]) == (1, 0, 1)
    assert any("1 were tried again and 0 were not" in line for line in repaired.lines())
    assert FeatureStore(tmp_path / "store").skipped("frames") == {}


def test_an_unfinished_audio_part_affects_only_methods_that_use_audio(folders, tmp_path):
    root, whisper = folders[0], encoders()[1]
    extracted(root, tmp_path / "store", what=["text", "frames", "audio"], audio=whisper, shard_size=1, batch_size=1)
    shards = sorted((tmp_path / "store").glob("audio-*"))
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:-9])
    module = data(root, features=str(tmp_path / "store"))
    module.setup("test")
    assert module.store.parts == ["text", "frames"]
    for message in (
        "audio-00001.*cannot be read",
        r"\d of \d items of part 'audio' are missing.*with: tvr extract again",
    ):
        with_audio = data(root, features=str(tmp_path / "store"), audio="whisper")
        with_audio.trainer = SimpleNamespace(lightning_module=SimpleNamespace(audio_encoder=whisper))
        with pytest.raises(StoreError, match=message):
            with_audio.setup("fit")
        shards[1].unlink(missing_ok=True)
