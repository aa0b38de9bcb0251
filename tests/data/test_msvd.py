import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from tvr_lightning.data.msvd import MSVD, read_captions
from tvr_lightning.data.records import AnnotationError
from tvr_lightning.errors import MissingAssetError

CLIP = "-_hbPLsZvvo_172_179"
CAPTIONS = {CLIP: [["a", "dog", "runs"], ["it", "s", "a", "dog"]], "x_1_2": [["a", "cat"]]}


def write_excerpt(
    root: Path, captions: object = CAPTIONS, listed: str = f"{CLIP}\r\nx_1_2\r\n", protocol: int = 2
) -> Path:
    folder = root / "msvd"
    (folder / "videos").mkdir(parents=True)
    (folder / "test_list.txt").write_bytes(b"\xef\xbb\xbf" + listed.encode())
    (folder / "raw-captions.pkl").write_bytes(pickle.dumps(captions, protocol=protocol))
    return folder


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_tokens_become_captions_and_all_of_them_are_queries(tmp_path, protocol):
    folder = write_excerpt(tmp_path, protocol=protocol)
    data = MSVD(root=str(tmp_path))
    split = data.read_split("test")
    assert [(t.video, t.text) for t in split.texts] == [(0, "a dog runs"), (0, "it s a dog"), (1, "a cat")]
    assert split.videos[0].path == folder / "videos" / f"{CLIP}.avi"
    assert data.validation == "official"


class Payload:
    """Unpickled the usual way, it would make a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_a_pickle_that_wants_to_run_code_is_refused_and_not_run(tmp_path):
    folder = write_excerpt(tmp_path, {CLIP: [[Payload(tmp_path / "made")]]})
    with pytest.raises(AnnotationError, match=r"raw-captions\.pkl: whole file: .*mkdir.*only dicts, lists and strings"):
        read_captions(folder / "raw-captions.pkl")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("captions", "message"),
    [
        ([CAPTIONS], "top level: expected dict, found list"),
        ({CLIP: "a dog"}, f"{CLIP}: expected list, found str"),
        ({CLIP: ["a dog"]}, rf"{CLIP}\[0\]: expected list, found str"),
        ({CLIP: [["a", 3]]}, rf"{CLIP}\[0\]\[1\]: expected str, found int"),
        ({7: []}, "key 7: expected str, found int"),
    ],
)
def test_another_structure_is_an_error_that_names_the_place(tmp_path, captions, message):
    folder = write_excerpt(tmp_path, captions)
    with pytest.raises(AnnotationError, match=message):
        read_captions(folder / "raw-captions.pkl")


@pytest.mark.parametrize("content", [b"", b"no pickle", b"\x80\x02}q", pickle.dumps(CAPTIONS)[:-9]])
def test_a_file_that_is_no_whole_pickle_is_an_error_that_names_it(tmp_path, content):
    file = tmp_path / "raw-captions.pkl"
    file.write_bytes(content)
    with pytest.raises(AnnotationError, match=r"raw-captions\.pkl: whole file: not a pickle of plain captions"):
        read_captions(file)


def test_a_listed_clip_without_captions_is_an_error(tmp_path):
    write_excerpt(tmp_path, listed="y_1_2\n")
    with pytest.raises(AnnotationError, match=r"y_1_2: the video has no captions.*remove it from test_list\.txt"):
        MSVD(root=str(tmp_path)).read_split("test")


def test_real_splits_have_the_published_sizes(test_data, tmp_path):
    data = MSVD(root=str(test_data / "annotations"))
    sizes = {"train": (1200, 48_774), "val": (100, 4290), "test": (670, 27_763)}
    for name, size in sizes.items():
        split = data.read_split(name)
        assert (len(split.videos), len(split.texts)) == size
    shutil.copytree(test_data / "annotations" / "crlf" / "msvd", tmp_path / "msvd")
    (tmp_path / "msvd" / "raw-captions.pkl").symlink_to(data.folder / "raw-captions.pkl")
    assert MSVD(root=str(tmp_path)).read_split("test").texts == split.texts


def test_real_clips_load_with_their_captions(test_data):
    data = MSVD(
        root=str(test_data / "annotations"), on_corrupt="skip", frames=4, image_size=32, batch_size=2, num_workers=0
    )
    with pytest.raises(MissingAssetError, match="668 of the 670 video files of the test split"):
        MSVD(root=str(test_data / "annotations")).setup("test")
    data.setup()
    assert len(data.load_split("train").videos) == 3
    batch = next(iter(data.train_dataloader()))
    assert bool(batch.video.video.frame_mask.any(dim=1).all())
    assert batch.video.video.pixels.float().std() > 10
    videos = list(data.test_dataloader()[1])
    assert sorted(name for b in videos for name in b.video_id) == ["j2Dhf-xFUxU_13_20", "klteYv1Uv9A_27_33"]
    assert sum(len(b.skipped) for b in videos) == 668
    truth = data.ground_truth("test")
    index = torch.cat([b.index for b in videos])
    assert sorted(torch.bincount(truth.video_of_text, minlength=truth.videos)[index].tolist()) == [28, 33]
